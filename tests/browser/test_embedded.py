"""The FastAPI application of `examples/embed` under plain uvicorn, its page in a real browser."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.browser.chromium import Browser
from tests.contract.driver import ROOT
from tests.ports import lasting_port

EXAMPLE = ROOT / "examples" / "embed"
LINES = 'document.querySelectorAll("li").length'


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The URL and the process of the example."""
    if importlib.util.find_spec("fastapi") is None:
        pytest.skip("FastAPI is not installed; it is in the extra dev")
    port = lasting_port()
    env = {key: value for key, value in os.environ.items() if not key.startswith("TOPICS_")}
    env |= {"TOPICS_DATA_DIR": str(tmp_path / "data"), "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "uvicorn", "shop:app", "--port", str(port)]
    process = subprocess.Popen(command, cwd=EXAMPLE, env=env)
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 30
    while True:
        try:
            httpx.get(f"{url}/events/v0/ready", trust_env=False).raise_for_status()
            break
        except httpx.HTTPError:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
    yield url, process
    if process.poll() is None:
        process.kill()
        process.wait()


def test_the_example_is_short_and_that_of_the_docs() -> None:
    text = (EXAMPLE / "shop.py").read_text()
    assert text.partition("\n\n")[2] in (ROOT / "docs" / "EMBEDDING.md").read_text()
    code = [
        line
        for line in text.splitlines()
        if line and not line.startswith(('"""', "from ", "import "))
    ]
    assert len(code) <= 20


def test_an_order_is_appended_and_streamed(shop: tuple[str, subprocess.Popen[bytes]]) -> None:
    """Without a browser: the route appends, the stream sends the record, and a signal ends both."""
    url, process = shop
    with httpx.Client(base_url=url, trust_env=False, timeout=10) as client:
        assert client.post("/orders/7").json()["first_seq"] == 1
        address = "/events/v1/stream/orders?offset=-1&live=sse"
        with client.stream("GET", address) as stream:
            assert stream.headers["content-type"] == "text/event-stream"
            lines = stream.iter_lines()
            assert next(line for line in lines if line.startswith("data:")) == 'data:[{"order":7}]'
            client.post("/orders/8").raise_for_status()
            assert 'data:[{"order":8}]' in lines
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert list(lines) is not None, "the stream ends as a whole response"
        process.wait(10)
    assert time.monotonic() - began < 5


def test_the_page_shows_orders(shop: tuple[str, subprocess.Popen[bytes]], browser: Browser) -> None:
    url, _ = shop
    with browser.page(f"{url}/") as page:
        page.wait("document.querySelector('button') !== null", "the button")
        for count in (1, 2, 3):
            page.evaluate('document.querySelector("button").click()')
            page.wait(f"{LINES} === {count}", f"{count} orders")
        httpx.post(f"{url}/orders/99", trust_env=False).raise_for_status()
        page.wait(f"{LINES} === 4", "the order of another client")
        page.reload()
        page.wait(f"{LINES} === 4", "all orders, read again")
        shown = page.evaluate('[...document.querySelectorAll("li")].map((li) => li.textContent)')
        assert shown == ["order 1", "order 2", "order 3", "order 99"]
        assert page.exceptions == []
