"""A real nginx with the shipped configuration in front of one of our servers.

Owns the certificate (made by `docker/make-certificate.sh`), the few replacements in the shipped
files (each must be found, so that they stay in step), and the process. nginx logs to `access_log`
and `error_log`. Ports are chosen here; only the process started here is ended.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.contract.driver import ROOT
from tests.ports import lasting_port

INSTALL: Final = "no nginx here; on Debian: apt-get install nginx-light openssl curl"
SHIPPED: Final = ROOT / "docker" / "nginx"
WITHIN_S: Final = 20.0


def program() -> str | None:
    """The path of nginx; Debian installs it where only root's PATH leads."""
    return shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")


def filled(text: str, replacements: dict[str, str]) -> str:
    """The text with every replacement; each replaced text must occur."""
    for old, new in replacements.items():
        assert old in text, f"the shipped configuration does not say {old!r} any more"
        text = text.replace(old, new)
    return text


@dataclass
class Proxy:
    """The running nginx. `url` is its HTTPS address; `plain_port` redirects there."""

    directory: Path
    port: int
    plain_port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The address for clients."""
        return f"https://localhost:{self.port}"

    @property
    def certificate(self) -> Path:
        """The certificate that a client has to trust."""
        return self.directory / "tls" / "certificate.pem"

    @property
    def access_log(self) -> Path:
        """One JSON object a request."""
        return self.directory / "access.log"

    @property
    def logged(self) -> str:
        """All of nginx's log lines."""
        names = ("access.log", "error.log", "output.log")
        return "".join((self.directory / name).read_text(errors="replace") for name in names)

    def context(self) -> ssl.SSLContext:
        """Trusts only this proxy."""
        return ssl.create_default_context(cafile=self.certificate)

    def connect(self, protocol: str = "http/1.1") -> ssl.SSLSocket:
        """A TLS connection for raw bytes."""
        context = self.context()
        context.set_alpn_protocols([protocol])
        plain = socket.create_connection(("127.0.0.1", self.port), timeout=WITHIN_S)
        return context.wrap_socket(plain, server_hostname="localhost")

    def write_configuration(self, upstream_port: int) -> Path:
        """The shipped files with this test's ports and paths."""
        mine = str(self.directory)
        main = (SHIPPED / "nginx.conf").read_text()
        replacements = {
            "/tmp/nginx": f"{mine}/nginx",
            "/tmp/topics.conf": f"{mine}/topics.conf",
            "error_log stderr": f"error_log {mine}/error.log",
            "worker_processes auto": "worker_processes 1",
            "worker_rlimit_nofile 65536;": "",
            "worker_connections 32768": "worker_connections 512",
        }
        path = self.directory / "nginx.conf"
        path.write_text(filled(main, replacements))
        topics = (SHIPPED / "topics.conf").read_text()
        replacements = {
            "server 127.0.0.1:4000;": f"server 127.0.0.1:{upstream_port};",
            "listen [::]:443 ssl http2 default_server;": "",
            "listen [::]:80 default_server;": "",
            "listen 443 ssl": f"listen 127.0.0.1:{self.port} ssl",
            "listen 80 default_server;": f"listen 127.0.0.1:{self.plain_port} default_server;",
            "/etc/nginx/tls/": f"{mine}/tls/",
            "/var/log/nginx/topics.error.log": f"{mine}/error.log",
            "/var/log/nginx/topics.access.log": f"{mine}/access.log",
        }
        (self.directory / "topics.conf").write_text(filled(topics, replacements))
        return path

    def start(self, path: str, upstream_port: int) -> None:
        """Make the certificate, start nginx and wait until it accepts connections."""
        self.directory.mkdir(parents=True)
        made = [ROOT / "docker" / "make-certificate.sh", self.directory / "tls"]
        subprocess.run(made, check=True, capture_output=True, timeout=WITHIN_S)
        configuration = self.write_configuration(upstream_port)
        # If root starts nginx, it runs as a user that may not enter our folder.
        user = "user root; " if os.geteuid() == 0 else ""
        command = [path, "-p", str(self.directory), "-c", str(configuration)]
        with (self.directory / "output.log").open("wb") as output:
            self.process = subprocess.Popen(
                [*command, "-g", f"{user}daemon off;"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + WITHIN_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                assert self.process.poll() is None, f"nginx ended:\n{self.logged}"
                assert time.monotonic() < deadline, f"nginx takes no connections:\n{self.logged}"
                time.sleep(0.02)

    def stop(self) -> None:
        """End nginx and its worker."""
        if self.process is None:
            return
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(WITHIN_S)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.process = None


@contextlib.contextmanager
def running(path: str, directory: Path, upstream_port: int) -> Iterator[Proxy]:
    """An nginx in front of the server that listens, or will listen, on this port."""
    proxy = Proxy(directory, lasting_port(), lasting_port())
    try:
        proxy.start(path, upstream_port)
        yield proxy
    finally:
        proxy.stop()
