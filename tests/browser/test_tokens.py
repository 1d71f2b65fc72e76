"""`examples/coordination/tokens.html` in a real browser: no word missing or twice, over all
restarts.

The test kills the server under the page, kills and restarts the writer, and reloads the page.
"""

from __future__ import annotations

import functools
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.chromium import Browser, Page
from tests.browser.conftest import Quiet
from tests.contract.driver import ROOT, Server
from tests.ports import lasting_port

EXAMPLE = ROOT / "examples" / "coordination"
TEXT = "".join(f"  word {number} – «ü»\n" for number in range(60)) + "\nthe end\n"
SHOWN = 'document.getElementById("text").textContent'
STATE = 'document.getElementById("state").textContent'


@pytest.fixture
def origin() -> Iterator[str]:
    """The example's folder, served as by `python -m http.server`."""
    handler = functools.partial(Quiet, directory=str(EXAMPLE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        serve = functools.partial(server.serve_forever, poll_interval=0.05)
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def writer(url: str, pause_s: float) -> subprocess.Popen[bytes]:
    """Run `tokens.py`, which writes `TEXT`."""
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLE / "tokens.py"), url, "--pause", str(pause_s)],
        stdin=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert process.stdin is not None
    process.stdin.write(TEXT.encode())
    process.stdin.close()
    return process


def wait_for_words(page: Page, count: int) -> None:
    """Wait until the page shows this many words, and no others."""
    page.wait(f'{SHOWN}.includes("word {count} ")', f"{count} words")
    assert TEXT.startswith(page.evaluate(SHOWN))


def test_the_page_and_the_writer_go_on_where_they_were(
    browser: Browser, origin: str, tmp_path: Path
) -> None:
    env = {"TOPICS_CORS_ORIGINS": origin, "TOPICS_PORT": str(lasting_port())}
    server = Server(tmp_path / "server", env)
    server.start()
    url = f"{server.api.url}/v1/stream/answers/1"
    answer = server.api.http.put(url, headers={"Content-Type": "text/plain; charset=utf-8"})
    assert answer.status_code == 201
    writers: list[subprocess.Popen[bytes]] = []
    try:
        with browser.page(f"{origin}/tokens.html?stream={url}") as page:
            first = writer(url, 0.02)
            writers.append(first)
            wait_for_words(page, 5)
            first.kill()
            first.wait()
            page.reload()
            before = len(server.api.http.get(url, params={"offset": "-1"}).text)
            second = writer(url, 0.05)
            writers.append(second)
            page.wait(f"{SHOWN}.length > {before + 30}", "more words")
            assert TEXT.startswith(page.evaluate(SHOWN))
            server.signal(signal.SIGKILL)
            page.wait(f'{STATE}.startsWith("away")', "the page notices")
            server.start()
            assert second.wait(60) == 0
            page.wait(f'{STATE} === "complete"', "the end")
            assert page.evaluate(SHOWN) == TEXT
            page.evaluate("0")
            assert page.exceptions == [], json.dumps(page.exceptions)
    finally:
        for process in writers:
            process.kill()
            process.wait()
        server.signal(signal.SIGKILL)
