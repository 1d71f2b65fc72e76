"""The command line as a person runs it: real processes against a real server.

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

from tests.contract.driver import ROOT, Api, Server

WITHIN_S: Final = 60.0
WEBHOOKS: Final = ROOT / "examples" / "webhooks" / "github-webhooks.jsonl.gz"
COMMAND: Final = [sys.executable, "-m", "topics_server"]


class Ran:
    """What a verb left behind."""

    def __init__(self, code: int, out: bytes, err: bytes) -> None:
        self.code = code
        self.out = out
        self.err = err.decode()

    @property
    def lines(self) -> list[Any]:
        """Standard output as NDJSON; not by msgspec, which refuses numbers like 1e400."""
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
        """Ours without any TOPICS_ name, then the server's URL and `env`."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith("TOPICS_")}
        paths = [str(ROOT / "src"), kept.get("PYTHONPATH", "")]
        kept["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        return {**kept, "TOPICS_URL": self.url, **self.env}

    def __call__(self, *words: str | Path, stdin: bytes = b"") -> Ran:
        """Run a verb to its end."""
        done = subprocess.run(
            [*COMMAND, *map(str, words)],
            input=stdin,
            capture_output=True,
            env=self.environment(),
            cwd=self.directory,
            timeout=WITHIN_S,
            check=False,
        )
        return Ran(done.returncode, done.stdout, done.stderr)

    def good(self, *words: str | Path, stdin: bytes = b"") -> Ran:
        """Run a verb that must succeed."""
        ran = self(*words, stdin=stdin)
        assert ran.code == 0, f"{words}: {ran.code}\n{ran.err}"
        return ran

    def spawn(self, *words: str | Path, **options: Any) -> subprocess.Popen[bytes]:
        """Start a verb and do not wait."""
        return subprocess.Popen(
            [*COMMAND, *map(str, words)],
            env=self.environment(),
            cwd=self.directory,
            **{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, **options},
        )


@pytest.fixture(scope="session")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """A client of the session's server."""
    server = Server(tmp_path_factory.mktemp("cli"))
    yield server.start()
    server.stop()


@pytest.fixture
def topics(api: Api, tmp_path: Path) -> Topics:
    """The command, talking to the session's server."""
    return Topics(api.url, tmp_path)


@pytest.fixture
def alone(tmp_path: Path) -> Topics:
    """The command without any server: nobody listens on port 1."""
    return Topics("http://127.0.0.1:1", tmp_path)


MakeServer = Callable[[Mapping[str, str]], Server]


@pytest.fixture
def own(tmp_path: Path) -> Iterator[MakeServer]:
    """A factory of servers of one's own, not started; what still runs at the end is stopped."""
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
    """A topic name of the test's own."""
    return f"t-{abs(hash(request.node.nodeid)):x}"
