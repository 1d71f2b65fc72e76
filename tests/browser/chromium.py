"""A headless Chromium, driven by the DevTools protocol: opens pages and evaluates expressions in
them.

The module finds the program, starts it with a profile of its own in a temporary folder, and opens
one socket for each page. All calls block; every wait is bounded. The module ends only the process
group that it started.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import websockets.sync.client
from websockets.sync.connection import Connection

NAMES: Final = ("chromium", "chromium-browser", "google-chrome")
INSTALL: Final = "no Chromium here; on Debian: apt-get install chromium"
WITHIN_S: Final = 60.0
# The first start reads hundreds of megabytes from the disk.
_START_WITHIN_S: Final = 120.0
FLAGS: Final = """--headless=new --no-sandbox --disable-gpu --disable-quic --disable-dev-shm-usage
    --no-first-run --disable-background-networking --disable-component-update --disable-sync
    --disable-default-apps --disable-extensions --metrics-recording-only --no-proxy-server
    --remote-debugging-port=0""".split()


def program() -> str | None:
    """The path of the first installed Chromium."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._number = 0
        self.exceptions: list[str] = []  # exceptions that no code of the page caught

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one command of the protocol and return its answer."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": params}
        self._connection.send(json.dumps(command))
        deadline = time.monotonic() + WITHIN_S
        while True:
            text = self._connection.recv(timeout=max(deadline - time.monotonic(), 0.001))
            answer = json.loads(text)
            if answer.get("method") == "Runtime.exceptionThrown":
                self.exceptions.append(json.dumps(answer["params"]["exceptionDetails"])[:1000])
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                found: dict[str, Any] = answer["result"]
                return found

    def evaluate(self, script: str) -> Any:
        """The value of an expression; a promise is awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, f"{script}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def reload(self, within_s: float = WITHIN_S) -> None:
        """Reload the page; returns once it is loaded."""
        self.evaluate("window.isLeft = true")
        self.call("Page.reload")
        deadline = time.monotonic() + within_s
        while True:
            try:
                if self.evaluate('!window.isLeft && document.readyState === "complete"'):
                    return
            except AssertionError as error:
                # Between two documents there is no page that could evaluate an expression.
                if time.monotonic() > deadline:
                    raise AssertionError(f"not loaded anew within {within_s} s") from error
            assert time.monotonic() < deadline, f"not loaded anew within {within_s} s"
            time.sleep(0.05)

    def wait(self, script: str, what: str, within_s: float = WITHIN_S) -> None:
        """Wait until an expression is true; fail with the content of the page."""
        deadline = time.monotonic() + within_s
        while not self.evaluate(script):
            if time.monotonic() > deadline:
                shown = self.evaluate("document.body.innerText")[:600]
                raise AssertionError(f"not within {within_s} s: {what}; the page shows:\n{shown}")
            time.sleep(0.05)


class Browser:
    """The running program; see `running`."""

    def __init__(self, socket_url: str) -> None:
        self._url = socket_url
        self._base = socket_url.partition("/devtools/")[0]

    @contextlib.contextmanager
    def page(self, url: str, first: str = "") -> Iterator[Page]:
        """Open a tab with this page; it is closed at the end. `first` runs before its scripts."""
        with self._connect(self._url) as browser:
            target = Page(browser).call("Target.createTarget", url="about:blank")["targetId"]
            with self._connect(f"{self._base}/devtools/page/{target}") as connection:
                page = Page(connection)
                page.call("Runtime.enable")
                if first:
                    page.call("Page.enable")
                    page.call("Page.addScriptToEvaluateOnNewDocument", source=first)
                page.call("Page.navigate", url=url)
                is_loaded = f"location.href === {json.dumps(url)} && document.readyState"
                page.wait(f'{is_loaded} === "complete"', f"{url} is loaded")
                yield page

    def close(self) -> None:
        """End the program."""
        with self._connect(self._url) as browser:
            Page(browser).call("Browser.close")

    def _connect(self, url: str) -> contextlib.AbstractContextManager[Connection]:
        return websockets.sync.client.connect(url, max_size=None, compression=None, proxy=None)


@contextlib.contextmanager
def running(path: str, *flags: str) -> Iterator[Browser]:
    """Start the program, and end it with all its processes."""
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as folder:
        log = Path(folder) / "log.txt"
        profile = Path(folder) / "profile"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [path, *FLAGS, *flags, f"--user-data-dir={profile}", "about:blank"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "HOME": folder, "XDG_CONFIG_HOME": folder, "TMPDIR": folder},
                start_new_session=True,
            )
        try:
            browser = Browser(_socket_url(process, profile / "DevToolsActivePort", log))
            yield browser
            browser.close()  # lets the program end its own processes
            process.wait(WITHIN_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _socket_url(process: subprocess.Popen[bytes], file: Path, log: Path) -> str:
    deadline = time.monotonic() + _START_WITHIN_S
    while True:
        lines = file.read_text().split() if file.exists() else []
        if len(lines) == 2:
            return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
        if process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(f"Chromium did not start:\n{log.read_text(errors='replace')}")
        time.sleep(0.05)
