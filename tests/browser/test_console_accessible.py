"""Every panel of the console by the rules of axe-core: no serious finding, light and dark.

`axe/axe.min.js` is axe-core as its authors publish it, with its licence beside it. The browser runs
the script as a developer would, so the page's content policy does not apply to it.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest

from tests.browser.chromium import Browser, Page
from tests.browser.console_page import (
    RIGHT_TO_LEFT,
    SCRIPT,
    append,
    console,
    press,
    shows,
)
from tests.contract.driver import Server, good

AXE: Final = Path(__file__).parent / "axe" / "axe.min.js"
RUN: Final = """axe.run(document, { resultTypes: ["violations"] }).then((found) => [
    found.violations.map((each) => [each.impact, each.id, each.nodes.map((node) => node.html)]),
    found.testEngine.version,
])"""
# For each panel a text that it shows once its data are loaded.
PANELS: Final = {
    "overview": "Append latency, 99 %",
    "topics": "orders",
    "routers": "caught up",
    "streams": "pages/1",
    "topic/orders/records": "head 4",
    "topic/orders/live": "live at 4",
    "topic/jobs/queue": "worker-1",
    "topic/orders/consumers": "have records to read",
    "topic/orders/views": "by-tag",
    "topic/orders/settings": "Drop the topic",
}
DIALOGS: Final = {
    "topics": ["New topic", "Key", "?"],
    "topic/orders/records": ["Append", "Delete …"],
    "topic/orders/consumers": ["New consumer", "Commit", "Rewind", "Delete"],
    "topic/jobs/queue": ["Retry", "Ack", "Purge …"],
    "topic/orders/settings": ["Drop the topic …"],
}


@cache
def _axe() -> str:
    return AXE.read_text("utf-8")


def findings(page: Page) -> list[Any]:
    """The findings of axe-core that are serious or critical."""
    if page.evaluate("typeof axe") == "undefined":
        page.evaluate(f"{_axe()}; undefined")
    found, version = page.evaluate(RUN)
    assert version
    return [each for each in found if each[0] in ("serious", "critical")]


def set_up(server: Server) -> None:
    """Something in every panel, some of it hostile."""
    records = [{"data": {"n": [1, None, True, "text"]}, "tag": "paid", "node": "till-7"}]
    append(server, "orders", [*records, {"data": SCRIPT, "tag": "<b>tag</b>", "meta": {"k": 1}}])
    append(server, "orders", [{"data": {"text": RIGHT_TO_LEFT}}, {"data": 12345678901234567890}])
    for name in ("billing", "search"):
        good(server.api.http.put(f"/v0/topics/orders/consumers/{name}", json={"from": "earliest"}))
    good(server.api.http.put("/v0/routers/audit", json={"source": "orders", "dest": "log"}))
    view = {"shortcut": {"count_by_tag": True}}
    good(server.api.http.put("/v0/topics/orders/views/by-tag", json=view))
    good(server.api.put("jobs", {"type": "queue", "max_deliveries": 1, "dead_letter": "dead"}))
    append(server, "jobs", [{"data": n} for n in range(3)])
    claim = {"node": "worker-1", "max": 2, "lease_ms": 600_000}
    good(server.api.http.post("/v0/topics/jobs/claim", json=claim))
    nack = {"node": "worker-1", "seqs": [1], "error": "no such address"}
    good(server.api.http.post("/v0/topics/jobs/nack", json=nack))
    good(server.api.http.post("/v0/topics/jobs/claim", json=claim))
    headers = {"content-type": "text/html"}
    made = server.api.http.put("/v1/stream/pages/1", content=SCRIPT.encode(), headers=headers)
    assert made.status_code == 201


def theme(page: Page, name: str, width: int = 1280) -> None:
    page.call(
        "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}]
    )
    page.call(
        "Emulation.setDeviceMetricsOverride",
        width=width,
        height=800,
        deviceScaleFactor=1,
        mobile=False,
    )


def go(page: Page, place: str) -> None:
    page.evaluate(f"location.hash = {json.dumps('#/' + place)}")
    shows(page, PANELS[place])


def test_axe_finds_what_is_wrong(browser: Browser, server: Server) -> None:
    """If the test damages a panel, axe reports it: a button without a name, a text without
    contrast.
    """
    with console(browser, server, "overview") as page:
        shows(page, PANELS["overview"])
        page.evaluate("""(() => {
            const text = document.createElement("p");
            text.textContent = "hardly visible";
            text.style.color = "#eee";
            document.querySelector("main").append(document.createElement("button"), text);
        })()""")
        assert {each[1] for each in findings(page)} >= {"button-name", "color-contrast"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_panel_has_a_serious_finding(browser: Browser, server: Server) -> None:
    set_up(server)
    problems: dict[str, list[Any]] = {}
    with console(browser, server, "overview") as page:
        for place in PANELS:
            go(page, place)
            page.evaluate(
                "document.querySelectorAll('.record').forEach(row => { row.open = true; })"
            )
            for name, width in (("light", 1280), ("dark", 1280), ("light", 390)):
                theme(page, name, width)
                if found := findings(page):
                    problems[f"{place} {name} {width}"] = found
        go(page, "topic/orders/views")
        press(page, "Run")
        shows(page, "rows as of record")
        if found := findings(page):
            problems["the rows of a view"] = found
    assert problems == {}, json.dumps(problems, indent=1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_dialog_has_a_serious_finding(browser: Browser, server: Server) -> None:
    set_up(server)
    problems: dict[str, list[Any]] = {}
    with console(browser, server, "overview") as page:
        theme(page, "light")
        for place, buttons in DIALOGS.items():
            go(page, place)
            for button in buttons:
                press(page, button)
                page.wait("Boolean(document.querySelector('dialog[open]'))", f"{button} asks")
                if found := findings(page):
                    problems[f"{place}: {button}"] = found
                page.evaluate("document.querySelector('dialog[open]').close()")
                page.wait("!document.querySelector('dialog')", "the dialog is closed")
    assert problems == {}, json.dumps(problems, indent=1)
