"""A browser behind nginx: `EventSource` over TLS and HTTP/2, and a server that restarts.

The time of a frame from the append to the page is printed (see it with `-rP`). The target is 50 ms;
a loaded machine gets far more, so that only buffering fails here.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Final

from tests.browser.chromium import Browser
from tests.contract.driver import Server, good
from tests.proxy.nginx import Proxy

APPENDS: Final = 20
BOUND_MS: Final = 2_000
# Date.now() is the clock of time.time().
FOLLOW: Final = """(() => {
    window.seen = [];
    window.opened = 0;
    window.closed = false;
    const source = new EventSource(%s);
    source.onopen = () => { window.opened += 1; };
    source.onerror = () => { window.closed = source.readyState === EventSource.CLOSED; };
    source.addEventListener("record", (event) => {
        const at = Date.now();
        for (const record of JSON.parse(event.data).records)
            window.seen.push([record.$seq, at]);
    });
    window.source = source;
})()"""


def test_an_event_source_gets_its_frames_over_tls_and_goes_on_after_a_restart(
    browser: Browser, proxy: Proxy, behind: Server
) -> None:
    behind.api.put("seen")
    session = good(behind.api.http.post("/v0/watch", json={"topics": {"seen": {"from_seq": 0}}}))
    with browser.page(f"{proxy.url}/console") as page:
        page.evaluate(FOLLOW % json.dumps(session["stream_url"]))
        page.wait("window.opened === 1", "the stream is open")
        sent_ms: list[float] = []
        for number in range(1, APPENDS + 1):
            sent_ms.append(time.time() * 1000)
            behind.api.add("seen", number)
            page.wait(f"window.seen.length === {number}", f"record {number}")
        took = [at - sent for (_, at), sent in zip(page.evaluate("seen"), sent_ms, strict=True)]
        middle, worst = statistics.median(took), max(took)
        print(f"append to EventSource over TLS: median {middle:.1f} ms, worst {worst:.1f} ms")
        assert middle < BOUND_MS
        version = page.evaluate('performance.getEntriesByType("navigation")[0].nextHopProtocol')
        assert version == "h2"

        # The server is away for longer than the browser's first tries, which nginx answers.
        behind.stop()
        page.wait("window.source.readyState === EventSource.CONNECTING", "the stream has ended")
        time.sleep(1.5)
        behind.start()
        for number in range(APPENDS + 1, APPENDS + 11):
            behind.api.add("seen", number)
        page.wait(f"window.seen.length >= {APPENDS + 10}", "the records after the restart")
        assert [seq for seq, _ in page.evaluate("seen")] == list(range(1, APPENDS + 11))
        assert page.evaluate("closed") is False
        page.evaluate("source.close()")
