"""The console in a real browser: every panel with live data, and content that is hostile.

Hostile content runs as a script if a page puts it into HTML; the tests' content then sets
`window.ran`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.browser.chromium import Browser
from tests.browser.console_page import (
    FOLDER,
    LONG,
    RIGHT_TO_LEFT,
    SCRIPT,
    TEXT,
    append,
    console,
    fill,
    picture,
    press,
    shows,
    submit,
)
from tests.contract.driver import ROOT, Server, command_of, eventually, good


def test_the_files_are_small_and_name_no_other_host() -> None:
    files = list(FOLDER.iterdir())
    assert sum(file.stat().st_size for file in files) <= 300_000
    for file in files:
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "://" not in text, file.name
        assert "innerHTML" not in text, file.name


def test_the_overview_and_the_topics_are_live(browser: Browser, server: Server) -> None:
    append(server, "orders", [{"data": {"id": n}, "tag": "paid"} for n in range(20)])
    with console(browser, server, "overview") as page:
        shows(page, "All is well")
        shows(page, "Append latency, 99 %")
        page.wait("document.querySelectorAll('.chart svg').length === 8", "eight charts")
        picture(page, "overview")
        picture(page, "overview-dark", is_dark=True)
        picture(page, "overview-phone", width=390)
        page.evaluate("location.hash = '#/topics'")
        shows(page, "orders")
        append(server, "orders", [{"data": 1}] * 1_000)
        shows(page, "1,020")
        picture(page, "topics")
        picture(page, "topics-phone", width=390)


def test_hostile_records_are_text(browser: Browser, server: Server) -> None:
    deep: Any = "bottom"
    for _ in range(90):
        deep = [deep]
    append(
        server,
        "hostile",
        [
            {"data": SCRIPT, "tag": "<b>tag</b>", "meta": {SCRIPT: SCRIPT}},
            {"data": {"text": RIGHT_TO_LEFT}, "tag": RIGHT_TO_LEFT},
            {"data": deep},
            {"data": {"__proto__": {"ran": True}, "onclick": "window.ran = true"}},
        ],
    )
    append(server, "hostile", [{"data": LONG}])
    with console(browser, server, "topic/hostile") as page:
        page.wait("document.querySelectorAll('.record').length === 5", "five records")
        page.evaluate("document.querySelectorAll('.record').forEach(row => { row.open = true; })")
        shows(page, "show all 1,000,000 characters")
        page.evaluate("document.querySelectorAll('.j-node').forEach(node => { node.open = true; })")
        assert (
            page.evaluate("document.querySelectorAll('main img, main script, main b').length") == 0
        )
        assert SCRIPT.split("<script>")[0] in page.evaluate("document.body.textContent")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        press(page, "Exact bytes", "document.querySelector(\".record[data-seq='1']\")")
        exact = "document.querySelector(\".record[data-seq='1'] pre\")"
        page.wait(f"Boolean({exact})", "the bytes are shown")
        shown = json.loads(page.evaluate(f"{exact}.textContent"))
        assert shown["record"]["data"] == SCRIPT
        picture(page, "hostile")
        press(page, "show all 1,000,000 characters")
        page.wait(f"document.body.textContent.includes('{'x' * 1000}')", "all of it is shown")


def test_records_are_found_appended_and_deleted(browser: Browser, server: Server) -> None:
    append(
        server,
        "orders",
        [{"data": {"n": n}, "tag": f"t{n % 2}", "node": "w"} for n in range(1, 121)],
    )
    seqs = "[...document.querySelectorAll('.record')].map(row => Number(row.dataset.seq))"
    with console(browser, server, "topic/orders/records") as page:
        page.wait(f"{seqs}[0] === 120", "the newest comes first")
        picture(page, "records")
        picture(page, "records-phone", width=390)
        press(page, "Older →")
        page.wait(f"{seqs}[0] === 70", "the next page")
        page.evaluate("""(() => { const input = document.querySelector("[data-filter=tag]");
            input.value = "t1"; input.dispatchEvent(new Event("change")); })()""")
        press(page, "Newest")
        page.wait(f"{seqs}[0] === 119 && {seqs}[1] === 117", "only the tag t1")
        press(page, "Append")
        fill(page, data='{"big": 12345678901234567890}', tag="t1")
        page.wait(f"{seqs}[0] === 121", "the appended record is shown")
        number = server.api.http.get("/v0/topics/orders/records/121").content
        assert b"12345678901234567890" in number
        press(page, "Delete …")
        submit(page, tag="t1", confirm="other")
        eventually(lambda: "does not match" in page.evaluate("document.body.innerText"), "refused")
        assert server.api.get_state("orders")["count"] == 121
        fill(page, confirm="orders")
        eventually(lambda: server.api.get_state("orders")["count"] == 60, "t1 is deleted")


def test_a_tag_that_ends_in_a_star_is_deleted_alone(browser: Browser, server: Server) -> None:
    """Any writer can store such a tag; a delete of it must not become a pattern."""
    append(server, "odd", [{"data": n, "tag": tag} for n, tag in enumerate(("a", "abc", "a*"))])
    tags = "[...document.querySelectorAll('.record .chip')].map(chip => chip.textContent).join()"
    with console(browser, server, "topic/odd/records") as page:
        page.wait(f"{tags} === 'a*,abc,a'", "three records")
        page.evaluate("document.querySelector('.record').open = true")
        page.wait("Boolean(document.querySelector('.record-detail .danger'))", "the record is open")
        press(page, "Delete this tag …")
        fill(page, confirm="odd")
        page.wait(f"{tags} === 'abc,a'", "only this tag is gone")
        press(page, "Delete …")
        fill(page, tag="a", how="begins", confirm="odd")
        eventually(lambda: server.api.get_state("odd")["count"] == 0, "the beginning matches both")


def test_a_mistake_in_the_text_keeps_the_dialog(browser: Browser, server: Server) -> None:
    append(server, "notes", [{"data": 1}])
    with console(browser, server, "topic/notes/records") as page:
        shows(page, "1 records")
        press(page, "Append")
        submit(page, data='{"a": 1,}')
        page.wait("document.querySelector('.mistake').textContent.includes('JSON')", "the mistake")
        assert page.evaluate("document.querySelector('textarea').value") == '{"a": 1,}'
        fill(page, data='{"a": 1}')
        eventually(lambda: server.api.get_state("notes")["count"] == 2, "it is stored")


def test_places_that_do_not_exist_show_a_panel(browser: Browser, server: Server) -> None:
    append(server, "orders", [{"data": 9007199254740993}])
    with console(browser, server, "constructor") as page:
        shows(page, "All is well")
        page.evaluate("location.hash = '#/topic/orders/constructor'")
        shows(page, "≈ 9007199254740992")


def test_the_overview_says_that_the_server_is_away(browser: Browser, server: Server) -> None:
    with console(browser, server, "overview") as page:
        shows(page, "All is well")
        server.stop()
        page.wait(f"!{TEXT}.includes('All is well')", "no good health without a server")
        page.evaluate("location.hash = '#/topic/later'")
        shows(page, "All topics")
        server.start()
        shows(page, 'topic "later" does not exist')
        append(server, "later", [{"data": "here again"}])
        shows(page, "here again")


def test_dead_letters_behind_those_of_another_queue_can_be_moved_back(
    browser: Browser, server: Server
) -> None:
    for name, count in (("first", 2), ("second", 60)):
        config = {"type": "queue", "max_deliveries": 1, "dead_letter": "dead"}
        good(server.api.put(name, config))
        append(server, name, [{"data": n} for n in range(count)])
        claim = {"node": "w", "max": count, "lease_ms": 600_000}
        jobs = good(server.api.http.post(f"/v0/topics/{name}/claim", json=claim))["claimed"]
        body = {"node": "w", "seqs": [job["$seq"] for job in jobs]}
        good(server.api.http.post(f"/v0/topics/{name}/nack", json=body))
        good(server.api.http.post(f"/v0/topics/{name}/claim", json=claim))
    with console(browser, server, "topic/first") as page:
        # Both dead letters come after 60 others: the panel reads page after page until it finds
        # them.
        page.wait("document.querySelectorAll('[aria-label^=\"Redrive \"]').length === 2", "two")
        press(page, "Redrive all …")
        fill(page)
        eventually(lambda: server.api.get_state("first")["count"] == 2, "both are jobs again")


def test_dead_letters_are_turned_page_by_page(browser: Browser, server: Server) -> None:
    good(server.api.put("jobs", {"type": "queue", "max_deliveries": 1, "dead_letter": "dead"}))
    append(server, "jobs", [{"data": n} for n in range(60)])
    claim = {"node": "w", "max": 60, "lease_ms": 600_000}
    good(server.api.http.post("/v0/topics/jobs/claim", json=claim))
    nack = {"node": "w", "seqs": list(range(1, 61))}
    good(server.api.http.post("/v0/topics/jobs/nack", json=nack))
    good(server.api.http.post("/v0/topics/jobs/claim", json=claim))
    eventually(lambda: server.api.state("dead").status_code == 200, "there are dead letters")
    eventually(lambda: bool(server.api.get_state("dead")["count"] == 60), "all jobs are dead")
    letters = "document.querySelectorAll('[aria-label^=\"Redrive \"]').length"
    with console(browser, server, "topic/jobs") as page:
        page.wait(f"{letters} === 50", "the newest letters")
        press(page, "Older →")
        page.wait(f"{letters} === 10", "the older letters")
        assert page.evaluate("Boolean(document.querySelector('[aria-label=\"Redrive 1\"]'))")
        press(page, "← Newer")
        page.wait(f"{letters} === 50", "the newest letters again")


def test_the_front_page_leads_to_the_console_below_a_prefix(
    browser: Browser, tmp_path: Path
) -> None:
    mounted = Server(tmp_path / "mounted", {"PYTHONPATH": str(ROOT)}, command=command_of("mounted"))
    mounted.start()
    try:
        append(mounted, "orders", [{"data": {"id": 7}}])
        with browser.page(f"{mounted.api.url}/my%20app/") as page:
            page.evaluate("document.querySelector('a').click()")
            at_console = "location.pathname === '/my%20app/console'"
            page.wait(f"{at_console} && Boolean(document.getElementById('main'))", "the console")
            shows(page, "All is well")
            page.evaluate("location.hash = '#/topic/orders/records'")
            page.wait("document.querySelectorAll('.record').length === 1", "the record")
            assert page.exceptions == []
    finally:
        mounted.stop()


def test_the_keyboard_keeps_its_place_while_figures_change(
    browser: Browser, server: Server
) -> None:
    append(server, "orders", [{"data": 1}])
    with console(browser, server, "topics") as page:
        shows(page, "orders")
        page.evaluate("document.querySelector('td a').focus()")
        page.evaluate("document.querySelector('td a').before = true")
        page.wait("document.querySelector('td a').before !== true", "the table is drawn again")
        assert page.evaluate("document.activeElement.textContent") == "orders"


def test_a_gap_is_shown(browser: Browser, server: Server) -> None:
    good(server.api.put("small", {"cap_records": 5}))
    append(server, "small", [{"data": n} for n in range(20)])
    with console(browser, server, "topic/small/records") as page:
        page.evaluate("""(() => { const input = document.querySelector("[aria-label^='Start at']");
            input.value = "1"; input.dispatchEvent(new Event("change")); })()""")
        shows(page, "1 to 15 are gone: cap")


def test_the_live_tail_pauses_and_misses_nothing(browser: Browser, server: Server) -> None:
    append(server, "feed", [{"data": n} for n in range(3)])
    seqs = "[...document.querySelectorAll('.record')].map(row => Number(row.dataset.seq)).reverse()"
    with console(browser, server, "topic/feed/live") as page:
        page.wait(f"{seqs}.length === 3", "the last records")
        append(server, "feed", [{"data": "four"}])
        page.wait(f"{seqs}.length === 4", "a new record arrives")
        press(page, "Pause")
        shows(page, "paused at 4")
        append(server, "feed", [{"data": n} for n in range(6)])
        page.evaluate("new Promise(done => setTimeout(done, 600))")
        assert page.evaluate(seqs) == [1, 2, 3, 4]
        press(page, "Resume")
        page.wait(f"{seqs}.length === 10", "what came meanwhile")
        picture(page, "live", is_dark=True)
        server.restart()
        append(server, "feed", [{"data": "after the restart"}])
        page.wait(f"{seqs}.length === 11", "it goes on after a restart")
        assert page.evaluate(seqs) == list(range(1, 12))


def test_the_queue_board_acts_on_jobs(browser: Browser, server: Server) -> None:
    config = {"type": "queue", "max_deliveries": 1, "dead_letter": "jobs-dead"}
    good(server.api.put("jobs", config))
    append(server, "jobs", [{"data": {"job": n}} for n in range(5)])
    append(server, "jobs", [{"data": "later", "delay_ms": 600_000}])

    def claim(count: int) -> None:
        body = {"node": "worker-1", "max": count, "lease_ms": 600_000}
        good(server.api.http.post("/v0/topics/jobs/claim", json=body))

    def counts() -> Any:
        return server.api.get_state("jobs")["queue"]

    claim(2)
    nack = {"node": "worker-1", "seqs": [1], "error": SCRIPT}
    good(server.api.http.post("/v0/topics/jobs/nack", json=nack))
    claim(1)
    with console(browser, server, "topic/jobs") as page:
        shows(page, "worker-1")
        shows(page, "onerror='window.ran = true'")
        picture(page, "queue")
        picture(page, "queue-phone", width=390)
        assert counts()["dead_lettered"] == 1
        press(page, "Redrive")
        eventually(
            lambda: server.api.get_state("jobs-dead")["count"] == 0,
            "the dead letter is a job again",
        )
        held = counts()["in_flight"]
        press(page, "Ack")
        fill(page)
        eventually(lambda: counts()["in_flight"] == held - 1, "the job is complete")
        press(page, "Purge …")
        fill(page, confirm="jobs")
        eventually(lambda: server.api.get_state("jobs")["count"] == 0, "the queue is empty")
        shows(page, "No worker holds a job")


def test_routers_views_and_streams(browser: Browser, server: Server) -> None:
    append(server, "orders", [{"data": n, "tag": SCRIPT} for n in range(3)])
    for name, source, dest in (("audit", "orders", "log"), ("mail", "log", "mails")):
        good(server.api.http.put(f"/v0/routers/{name}", json={"source": source, "dest": dest}))
    view = {"shortcut": {"count_by_tag": True}}
    good(server.api.http.put("/v0/topics/orders/views/by-tag", json=view))
    page_of_stream = f"<html><body>{SCRIPT}</body></html>".encode()
    kind = {"content-type": "text/html"}
    made = server.api.http.put("/v1/stream/pages/1", content=page_of_stream, headers=kind)
    assert made.status_code == 201
    with console(browser, server, "routers") as page:
        shows(page, "caught up")
        assert page.evaluate("document.querySelectorAll('.graph .node').length") == 3
        picture(page, "routers")
        page.evaluate("location.hash = '#/topic/orders/views'")
        shows(page, "by-tag")
        press(page, "Run")
        shows(page, "1 rows as of record 3")
        assert SCRIPT in page.evaluate("document.querySelector('main').textContent")
        picture(page, "views")
        page.evaluate("location.hash = '#/streams'")
        page.wait("Boolean(document.querySelector('form.bar'))", "the form of streams")
        page.evaluate("document.querySelector('form.bar input').value = 'pages/1'")
        press(page, "Read")
        shows(page, "<html><body>")
        page.evaluate("document.querySelector('pre.raw').remove()")
        press(page, "pages/1")
        page.wait("document.querySelector('pre.raw')?.textContent.startsWith('<html>')", "again")
        picture(page, "streams")


def test_stored_html_and_svg_run_on_no_origin(browser: Browser, server: Server) -> None:
    svg = "<svg xmlns='http://www.w3.org/2000/svg'><script>window.ran = true</script></svg>"
    script = "<script>window.ran = true</script>"
    for path, kind, content in (("1", "text/html", script), ("2", "image/svg+xml", svg)):
        url = f"/v1/stream/stored/{path}"
        headers = {"content-type": kind}
        made = server.api.http.put(url, content=content.encode(), headers=headers)
        assert made.status_code == 201
        got = server.api.http.get(url)
        assert got.headers["content-security-policy"] == "sandbox; default-src 'none'"
        with browser.page(f"{server.api.url}{url}") as page:
            assert page.evaluate("window.ran === undefined")
            assert page.evaluate("origin") == "null"


def test_with_a_key_the_console_asks_for_it_and_no_address_holds_it(
    browser: Browser, server: Server
) -> None:
    secret = "console-key-of-the-test"
    server.stop()
    server.env = {**server.env, "TOPICS_API_KEYS": secret}
    server.start()
    server.api.http.headers["authorization"] = f"Bearer {secret}"
    append(server, "orders", [{"data": 1}])
    with browser.page(f"{server.api.url}/console#/topics") as page:
        fill(page, key=secret)
        shows(page, "orders")
        kept = "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])"
        assert secret not in page.evaluate(kept)
        addresses = page.evaluate("performance.getEntries().map((entry) => entry.name)")
        assert secret not in " ".join([page.evaluate("location.href"), *addresses])
        page.reload()
        page.wait("Boolean(document.querySelector('dialog[open]'))", "a reload forgets the key")
        assert page.exceptions == []
