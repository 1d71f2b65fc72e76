"""The shipped topics.conf on a Debian machine, unmodified: its paths, its ports, its default site.

`test_host.py` runs it as a program inside namespaces of its own (`unshare --mount --net`), so that
/etc/nginx, /var/log/nginx and the ports 80, 443 and 4000 belong to it alone. nginx has a socket as
standard output and error, as under systemd. Prints its observations as one JSON object.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

from tests.contract.driver import ROOT, Server

SHIPPED: Final = ROOT / "docker" / "nginx" / "topics.conf"
# Folders of the machine that nginx writes, or that it reads and the test changes.
OURS: Final = ("/etc/nginx", "/var/log/nginx", "/var/lib/nginx", "/run")
DEFAULT_SITE: Final = Path("/etc/nginx/sites-enabled/default")
LOGS: Final = Path("/var/log/nginx")
# Starts nginx as the package's unit does, but in the foreground, so that its output stays the
# socket.
COMMAND: Final = ("nginx", "-g", "daemon off;")


def take_over(folder: Path) -> None:
    """Mount our copies over the machine's folders; bring loopback up."""
    for index, place in enumerate(OURS):
        mine = folder / f"place-{index}"
        mine.mkdir()
        if place == "/etc/nginx":
            shutil.copytree(place, mine, symlinks=True, dirs_exist_ok=True)
        subprocess.run(["mount", "--bind", str(mine), place], check=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def tested() -> list[str]:
    """The complaints of `nginx -t`; empty if there are none."""
    done = subprocess.run(["nginx", "-t"], capture_output=True, text=True, check=False)
    return [] if done.returncode == 0 else done.stderr.splitlines()


def start(output: socket.socket) -> subprocess.Popen[bytes]:
    """Start NGINX with a socket as standard output and error; return once it accepts
    connections.
    """
    process = subprocess.Popen(
        COMMAND, stdin=subprocess.DEVNULL, stdout=output.fileno(), stderr=output.fileno()
    )
    for _ in range(1_000):
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", 443), timeout=1).close()
            return process
        if process.poll() is not None:
            break
        time.sleep(0.02)
    raise AssertionError(f"nginx takes no connections: {process.poll()}")


def ask(method: str, path: str, *, tls: bool, host: str = "localhost") -> list[Any]:
    """(status, Location) of a request."""
    connection: http.client.HTTPConnection
    if tls:
        trust = ssl.create_default_context(cafile="/etc/nginx/tls/certificate.pem")
        connection = http.client.HTTPSConnection("localhost", 443, timeout=20, context=trust)
    else:
        connection = http.client.HTTPConnection("127.0.0.1", 80, timeout=20)
    with contextlib.closing(connection):
        connection.request(method, path, headers={"Host": host})
        answer = connection.getresponse()
        answer.read()
        return [answer.status, answer.getheader("Location")]


def without_host() -> str:
    """The status line for an HTTP/1.0 request without a host."""
    with socket.create_connection(("127.0.0.1", 80), timeout=20) as sock:
        sock.sendall(b"GET /v0/health HTTP/1.0\r\n\r\n")
        return sock.recv(1_000).decode("latin-1").partition("\r\n")[0]


def logged() -> list[Json]:
    """The lines of the access log."""
    lines = (LOGS / "topics.access.log").read_text().splitlines()
    return [json.loads(line) for line in lines]


Json = dict[str, Any]


def main() -> None:
    """Follow docs/OPERATIONS.md and print the observations."""
    folder = Path(sys.argv[1])
    seen: Json = {}
    take_over(folder)
    made = [str(ROOT / "docker" / "make-certificate.sh"), "/etc/nginx/tls"]
    subprocess.run(made, check=True, capture_output=True)
    server = Server(folder / "server", {"TOPICS_PORT": "4000"})
    server.start()
    ours, theirs = socket.socketpair()
    process: subprocess.Popen[bytes] | None = None
    try:
        shutil.copy(SHIPPED, "/etc/nginx/conf.d/topics.conf")
        if not DEFAULT_SITE.exists():
            # If the file is missing (another distribution, or removed), write a shortened form of
            # Debian's file.
            DEFAULT_SITE.parent.mkdir(exist_ok=True)
            site = "server { listen 80 default_server; root /var/www/html; server_name _; }\n"
            DEFAULT_SITE.write_text(site)
        seen["with the default site"] = tested()
        DEFAULT_SITE.unlink()
        seen["without it"] = tested()
        process = start(theirs)
        output = os.readlink(f"/proc/{process.pid}/fd/1")
        seen["standard output"] = output.partition(":")[0]
        seen["plain"] = ask("POST", "/v0/topics/a?x=%20y", tls=False, host="events.example:80")
        seen["nameless"] = without_host()
        seen["challenge"] = ask("GET", "/.well-known/acme-challenge/none", tls=False)
        seen["health"] = ask("GET", "/v0/health", tls=True)
        # As logrotate does: the file is moved, and nginx opens a new one.
        (LOGS / "topics.access.log").rename(LOGS / "topics.access.log.1")
        for signal in ("reopen", "reload"):
            done = subprocess.run(
                ["nginx", "-s", signal], capture_output=True, text=True, check=False
            )
            seen[signal] = [done.returncode, done.stderr]
            time.sleep(1)
            seen[f"after {signal}"] = ask("GET", f"/v0/health?{signal}", tls=True)
        seen["workers end"] = process.poll()
        process.terminate()
        seen["end"] = process.wait(20)
        process = start(theirs)
        seen["after a restart"] = ask("GET", "/v0/ready", tls=True)
        process.terminate()
        process.wait(20)
        process = None
        seen["logged"] = [[line["path"], line["status"]] for line in logged()]
        seen["logs"] = sorted(path.name for path in LOGS.iterdir())
    finally:
        if process is not None:
            process.kill()
        server.stop()
    theirs.close()
    ours.settimeout(5)
    said = b"".join(iter(lambda: ours.recv(65_536), b""))
    seen["said"] = [
        line for line in said.decode().splitlines() if "[emerg]" in line or "[alert]" in line
    ]
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
