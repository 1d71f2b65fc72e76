"""The command line as a user runs it: real processes against a real server.

`topics` runs a verb and waits; `server` is one server for the whole session, `own` makes more.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from tests import forks
from tests.contract.driver import ROOT, Api, Server

WITHIN_S: Final = 60.0
WEBHOOKS: Final = ROOT / "examples" / "webhooks" / "github-webhooks.jsonl.gz"
COMMAND: Final = [sys.executable, "-m", "topics_server"]


class Ran:
    """The output and exit code of a verb."""

    def __init__(self, code: int, out: bytes, err: bytes) -> None:
        self.code = code
        self.out = out
        self.err = err.decode()

    @property
    def lines(self) -> list[Any]:
        """Standard output as NDJSON; not parsed by msgspec, which refuses numbers like 1e400."""
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def value(self) -> Any:
        """The only line of standard output."""
        (value,) = self.lines
        return value

    @property
    def message(self) -> str:
        """The only line of standard error."""
        (line,) = self.err.splitlines()
        return line


class Topics:
    """Runs `topics` with a server in its environment."""

    def __init__(self, url: str, directory: Path) -> None:
        self.url = url
        self.directory = directory
        self.env: dict[str, str] = {}

    def environment(self) -> dict[str, str]:
        """Our environment without any TOPICS_ name, then the server's URL and `env`."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith("TOPICS_")}
        paths = [str(ROOT / "src"), kept.get("PYTHONPATH", "")]
        kept["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        return {**kept, "TOPICS_URL": self.url, **self.env}

    def __call__(self, *words: str | Path, stdin: bytes = b"") -> Ran:
        """Run a verb to its end."""
        with self.spawn(*words, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as verb:
            try:
                out, err = verb.communicate(stdin, WITHIN_S)
            finally:
                verb.kill()
        return Ran(verb.returncode, out, err)

    def good(self, *words: str | Path, stdin: bytes = b"") -> Ran:
        """Run a verb that must succeed."""
        ran = self(*words, stdin=stdin)
        assert ran.code == 0, f"{words}: {ran.code}\n{ran.err}"
        return ran

    def spawn(self, *words: str | Path, **options: Any) -> subprocess.Popen[bytes]:
        """Start a verb and do not wait."""
        streams: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            **options,
        }
        return forks.start(
            [str(word) for word in words], self.environment(), self.directory, **streams
        )


@pytest.fixture(scope="session")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """A client of the session's server."""
    server = Server(tmp_path_factory.mktemp("cli"))
    yield server.start()
    server.stop()


@pytest.fixture
def topics(api: Api, tmp_path: Path) -> Topics:
    """The command, with the session's server."""
    return Topics(api.url, tmp_path)


@pytest.fixture
def alone(tmp_path: Path) -> Topics:
    """The command without a server: no process listens on port 1."""
    return Topics("http://127.0.0.1:1", tmp_path)


MakeServer = Callable[[Mapping[str, str]], Server]


@pytest.fixture
def own(tmp_path: Path) -> Iterator[MakeServer]:
    """A factory of further servers, not started; those still running at the end are stopped."""
    servers: list[Server] = []

    def make(env: Mapping[str, str]) -> Server:
        servers.append(Server(tmp_path / f"server-{len(servers)}", env))
        return servers[-1]

    yield make
    for server in servers:
        if server.process is not None:
            server.stop()


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A topic name for this test alone."""
    return f"t-{abs(hash(request.node.nodeid)):x}"
