"""A server without keys and pages of other origins, in a real browser: what the pages may do.

A page on another port of the same host is same-site, a page of another host cross-site. Each tries
the requests that a browser sends without a preflight, and those with one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.browser.chromium import Browser, Page
from tests.browser.conftest import Pages
from tests.contract.driver import Server, good
from tests.ports import lasting_port

JOBS: Final = "jobs"
LOG: Final = "log"
# Each returns the status of its answer, or "refused" if the browser withholds the answer.
ATTEMPTS: Final[dict[str, str]] = {
    "append": """fetch(SERVER + "/v1/stream/log", {
        method: "POST", mode: MODE, headers: {"Content-Type": "text/plain"}, body: "1"})""",
    "append as a form": """fetch(SERVER + "/v1/stream/log", {
        method: "POST", mode: MODE, body: new URLSearchParams({a: "1"})})""",
    "append over /v0": """fetch(SERVER + "/v0/topics/jobs", {method: "POST",
        headers: {"Content-Type": "application/json"}, body: '{"records":[{"data":1}]}'})""",
    "seal": """fetch(SERVER + "/v0/admin/seal", {method: "POST", mode: MODE})""",
    "claim": """fetch(SERVER + "/v0/topics/jobs/claim", {method: "POST",
        headers: {"Content-Type": "application/json"}, body: '{"node":"page"}'})""",
    "delete": """fetch(SERVER + "/v0/topics/log", {method: "DELETE"})""",
}
WORK: Final = """new Promise((tell) => {
    const source = new EventSource(SERVER + "/v0/topics/jobs/work?node=page");
    source.addEventListener("job", (event) => {
        tell(JSON.parse(event.data).data);
        source.close();
    });
    source.onerror = () => { tell("refused"); source.close(); };
})"""
IMAGE: Final = """new Promise((tell) => {
    const image = new Image();
    image.onload = image.onerror = () => tell("over");
    image.src = SERVER + "/v0/topics/jobs/work?node=image&max=8";
})"""
SOCKET: Final = """new Promise((tell) => {
    const socket = new WebSocket(SERVER.replace("http", "ws") + "/v0/ws");
    socket.onopen = () => { tell("open"); socket.close(); };
    socket.onclose = () => tell("refused");
})"""


@pytest.fixture
def keyless(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    """A running server that lists no origin, unless the test names some."""
    env = {"TOPICS_PORT": str(lasting_port())}
    if listed := getattr(request, "param", ""):
        env["TOPICS_CORS_ORIGINS"] = getattr(request.getfixturevalue("pages"), listed)
    server = Server(tmp_path / "server", env)
    server.start()
    good(server.api.put(JOBS, {"type": "queue"}))
    server.api.add(JOBS, "a job")
    made = server.api.http.put(
        f"/v1/stream/{LOG}", content=b"text", headers={"content-type": "text/plain"}
    )
    assert made.status_code == 201
    yield server
    server.stop()


def attempt(page: Page, server: Server, script: str, *, mode: str = "no-cors") -> Any:
    """The result of one attempt."""
    asked = script.replace("SERVER", json.dumps(server.api.url)).replace("MODE", json.dumps(mode))
    if script.startswith("fetch"):
        asked += '.then((answer) => answer.type === "opaque" ? "opaque" : answer.status, '
        asked += '() => "refused")'
    return page.evaluate(asked)


def held(server: Server) -> tuple[int, int, dict[str, Any], int]:
    """All that a page could have changed: records of both topics, the jobs, the log's files."""
    jobs, log = server.api.get_state(JOBS), server.api.get_state(LOG)
    return jobs["head_seq"], log["head_seq"], jobs["queue"], log["disk_bytes"]


@pytest.mark.parametrize("origin", ["origin", "stranger"])
def test_a_page_of_another_port_or_host_changes_nothing(
    browser: Browser, pages: Pages, keyless: Server, origin: str
) -> None:
    before = held(keyless)
    with browser.page(f"{getattr(pages, origin)}/index.html") as page:
        for script in ATTEMPTS.values():
            assert attempt(page, keyless, script) in ("opaque", "refused")
        assert attempt(page, keyless, WORK) == "refused"
        assert attempt(page, keyless, IMAGE) == "over"
        assert attempt(page, keyless, SOCKET) == "refused"
    assert held(keyless) == before
    # The attempt did not claim the job either, because this claim is its first delivery.
    claimed = good(keyless.api.http.post(f"/v0/topics/{JOBS}/claim", json={"node": "worker"}))
    assert [job["deliveries"] for job in claimed["claimed"]] == [1]


def test_the_servers_own_page_may_do_all_of_it(browser: Browser, keyless: Server) -> None:
    with browser.page(f"{keyless.api.url}/v0/docs") as page:
        told = {
            name: attempt(page, keyless, script, mode="cors") for name, script in ATTEMPTS.items()
        }
        assert told == {
            "append": 204,
            "append as a form": 409,  # the log's content type differs
            "append over /v0": 200,
            "seal": 200,
            "claim": 200,
            "delete": 200,
        }
        assert attempt(page, keyless, WORK) == 1
        assert attempt(page, keyless, SOCKET) == "open"


@pytest.mark.parametrize("keyless", ["origin"], indirect=True)
def test_a_page_of_a_listed_origin_gets_jobs(
    browser: Browser, pages: Pages, keyless: Server
) -> None:
    with browser.page(f"{pages.origin}/index.html") as page:
        assert attempt(page, keyless, WORK) == "a job"
        assert attempt(page, keyless, ATTEMPTS["seal"], mode="cors") == 200
        assert attempt(page, keyless, SOCKET) == "open"
    with browser.page(f"{pages.stranger}/index.html") as page:
        assert attempt(page, keyless, WORK) == "refused"
