"""The reference page in a real browser: whole, and from this server alone."""

from __future__ import annotations

from tests.browser.chromium import Browser
from tests.contract.described import document
from tests.contract.driver import Server

_HOSTS = """[...new Set(performance.getEntriesByType("resource").map(e => new URL(e.name).host))]"""


def test_the_page_shows_every_operation_and_asks_no_other_host(
    browser: Browser, server: Server
) -> None:
    with browser.page(f"{server.api.url}/v0/docs") as page:
        operations = sum(
            method != "parameters" for item in document()["paths"].values() for method in item
        )
        page.wait(
            f'document.querySelectorAll(".opblock").length === {operations}',
            f"{operations} operations are shown",
            within_s=60,
        )
        assert page.evaluate(_HOSTS) == [server.api.url.partition("://")[2]]
        assert page.evaluate("document.querySelector('.errors-wrapper') === null")
        # What the content policy forbids is reported as an event; a request elsewhere is the proof.
        refused = """new Promise(done => {
            addEventListener("securitypolicyviolation", e => done(e.effectiveDirective));
            fetch("http://127.0.0.2:1/").catch(() => {});
        })"""
        assert page.evaluate(refused) == "connect-src"
        assert page.exceptions == []
