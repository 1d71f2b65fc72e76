"""The reference page in a real browser: complete, and loaded from this server alone."""

from __future__ import annotations

import json

import pytest

from tests.browser.chromium import Browser
from tests.contract.described import document
from tests.contract.driver import Server, eventually

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
        # The browser reports violations of the content policy as events; a request to another host
        # proves a leak.
        refused = """new Promise(done => {
            addEventListener("securitypolicyviolation", e => done(e.effectiveDirective));
            fetch("http://127.0.0.2:1/").catch(() => {});
        })"""
        assert page.evaluate(refused) == "connect-src"
        assert page.exceptions == []


# Opens an operation, sends it as filled in, returns what the page then shows, and closes it.
_TRY = """new Promise((done, fail) => {
    const block = document.getElementById("operations-" + NAME);
    const open = () => block.querySelector(".opblock-summary-control").click();
    const ways = [".try-out__btn", ".btn.execute", ".live-responses-table tbody tr"];
    const until = Date.now() + 55000;
    const step = () => {
        const found = block.querySelector(ways[0]);
        if (Date.now() > until) return fail(NAME + " never shows " + ways[0]);
        if (found && ways.length === 1) {
            const shown = [found.querySelector(".response-col_status").innerText, block.innerText];
            open();
            return done(shown);
        }
        if (found) {
            found.click();
            ways.shift();
        }
        setTimeout(step, 10);
    };
    open();
    step();
})"""
# Opens or closes all operations of a tag.
_TOGGLE = "document.getElementById(TAG).click()"
# How the sample generator renders the greatest number of a field.
_HUGE = "18446744073709552000"


def is_one_dead(server: Server) -> bool:
    counts = server.api.get_state("jobs")["queue"]
    return bool(counts["dead_lettered"] == 1)


@pytest.mark.timeout(900)
def test_each_operation_succeeds_as_it_is_filled_in(browser: Browser, server: Server) -> None:
    described = document()
    with browser.page(f"{server.api.url}/v0/docs") as page:
        page.wait('document.querySelectorAll(".opblock").length > 35', "it is there", 60)
        names = page.evaluate('[...document.querySelectorAll(".opblock")].map(e => e.id)')
        documented = {
            f"operations-{operation['tags'][0]}-{operation['operationId']}": operation["responses"]
            for item in described["paths"].values()
            for method, operation in item.items()
            if method != "parameters"
        }
        assert {*names} == {*documented}
        # The page renders every open tag anew at each step: open one at a time.
        tags = page.evaluate('[...document.querySelectorAll(".opblock-tag")].map(e => e.id)')
        for tag in tags:
            page.evaluate(_TOGGLE.replace("TAG", json.dumps(tag)))
        page.wait('!document.querySelector(".opblock")', "every tag is closed")
        shown_tag = ""
        for name in names:
            tag = "-".join(["operations", "tag", name.split("-")[1]])
            if tag != shown_tag:
                for each in filter(None, (shown_tag, tag)):
                    page.evaluate(_TOGGLE.replace("TAG", json.dumps(each)))
                shown_tag = tag
                page.wait(f"!!document.getElementById({json.dumps(name)})", f"{name} is shown")
            if name.endswith("redriveJobs"):
                eventually(lambda: is_one_dead(server), "the job given back is dead")
            block = json.dumps(name.removeprefix("operations-"))
            status, shown = page.evaluate(_TRY.replace("NAME", block))
            # The description itself contains the greatest numbers.
            assert _HUGE not in shown or name.endswith("-openapi"), name
            if name.endswith("openWebSocket"):
                # The page's own client, because a script cannot show the answer to an upgrade.
                assert status.split() == ["200", "Undocumented"]
                assert "pong" in shown
            else:
                assert status in documented[name], f"{name}: {shown}"
                assert "200" <= status < "300", f"{name}: {shown}"
        assert page.exceptions == []
