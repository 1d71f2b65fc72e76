"""`./run test-s3`: the tests of this folder against a real S3 server, versitygw.

Go builds the server from its module and checks the module's sums with Go's checksum database; only
the binary in `.s3` is kept. `TOPICS_TEST_S3` names another endpoint, with the same keys. The
benchmark of Spark on a cluster uses the same server.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import httpx

from tests.cloud.signing import KEY, SECRET
from tests.ports import lasting_port

_MODULE: Final = "github.com/versity/versitygw"
_VERSION: Final = "v1.8.0"
_ROOT: Final = Path(__file__).resolve().parents[2]
_STARTS_WITHIN_S: Final = 30.0


def _built() -> Path:
    """The server's binary; builds it if it is missing."""
    folder = _ROOT / ".s3" / _VERSION
    binary = folder / "versitygw"
    if not binary.exists():
        if shutil.which("go") is None:
            sys.exit("test-s3: needs Go to build versitygw, or an endpoint in TOPICS_TEST_S3")
        command = ["go", "install", f"{_MODULE}/cmd/versitygw@{_VERSION}"]
        subprocess.run(command, env={**os.environ, "GOBIN": str(folder)}, check=True)
    return binary


def _wait(endpoint: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _STARTS_WITHIN_S
    while server.poll() is None and time.monotonic() < deadline:
        try:
            httpx.get(endpoint)
        except httpx.TransportError:
            time.sleep(0.1)
        else:
            return
    sys.exit("test-s3: versitygw does not start")


def _tests(endpoint: str, words: list[str]) -> int:
    command = [sys.executable, "-m", "pytest", "-n", "0", "tests/cloud", *words]
    environment = {**os.environ, "TOPICS_TEST_S3": endpoint}
    return subprocess.run(command, cwd=_ROOT, env=environment, check=False).returncode


@contextmanager
def gateway() -> Iterator[str]:
    """Build and start an empty server; yields its address. Exits if that fails."""
    binary, port = _built(), lasting_port()
    endpoint = f"http://127.0.0.1:{port}"
    keys = {"ROOT_ACCESS_KEY": KEY, "ROOT_SECRET_KEY": SECRET}
    with tempfile.TemporaryDirectory(prefix="topics-s3-") as folder:
        server = subprocess.Popen(
            [binary, "--quiet", "--port", f"127.0.0.1:{port}", "posix", folder],
            env={**os.environ, **keys},
        )
        try:
            _wait(endpoint, server)
            yield endpoint
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait()


def main(words: list[str]) -> int:
    """Run the tests against the endpoint in `TOPICS_TEST_S3`, or else against a gateway."""
    if os.environ.get("TOPICS_TEST_S3"):
        return _tests(os.environ["TOPICS_TEST_S3"], words)
    with gateway() as endpoint:
        return _tests(endpoint, words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
