"""The JavaScript client in a browser: a page of another origin, and tabs that share a stream."""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.browser.chromium import Browser, Page
from tests.browser.conftest import Quiet
from tests.contract.driver import ROOT, Server, eventually, good
from tests.ports import lasting_port

# JavaScript: follow the topic; `window.seen` has a seq or the kind of each item.
FOLLOW: Final = """import("/topics.js").then(({ Topics, webStore }) => {
    window.stop = new AbortController();
    window.seen = [];
    const topics = new Topics(SERVER, { key: KEY });
    const options = { signal: window.stop.signal, wait: true, ...OPTIONS };
    if (options.store) options.store = webStore(options.store);
    window.ended = (async () => {
        for await (const item of topics.live("events", options))
            window.seen.push(item.seq ?? item.kind);
    })().catch((error) => String(error));
})"""
SEQS: Final = "window.seen.filter((each) => typeof each === 'number')"


@pytest.fixture
def origin() -> Iterator[str]:
    """The folder of the client, served by another server."""
    handler = functools.partial(Quiet, directory=str(ROOT / "clients" / "js"))
    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield f"http://127.0.0.1:{made.server_port}"
    made.shutdown()
    thread.join()
    made.server_close()


@pytest.fixture
def listing(tmp_path: Path, origin: str) -> Iterator[Server]:
    """A server that lists the origin and restarts on the same port."""
    env = {"TOPICS_CORS_ORIGINS": origin, "TOPICS_PORT": str(lasting_port())}
    made = Server(tmp_path / "server", env)
    made.start()
    yield made
    made.stop()


@contextlib.contextmanager
def tab(browser: Browser, origin: str, server: Server, **options: object) -> Iterator[Page]:
    """A tab that follows the topic."""
    with browser.page(f"{origin}/package.json") as page:
        script = FOLLOW.replace("SERVER", json.dumps(server.api.url)).replace("KEY", '"any"')
        page.evaluate(script.replace("OPTIONS", json.dumps(options)))
        yield page
        assert page.exceptions == []
        page.call("Page.close")


def saw(page: Page, last: int, first: int = 1) -> None:
    """Wait until the tab has seen the seqs up to `last`; each came once, in order."""
    page.wait(f"{SEQS}.at(-1) >= {last}", f"seq {last}")
    assert page.evaluate(SEQS) == list(range(first, last + 1))


def add(server: Server, count: int) -> None:
    good(server.api.append("events", [{"data": n} for n in range(count)]))


def streams(server: Server) -> int:
    """How many streams are open."""
    lines = server.api.http.get("/v0/metrics").text.splitlines()
    [value] = [line.split()[1] for line in lines if line.startswith("topics_sse_connections ")]
    return int(float(value))


def test_a_page_follows_over_a_kill_and_a_reload(
    browser: Browser, origin: str, listing: Server
) -> None:
    with tab(browser, origin, listing, store="mine", saveEveryMs=0) as page:
        add(listing, 300)
        saw(page, 300)
        listing.signal(signal.SIGKILL)
        listing.start()
        add(listing, 50)
        saw(page, 350)
        assert (
            page.evaluate("window.stop.abort(new Error('enough')), window.ended") == "Error: enough"
        )
        eventually(lambda: streams(listing) == 0, "the stream is closed")
    add(listing, 5)
    with tab(browser, origin, listing, store="mine") as page:
        # The last item was handled: the loop had asked for the next one.
        saw(page, 355, first=351)


def test_tabs_share_one_stream_and_another_tab_takes_over(
    browser: Browser, origin: str, listing: Server
) -> None:
    with contextlib.ExitStack() as second, contextlib.ExitStack() as first:
        leader = first.enter_context(tab(browser, origin, listing, shared=True))
        add(listing, 3)
        saw(leader, 3)
        eventually(lambda: streams(listing) == 1, "the first tab has a stream")
        follower = second.enter_context(tab(browser, origin, listing, shared=True))
        saw(follower, 3)
        add(listing, 100)
        saw(leader, 103)
        saw(follower, 103)
        assert streams(listing) == 1
        locks = "navigator.locks.query().then((all) => [all.held.length, all.pending.length])"
        assert follower.evaluate(locks) == [1, 1]
        first.close()
        eventually(lambda: streams(listing) == 1, "the second tab has a stream")
        follower.wait(f"{locks}.then((counts) => counts[0] === 1 && !counts[1])", "it leads")
        add(listing, 100)
        saw(follower, 203)
        # The same holds over a restart.
        listing.restart()
        add(listing, 1)
        saw(follower, 204)
        assert follower.evaluate("window.stop.abort(new Error('enough')), window.ended") == (
            "Error: enough"
        )
        eventually(lambda: streams(listing) == 0, "the stream is closed")
