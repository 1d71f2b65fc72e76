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
        status, shown = page.evaluate(_TRY.replace("NAME", '"server-frontPage"'))
        assert status == "200", shown
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
# The page prepares the whole description anew for each operation that is opened: seconds. This
# shows it one tag of the description: its operations as they are, and what they refer to.
_ONE_TAG = """{
    const all = window.fetch;
    window.fetch = async (...request) => {
        const response = await all(...request);
        if (!response.url.endsWith("/openapi.json")) return response;
        window.fetch = all;
        const found = await response.json();
        for (const [path, item] of Object.entries(found.paths)) {
            for (const [method, operation] of Object.entries(item))
                if (method !== "parameters" && operation.tags[0] !== TAG) delete item[method];
            if (!Object.keys(item).some(key => key !== "parameters")) delete found.paths[path];
        }
        const kept = {};
        const keep = part => {
            const names = JSON.stringify(part).matchAll(/"#\\/components\\/(\\w+)\\/([^"]+)"/g);
            for (const [, kind, name] of names) {
                if (kept[kind]?.[name]) continue;
                (kept[kind] ??= {})[name] = found.components[kind][name];
                keep(kept[kind][name]);
            }
        };
        keep(found.paths);
        kept.securitySchemes = found.components.securitySchemes;
        found.components = kept;
        return new Response(JSON.stringify(found), response);
    };
}"""
# How the sample generator renders the greatest number of a field.
_HUGE = "18446744073709552000"


def is_one_dead(server: Server) -> bool:
    counts = server.api.get_state("jobs")["queue"]
    return bool(counts["dead_lettered"] == 1)


def by_tag() -> dict[str, dict[str, set[str]]]:
    """The statuses of each operation, by tag and by the id of its element."""
    found: dict[str, dict[str, set[str]]] = {}
    for item in document()["paths"].values():
        for method, operation in item.items():
            if method != "parameters":
                (tag,) = operation["tags"]
                name = f"operations-{tag}-{operation['operationId']}"
                found.setdefault(tag, {})[name] = {*operation["responses"]}
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_operation_succeeds_as_it_is_filled_in(browser: Browser, server: Server) -> None:
    documented = by_tag()
    assert sum(map(len, documented.values())) > 35
    for tag in (each["name"] for each in document()["tags"]):
        names = documented.pop(tag)
        script = _ONE_TAG.replace("TAG", json.dumps(tag))
        with browser.page(f"{server.api.url}/v0/docs", script) as page:
            count = f'document.querySelectorAll(".opblock").length === {len(names)}'
            page.wait(count, f"the operations of {tag} are shown", 60)
            shown_names = page.evaluate('[...document.querySelectorAll(".opblock")].map(e => e.id)')
            assert {*shown_names} == {*names}
            for name in shown_names:
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
                    assert status in names[name], f"{name}: {shown}"
                    assert "200" <= status < "300", f"{name}: {shown}"
            assert page.exceptions == []
    assert documented == {}, "every operation has a tag of the document"
