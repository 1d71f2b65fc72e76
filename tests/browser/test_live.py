"""The lines of JavaScript in the README, in a real browser, over restarts and kills."""

from __future__ import annotations

import json
import signal

from tests.browser.chromium import Browser
from tests.browser.conftest import Pages
from tests.cli.docs.docs_blocks import blocks_of
from tests.contract.driver import ROOT, Server, good

ROWS = """[...document.querySelectorAll("body > li")].map((row) => row.textContent)"""


def test_the_lines_of_the_readme_work_on_the_front_page(browser: Browser, server: Server) -> None:
    """The lines run as in the developer console: the page's content policy lets that console's
    scripts connect.
    """
    (lines,) = (block.text for block in blocks_of(ROOT / "README.md") if block.language == "js")
    good(server.api.append("orders", [{"data": {"id": 9}, "tag": "order-9"}]))
    with browser.page(f"{server.api.url}/") as page:
        page.evaluate(lines.replace("http://localhost:4000", server.api.url) + "\n0")
        page.wait(f"{ROWS}.length >= 1", "the record")
        assert page.evaluate(ROWS) == ['1 order-9 {"id":9}']


def test_the_lines_of_the_readme_go_on_without_a_gap_or_a_repeat(
    browser: Browser, pages: Pages, server: Server
) -> None:
    (lines,) = (block.text for block in blocks_of(ROOT / "README.md") if block.language == "js")
    assert len(lines.strip().splitlines()) <= 10
    assert lines.count("http://localhost:4000/") == 1
    wanted: list[str] = []

    def append(first: int, last: int) -> None:
        """Append alternately an order and a record that the page does not follow."""
        records = []
        for number in range(first, last + 1):
            records += [{"data": {"id": number}, "tag": f"order-{number}"}, {"data": 0, "tag": "x"}]
        first_seq = good(server.api.append("orders", records))["first_seq"]
        for place, number in enumerate(range(first, last + 1)):
            wanted.append(f'{first_seq + 2 * place} order-{number} {{"id":{number}}}')

    with browser.page(f"{pages.origin}/index.html") as page:
        page.evaluate(lines.replace("http://localhost:4000", server.api.url) + "\n0")
        # The topic does not exist yet.
        append(1, 20)
        page.wait(f"{ROWS}.length >= 20", "the first rows")
        for turn in range(1, 4):
            server.signal(signal.SIGKILL if turn % 2 else signal.SIGTERM)
            server.start()
            append(20 * turn + 1, 20 * turn + 20)
            page.wait(f"{ROWS}.length >= {len(wanted)}", f"the rows after stop {turn}")
            assert page.evaluate(ROWS) == wanted, json.dumps(wanted)
        page.evaluate("0")
        assert page.exceptions == []
