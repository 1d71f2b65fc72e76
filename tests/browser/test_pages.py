"""The example pages in a real browser: in order, none missing and none twice, over a kill -9.

The pages come from another origin than the server. The test reads a page's rows, newest first.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import signal
from collections.abc import Iterator
from typing import Any, Final

import pytest

from tests.browser.chromium import Browser, Page
from tests.browser.conftest import Pages
from tests.contract.driver import ROOT, Server, eventually, good
from tests.ports import lasting_port

FILE: Final = ROOT / "examples" / "webhooks" / "github-webhooks.jsonl.gz"
EVENTS: Final = [json.loads(line) for line in gzip.decompress(FILE.read_bytes()).splitlines()]
TOPIC: Final = "webhooks"
BOTH: Final = pytest.mark.parametrize("name", ["events.html", "socket.html"])
# Rows from oldest to newest: a seq, a gap as "from-to", or null for another note.
ROWS: Final = """[...document.querySelectorAll("#rows li")].reverse().map(
    (row) => row.dataset.seq ? Number(row.dataset.seq) : row.dataset.gap ?? null)"""
CELLS: Final = """[...document.querySelectorAll("#rows li")].reverse().map(
    (row) => ["seq", "event", "action", "repo", "sender"].map(
        (name) => row.querySelector("." + name).textContent))"""
STATE: Final = """document.getElementById("state").dataset.state"""


def append(server: Server, first: int, last: int) -> None:
    """Append the events from the first to the last (from 1), as `topics load` does."""
    records = [{"data": e["payload"], "tag": e["event"]} for e in EVENTS[first - 1 : last]]
    answer = good(server.api.append(TOPIC, records))
    assert (answer["first_seq"], answer["last_seq"]) == (first, last)


@contextlib.contextmanager
def opened(browser: Browser, origin: str, name: str, server: Server) -> Iterator[Page]:
    """Open the page for the topic; no exception may stay uncaught in it."""
    with browser.page(f"{origin}/{name}?server={server.api.url}&topic={TOPIC}") as page:
        yield page
        page.evaluate("0")
        assert page.exceptions == []


def wait_for_rows(page: Page, rows: list[object]) -> None:
    """Wait until the page has this many rows, which must be exactly these."""
    script = f'document.getElementById("rows").childElementCount >= {len(rows)}'
    page.wait(script, f"{len(rows)} rows")
    assert page.evaluate(ROWS) == rows


def wait_for_state(page: Page, state: str) -> None:
    """Wait until the page shows the state `live`, `behind` or `away`."""
    page.wait(f"{STATE} === {json.dumps(state)}", f"the state {state}")


def text_of(event: dict[str, Any]) -> list[str]:
    """The text of an event in a row."""
    payload = event["payload"]
    owner = (payload.get("repository") or {}).get("full_name")
    owner = owner or (payload.get("organization") or {}).get("login")
    sender = (payload.get("sender") or {}).get("login")
    return [event["event"], payload.get("action") or "", owner or "", sender or ""]


@BOTH
def test_a_page_goes_on_after_kill_9_with_none_missing_and_none_twice(
    browser: Browser, pages: Pages, server: Server, name: str
) -> None:
    append(server, 1, 200)
    with opened(browser, pages.origin, name, server) as page:
        wait_for_rows(page, list(range(1, 201)))
        wait_for_state(page, "live")
        append(server, 201, 230)
        wait_for_rows(page, list(range(1, 231)))
        server.signal(signal.SIGKILL)
        wait_for_state(page, "away")
        server.start()
        append(server, 231, 329)
        wait_for_rows(page, list(range(1, 330)))
        # The same holds on the new connection, and over a clean stop.
        server.restart()
        good(server.api.append(TOPIC, [{"data": {"action": "<b>&amp;</b>"}, "tag": "last"}]))
        wait_for_rows(page, list(range(1, 331)))
        wait_for_state(page, "live")
        assert page.evaluate('document.getElementById("records").textContent') == "330"
        shown = page.evaluate(CELLS)
        expected = [[str(seq), *text_of(event)] for seq, event in enumerate(EVENTS, 1)]
        assert shown[:329] == expected
        assert shown[329] == ["330", "last", "<b>&amp;</b>", "", ""]


@BOTH
def test_evictions_during_a_disconnect_are_shown_as_a_row(
    browser: Browser, pages: Pages, server: Server, name: str
) -> None:
    good(server.api.put(TOPIC, {"cap_records": 50}))
    append(server, 1, 40)
    with opened(browser, pages.origin, name, server) as page:
        wait_for_rows(page, list(range(1, 41)))
        server.signal(signal.SIGKILL)
        wait_for_state(page, "away")
        # The test uses another tab, so that the page cannot see the record before it is deleted.
        there = dict(server.env)
        server.env = {**there, "TOPICS_PORT": str(lasting_port())}
        server.start()
        append(server, 41, 200)
        append(server, 201, 329)
        eventually(lambda: bool(server.api.get_state(TOPIC)["count"] <= 50), "the cap holds")
        earliest = server.api.get_state(TOPIC)["earliest_seq"]
        assert earliest > 41
        server.stop()
        server.env = there
        server.start()
        gap = f"41-{earliest - 1}"
        wait_for_rows(page, [*range(1, 41), gap, *range(earliest, 330)])
        assert page.evaluate('document.getElementById("gaps").textContent') == "1"
        assert f"41 to {earliest - 1} are gone" in page.evaluate("document.body.innerText")


def test_the_socket_page_publishes(browser: Browser, pages: Pages, server: Server) -> None:
    append(server, 1, 3)
    with opened(browser, pages.origin, "socket.html", server) as page:
        wait_for_state(page, "live")
        page.evaluate("""(() => {
            const form = document.getElementById("publish");
            form.elements.text.value = "<img src=x onerror='window.ran = true'>";
            form.requestSubmit();
        })()""")
        wait_for_rows(page, [1, 2, 3, 4])
        page.wait(
            'document.getElementById("published").textContent !== "Waiting for the server."',
            "the acknowledgement",
        )
        said = page.evaluate('document.getElementById("published").textContent')
        assert said == f"Stored as 4 of {TOPIC}."
        assert page.evaluate(CELLS)[3][2] == "<img src=x onerror='window.ran = true'>"
        assert page.evaluate("document.querySelector('#rows img') === null && !window.ran")
        # The page keeps the record while the server is down, and sends it once when the server is
        # back.
        server.signal(signal.SIGKILL)
        wait_for_state(page, "away")
        page.evaluate("""(() => {
            const form = document.getElementById("publish");
            form.elements.text.value = "later";
            form.requestSubmit();
        })()""")
        server.start()
        wait_for_rows(page, [1, 2, 3, 4, 5])
        assert [r["data"].get("action") for r in server.api.read_all(TOPIC, 3)] == [
            "<img src=x onerror='window.ran = true'>",
            "later",
        ]


# -- origins -------------------------------------------------------------------------------------

FETCH: Final = """fetch(%s + "/v0/watch", {
    method: "POST", headers: {"Content-Type": "application/json"},
    body: JSON.stringify({topics: {webhooks: {from_seq: 0}}}),
}).then((answer) => answer.status, (error) => error.name)"""
# EventSource tells only whether it is open or closed for good.
STREAM: Final = """new Promise((tell) => {
    const source = new EventSource(%s);
    source.onopen = () => { tell("open"); source.close(); };
    source.onerror = () => { tell("refused"); source.close(); };
})"""
SOCKET: Final = """new Promise((tell) => {
    const socket = new WebSocket(%s.replace("http", "ws") + "/v0/ws");
    socket.onopen = () => { tell("open"); socket.close(); };
    socket.onclose = () => tell("refused");
})"""


@pytest.mark.parametrize("is_listed", [True, False])
def test_a_page_of_an_origin_that_is_not_listed_gets_nothing(
    browser: Browser, pages: Pages, server: Server, is_listed: bool
) -> None:
    append(server, 1, 1)
    session = good(server.api.http.post("/v0/watch", json={"topics": {TOPIC: {"from_seq": 0}}}))
    stream = json.dumps(server.api.url + session["stream_url"])
    url = json.dumps(server.api.url)
    origin = pages.origin if is_listed else pages.stranger
    with browser.page(f"{origin}/index.html") as page:
        assert page.evaluate("location.origin") == origin
        assert page.evaluate(FETCH % url) == (200 if is_listed else "TypeError")
        assert page.evaluate(STREAM % stream) == ("open" if is_listed else "refused")
        assert page.evaluate(SOCKET % url) == ("open" if is_listed else "refused")


@BOTH
def test_the_pages_of_a_stranger_show_nothing(
    browser: Browser, pages: Pages, server: Server, name: str
) -> None:
    append(server, 1, 1)
    with opened(browser, pages.stranger, name, server) as page:
        said = "Failed to fetch" if name == "events.html" else "connecting again"
        script = 'document.getElementById("state").textContent'
        page.wait(f"{script}.includes({json.dumps(said)})", said)
        assert page.evaluate(ROWS) == []


@pytest.mark.parametrize("name", ["events.html?", "events.html?reader=fetch&", "socket.html?"])
def test_with_a_key_a_page_goes_on_after_a_restart_and_no_address_holds_it(
    browser: Browser, pages: Pages, server: Server, name: str
) -> None:
    secret = "page-key-of-the-test"
    server.stop()
    server.env = {**server.env, "TOPICS_API_KEYS": f"{secret}:rw,other-key-of-the-test"}
    server.start()
    server.api.http.headers["authorization"] = f"Bearer {secret}"
    append(server, 1, 20)
    address = f"{pages.origin}/{name}server={server.api.url}&topic={TOPIC}"
    with browser.page(f"{pages.origin}/index.html") as page:
        page.evaluate(f"sessionStorage.setItem('key', '{secret}')")
        page.call("Page.navigate", url=address)
        is_there = f"location.href === {json.dumps(address)} && document.readyState"
        page.wait(f'{is_there} === "complete"', "the page is loaded")
        wait_for_rows(page, list(range(1, 21)))
        wait_for_state(page, "live")
        server.restart()
        server.api.http.headers["authorization"] = f"Bearer {secret}"
        append(server, 21, 30)
        wait_for_rows(page, list(range(1, 31)))
        wait_for_state(page, "live")
        addresses = page.evaluate("performance.getEntries().map((entry) => entry.name)")
        assert addresses
        assert secret not in " ".join([page.evaluate("location.href"), *addresses])
    assert secret not in server.log.read_text()
