"""The dashboard of the examples: live queries of a view in a real browser, over a kill -9."""

from __future__ import annotations

import functools
import http.server
import json
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.browser.chromium import Browser, Page
from tests.browser.conftest import Quiet
from tests.browser.test_pages import EVENTS, TOPIC, append, wait_for_state
from tests.contract.driver import ROOT, Server, good
from tests.ports import lasting_port
from topics_server.cli.views.definition_file import parse

FOLDER: Final = ROOT / "examples" / "dashboard"
TOTALS: Final = """["events", "kinds", "repositories", "senders"].map(
    (id) => Number(document.getElementById(id).textContent))"""
RECENT: Final = """[...document.querySelectorAll("#recent tr")].map(
    (row) => [...row.children].filter((cell) => cell.className !== "narrow").map(
        (cell) => cell.textContent))"""
BARS: Final = """[...document.querySelectorAll("#%s li")].map(
    (line) => [...line.querySelectorAll("span")].map((cell) => cell.textContent))"""
# The events of each column of the chart.
COLUMNS: Final = """[...document.querySelectorAll("#by_time i")].map(
    (column) => Number(column.title.split(": ")[1]))"""


@pytest.fixture
def origin() -> Iterator[str]:
    """The folder of the dashboard, served as `python -m http.server` serves it."""
    handler = functools.partial(Quiet, directory=str(FOLDER))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def viewed(tmp_path: Path, origin: str) -> Iterator[Server]:
    """A server with the view of the dashboard."""
    env = {"TOPICS_CORS_ORIGINS": origin, "TOPICS_PORT": str(lasting_port())}
    made = Server(tmp_path / "server", env)
    made.start()
    good(made.api.put(TOPIC))
    body = parse((FOLDER / "activity.sql").read_text(encoding="utf-8"), "activity.sql")
    good(made.api.http.put(f"/v0/topics/{TOPIC}/views/activity", json=body))
    yield made
    if made.process is not None:
        made.signal(signal.SIGKILL)


def _rows(events: list[dict[str, Any]], most: int, path: tuple[str, ...]) -> list[list[str]]:
    """The most frequent values at a path of the events, as the page shows them."""
    found: Counter[str] = Counter()
    for event in events:
        value: Any = event
        for name in path:
            value = (value or {}).get(name)
        if value is not None:
            found[value] += 1
    ordered = sorted(found.items(), key=lambda item: (-item[1], item[0]))
    return [[value, str(count)] for value, count in ordered[:most]]


def _wait_for_record(page: Page, seq: int) -> None:
    """Wait until every part of the page reflects this record."""
    script = f"seqs.size === 5 && Number(document.getElementById('events').textContent) === {seq}"
    newest = f"document.querySelector('#recent tr')?.dataset.seq === '{seq}'"
    page.wait(f"{script} && {newest}", f"record {seq}")


def _judge(page: Page, events: list[dict[str, Any]]) -> None:
    """Check that the page shows the values computed from these events; parts may follow one another
    by at most 0.1 s.
    """
    repos = _rows(events, 1000, ("payload", "repository", "full_name"))
    senders = _rows(events, 1000, ("payload", "sender", "login"))
    kinds = _rows(events, 1000, ("event",))
    totals = [len(events), len(kinds), len(repos), len(senders)]
    parts = {
        "totals": (f"{TOTALS}", totals),
        "times": (f"{COLUMNS}.reduce((sum, each) => sum + each, 0)", len(events)),
    }
    for what, (script, expected) in parts.items():
        page.wait(f"JSON.stringify({script}) === {json.dumps(_compact(expected))}", what)
    for name, rows in (("by_event", kinds[:12]), ("by_repo", repos[:8])):
        shown = json.dumps(_compact(rows))
        page.wait(f"JSON.stringify({BARS % name}) === {shown}", name)
    recent = []
    for seq in range(len(events), len(events) - 12, -1):
        payload = events[seq - 1]["payload"]
        repo = (payload.get("repository") or {}).get("full_name")
        recent.append([str(seq), events[seq - 1]["event"], payload.get("action") or "", repo or ""])
    assert page.evaluate(RECENT) == recent


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def test_the_dashboard_follows_the_events_over_kill_9(
    browser: Browser, origin: str, viewed: Server
) -> None:
    """Every number is the one computed from the events, before and after the server was killed."""
    append(viewed, 1, 200)
    url = f"{origin}/index.html?server={viewed.api.url}"
    with browser.page(url) as page:
        wait_for_state(page, "live")
        _wait_for_record(page, 200)
        _judge(page, EVENTS[:200])
        append(viewed, 201, 329)
        _wait_for_record(page, 329)
        _judge(page, EVENTS)
        viewed.signal(signal.SIGKILL)
        wait_for_state(page, "away")
        viewed.start()
        wait_for_state(page, "live")
        hostile = {"event": "issues", "payload": {"action": "<b>&amp;</b>"}}
        good(viewed.api.append(TOPIC, [{"data": hostile["payload"], "tag": "issues"}]))
        _wait_for_record(page, 330)
        _judge(page, [*EVENTS, hostile])
        # The page shows texts of other clients as text, not as markup.
        assert page.evaluate("document.querySelectorAll('#recent b').length") == 0
        assert page.exceptions == []


def test_a_page_without_its_view_says_so(browser: Browser, origin: str, viewed: Server) -> None:
    """A refused stream ends, and the page names the missing view."""
    with browser.page(f"{origin}/index.html?server={viewed.api.url}&view=other") as page:
        text = """document.getElementById("state").textContent"""
        page.wait(f"{text}.startsWith('no view other of {TOPIC}')", "the missing view")
