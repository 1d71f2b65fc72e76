"""The console with many topics and records: it stays small, appears quickly and can be searched.

`TOPICS_TEST_CONSOLE_RECORDS=1000000` fills a topic with so many; the figures go beside the
screenshots (`TOPICS_TEST_PICTURES`). No test here has a limit of time.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

import pytest

from tests.browser.chromium import Browser, Page
from tests.browser.console_page import (
    FOLDER,
    LONG,
    PICTURES,
    RIGHT_TO_LEFT,
    SCRIPT,
    append,
    console,
    picture,
    press,
    shows,
)
from tests.contract.driver import Server, good

TOPICS: Final = 1_000
RECORDS: Final = int(os.environ.get("TOPICS_TEST_CONSOLE_RECORDS", "20000"))
BATCH: Final = 5_000
SIZE_MAX: Final = 300_000
# For each panel a text that it shows once its data are loaded.
OTHER_PANELS: Final = {
    "routers": "caught up",
    "streams": "image/svg+xml",
    "topic/jobs/queue": "worker-1",
    "topic/large/consumers": "have records to read",
    "topic/large/views": "ready",
    "topic/large/settings": "Drop the topic",
    "overview": "Append latency, 99 %",
}
SEQS: Final = "[...document.querySelectorAll('.record')].map((row) => Number(row.dataset.seq))"
# JavaScript: the server's files that the page has loaded, and the time of the first paint.
LOADED: Final = """(() => {
    const files = performance.getEntriesByType("resource")
        .filter((entry) => entry.name.includes("/console"));
    const page = performance.getEntriesByType("navigation")[0];
    const paint = performance.getEntriesByName("first-contentful-paint")[0];
    return {
        files: files.length,
        bytes: [page, ...files].reduce((sum, entry) => sum + entry.decodedBodySize, 0),
        first_paint_ms: Math.round(paint?.startTime ?? -1),
    };
})()"""


def fill_server(server: Server) -> None:
    """A thousand topics; one of them has the records, and hostile ones at its head."""
    for number in range(TOPICS - 1):
        good(server.api.put(f"many-{number:04}", {}))
    for start in range(0, RECORDS, BATCH):
        count = min(BATCH, RECORDS - start)
        append(
            server,
            "large",
            [{"data": {"id": start + n}, "tag": f"t{(start + n) % 1000}"} for n in range(count)],
        )
    deep: Any = "bottom"
    for _ in range(90):
        deep = [deep]
    hostile = [SCRIPT, {"text": RIGHT_TO_LEFT}, deep, {"__proto__": {"ran": True}}]
    append(server, "large", [{"data": data, "tag": "hostile"} for data in hostile])
    append(server, "large", [{"data": LONG, "tag": RIGHT_TO_LEFT}])


def fill_other_panels(server: Server) -> None:
    """Consumers, a view and a router of the large topic; a queue; streams."""
    for number in range(20):
        good(
            server.api.http.put(f"/v0/topics/large/consumers/c{number}", json={"from": "earliest"})
        )
    view = {"shortcut": {"count_by_tag": True}}
    good(server.api.http.put("/v0/topics/large/views/by-tag", json=view))
    good(server.api.http.put("/v0/routers/audit", json={"source": "large", "dest": "copies"}))
    good(server.api.put("jobs", {"type": "queue", "max_deliveries": 1, "dead_letter": "dead"}))
    for start in range(0, RECORDS // 10, BATCH):
        count = min(BATCH, RECORDS // 10 - start)
        append(server, "jobs", [{"data": SCRIPT, "tag": f"t{n}"} for n in range(count)])
    claim = {"node": "worker-1", "max": 100, "lease_ms": 600_000}
    jobs = good(server.api.http.post("/v0/topics/jobs/claim", json=claim))["claimed"]
    seqs = [job["$seq"] for job in jobs[:50]]
    nack = {"node": "worker-1", "seqs": seqs, "error": RIGHT_TO_LEFT}
    good(server.api.http.post("/v0/topics/jobs/nack", json=nack))
    headers = {"content-type": "image/svg+xml"}
    for number in range(100):
        path = f"/v1/stream/pages/{number}"
        made = server.api.http.put(path, content=SCRIPT.encode(), headers=headers)
        assert made.status_code == 201


def change(page: Page, selector: str, value: str) -> None:
    """Type a value into an input and leave it."""
    page.evaluate(f"""(() => {{ const input = document.querySelector({json.dumps(selector)});
        input.value = {json.dumps(value)}; input.dispatchEvent(new Event("change")); }})()""")


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_many_topics_and_records(browser: Browser, server: Server) -> None:
    fill_server(server)
    head = RECORDS + 5
    with console(browser, server, "overview") as page:
        shows(page, f"{TOPICS:,}")
        shows(page, f"{head:,}")
        page.wait(
            "performance.getEntriesByName('first-contentful-paint').length > 0", "the first paint"
        )
        loaded = page.evaluate(LOADED)
        assert loaded["files"] >= len(list(FOLDER.glob("*.js")))
        assert 0 < loaded["bytes"] <= SIZE_MAX
        if PICTURES:
            figures = json.dumps({"records": head, "topics": TOPICS, **loaded})
            (Path(PICTURES) / "console-at-size.json").write_text(figures)
        page.evaluate("location.hash = '#/topics'")
        shows(page, "The first 200 topics are shown.")
        assert page.evaluate("document.querySelectorAll('tbody tr').length") == 200
        picture(page, "size-topics")
        page.evaluate("""(() => { const input = document.querySelector("[data-search]");
            input.value = "many-097"; input.dispatchEvent(new Event("input")); })()""")
        shows(page, "many-0979")
        page.wait("document.querySelectorAll('tbody tr').length === 10", "ten names begin so")

        page.evaluate("location.hash = '#/topic/large/records'")
        page.wait(f"{SEQS}[0] === {head}", "the newest record")
        assert page.evaluate(f"{SEQS}.length") == 50
        page.evaluate("document.querySelectorAll('.record').forEach(row => { row.open = true; })")
        shows(page, "show all 1,000,000 characters")
        assert page.evaluate("document.querySelectorAll('main img, main script').length") == 0
        picture(page, "size-records")
        press(page, "Older →")
        page.wait(f"{SEQS}[0] === {head - 50}", "older records")
        change(page, "[aria-label^='Start at']", str(RECORDS // 2))
        page.wait(f"{SEQS}[0] === {RECORDS // 2}", "a record in the middle")
        press(page, "Newest")
        change(page, "[data-filter=tag]", "t7")
        page.wait(f"{SEQS}[0] === {RECORDS - 992} && {SEQS}[1] === {RECORDS - 1992}", "a tag")

        page.evaluate("location.hash = '#/topic/large/live'")
        page.wait(f"{SEQS}.length === 20", "the last records")
        for _ in range(4):
            append(server, "large", [{"data": "x" * 1000}] * 250)
        page.wait(f"{SEQS}[0] === {head + 1000}", "the newest of a burst")
        assert page.evaluate(f"{SEQS}.length") <= 500
        picture(page, "size-live")

        fill_other_panels(server)
        for place, text in OTHER_PANELS.items():
            page.evaluate(f"location.hash = {json.dumps('#/' + place)}")
            shows(page, text)
            assert page.evaluate("document.querySelectorAll('main img, main script').length") == 0
            picture(page, f"size-{place.split('/')[-1]}")
        page.evaluate("location.hash = '#/topic/large/views'")
        # The button exists before the views are loaded, but it is hidden, because there is no view
        # to query yet.
        page.wait("document.querySelector('[aria-label=View]')?.value === 'by-tag'", "the view")
        press(page, "Run")
        shows(page, "rows as of record")
        picture(page, "size-rows")
