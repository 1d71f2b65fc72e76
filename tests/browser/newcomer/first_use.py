"""Times a first use: `./run first-use` follows README and docs/CLIENT.md in a fresh clone.

Clone, set up and start, append, see it live in the console, run a worker, query a view, draw a
picture: it prints the seconds of each step. The commands and programs are those of the pages; only
the port differs. Needs git, curl and Chromium, and an index of packages for the set-up.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from tests.browser import chromium
from tests.contract.driver import ROOT

USUAL: Final = "4000"
WITHIN_S: Final = 900.0
TEXT: Final = "document.getElementById('main').innerText"
STEPS: Final = ("clone", "start", "append", "live", "worker", "view", "picture")


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        found: int = probe.getsockname()[1]
        return found


def command_of(page: Path, part: str) -> str:
    """The first command of a page's consoles that has this text."""
    lines = page.read_text("utf-8").splitlines()
    return next(line[2:] for line in lines if line.startswith("$ ") and part in line)


def program_of(page: Path, part: str) -> str:
    """The first Python program of a page that has this text."""
    blocks = re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    return next(str(block) for block in blocks if part in block)


class FirstUse:
    """One first use of the checkout at `root`; `seconds` are those of its steps."""

    def __init__(self, root: Path, start: Sequence[str], demo: Sequence[str], python: str) -> None:
        self._root = root
        self._start = start
        self._demo = demo
        self._python = python
        self._port = str(free_port())
        self._env = {
            name: value for name, value in os.environ.items() if not name.startswith("TOPICS_")
        }
        self.seconds: dict[str, float] = {}
        self.picture = ""

    def run(self, data: Path) -> None:
        """Do all steps; raises at the first step that does not do what the pages say."""
        with contextlib.ExitStack() as held:
            self.timed("start", lambda: held.enter_context(self._serving(data)))
            self.timed("append", self._append)
            browser = chromium.program()
            if browser is None:
                raise SystemExit(chromium.INSTALL)
            self.timed("live", lambda: self._live(browser))
            self.timed("worker", self._worker)
            self.timed("view", self._view)
        self.timed("picture", lambda: self._draw(data))

    def timed(self, step: str, do: Callable[[], object]) -> None:
        """Do a step, and keep its seconds."""
        begin = time.monotonic()
        do()
        self.seconds[step] = time.monotonic() - begin
        print(f"{step:8} {self.seconds[step]:7.1f} s", flush=True)

    @contextlib.contextmanager
    def _serving(self, data: Path) -> Iterator[None]:
        words = [*self._start, "--port", self._port, "--data-dir", str(data / "store")]
        with (data / "server.log").open("wb") as log:
            process = subprocess.Popen(
                words,
                cwd=self._root,
                env=self._env,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            try:
                self._wait_ready(process, data / "server.log")
                yield
            finally:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(60)

    def _wait_ready(self, process: subprocess.Popen[bytes], log: Path) -> None:
        deadline = time.monotonic() + WITHIN_S
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{self._port}/v0/ready").close()
                return
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the server did not start:\n{log.read_text('utf-8')}")
            time.sleep(0.05)

    def _here(self, text: str) -> str:
        """A command or a program of a page, for this server."""
        found = re.sub(rf"(127\.0\.0\.1|localhost):{USUAL}", rf"127.0.0.1:{self._port}", text)
        assert found != text, "it names the usual server"
        return found

    def _sh(self, command: str) -> str:
        done = subprocess.run(
            ["sh", "-c", command],
            cwd=self._root,
            env=self._env,
            capture_output=True,
            text=True,
            check=True,
            timeout=WITHIN_S,
        )
        return done.stdout

    def _run(self, program: str) -> str:
        done = subprocess.run(
            [self._python, "-c", self._here(program)],
            cwd=self._root,
            env=self._env,
            capture_output=True,
            text=True,
            check=False,
            timeout=WITHIN_S,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def _append(self) -> None:
        command = command_of(self._root / "README.md", "/v0/topics/orders")
        answer = json.loads(self._sh(self._here(command)))
        assert answer["head_seq"] == 2, answer

    def _live(self, browser: str) -> None:
        """The console shows a record that comes while it is open."""
        with (
            chromium.running(browser) as program,
            program.page(f"http://127.0.0.1:{self._port}/console#/topic/orders/live") as page,
        ):
            page.wait(f"{TEXT}.includes('live at')", "the console follows the topic")
            command = command_of(self._root / "README.md", "/v0/topics/orders")
            self._sh(self._here(command.replace("order-7", "order-9")))
            page.wait(f"{TEXT}.includes('order-9')", "the console shows the record")

    def _worker(self) -> None:
        printed = self._run(program_of(self._root / "docs" / "CLIENT.md", "@client.worker"))
        assert printed == "to ada\n", printed

    def _view(self) -> None:
        printed = self._run(program_of(self._root / "docs" / "CLIENT.md", "carts.query"))
        assert "'items': 2" in printed or '"items":2' in printed, printed

    def _draw(self, data: Path) -> None:
        words = [*self._demo, "--once", "--no-open", "--port", "0", "--data-dir"]
        subprocess.run(
            [*words, str(data / "demo")],
            cwd=self._root,
            env=self._env,
            check=True,
            capture_output=True,
            timeout=WITHIN_S,
        )
        self.picture = (data / "demo" / "events.svg").read_text("utf-8")


def main() -> None:
    """Clone this repository and use the clone."""
    with tempfile.TemporaryDirectory(prefix="topics-first-use-") as folder:
        root = Path(folder) / "topics-server"
        run = str(root / "run")
        use = FirstUse(root, [run, "serve"], [run, "demo"], str(root / ".venv/bin/python"))
        clone = ["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(root)]
        use.timed("clone", lambda: subprocess.run(clone, check=True))
        (Path(folder) / "data").mkdir()
        use.run(Path(folder) / "data")
        print(f"{'all':8} {sum(use.seconds.values()):7.1f} s")


if __name__ == "__main__":
    main()
