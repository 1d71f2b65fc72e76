"""Every route and every command of a WebSocket × every kind of caller: the exact code of each.

`ROWS` states, independently of the server, the need of each method of each path; a route without a
row fails, and so does a row without a route. §0.2, §7, §8, §12.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import pytest

from tests.contract.access.callers import (
    ABSENT,
    GRANTS,
    INSIDE,
    KEYS,
    OUTSIDE,
    Guarded,
    Told,
    said,
)
from tests.contract.conftest import URL
from topics_server.api.routes import build_routes
from topics_server.api.websocket.commands import OPS

QUEUE: Final[dict[str, object]] = {"type": "queue", "lease_ms": 100}
RECORD: Final[dict[str, object]] = {"records": [{"data": 1}]}
R, W, D, A = "read", "write", "delete", "admin"


@dataclass(frozen=True)
class Row:
    """The need of a path's method, the request to send, and the answer to an allowed caller.

    If `needs` is None, the caller needs nothing, not even a key.
    """

    needs: frozenset[str] | None
    ok: int
    body: object = None


def row(*needs: str, ok: int = 200, body: object = None) -> Row:
    """A row that needs these scopes."""
    return Row(frozenset(needs), ok, body)


VIEW: Final[dict[str, object]] = {"shortcut": {"count_by_tag": True}}
OPEN: Final = Row(None, 200)
T: Final = "/v0/topics/{topic}"
V: Final = "/v0/topics/{topic}/views/{view}"
C: Final = "/v0/topics/{topic}/consumers/{consumer}"
S: Final = "/v1/stream/{path}"
ROWS: Final[dict[tuple[str, str], Row]] = {
    ("GET", "/v0/topics"): row(R),
    ("PUT", T): row(A, body={}),
    ("PATCH", T): row(A, body={}),
    ("GET", T): row(R),
    ("POST", T): row(W, body=RECORD),
    ("DELETE", T): row(D),
    ("POST", f"{T}/diff"): row(R, body={}),
    ("GET", f"{T}/records"): row(R),
    # No record has seq 0: an allowed caller gets that error.
    ("GET", f"{T}/records/{{seq}}"): row(R, ok=400),
    ("POST", f"{T}/delete"): row(D, body={"before_seq": 1}),
    ("GET", f"{T}/consumers"): row(R),
    ("PUT", C): row(R, W, body={}),
    ("GET", C): row(R),
    ("DELETE", C): row(R, W),
    ("POST", f"{C}/commit"): row(R, W, body={"seq": 0}),
    ("POST", f"{T}/claim"): row(R, W, body={"node": "n"}),
    ("POST", f"{T}/ack"): row(W, body={"node": "n", "seqs": [1]}),
    ("POST", f"{T}/nack"): row(W, body={"node": "n", "seqs": [1]}),
    ("POST", f"{T}/extend"): row(W, body={"node": "n", "seqs": [1], "lease_ms": 100}),
    ("POST", f"{T}/redrive"): row(W, body={"from": "t.dead", "all": True}),
    ("GET", f"{T}/work"): row(R, W),
    ("GET", f"{T}/leases"): row(R),
    ("PUT", S): row(W, body=[]),
    ("POST", S): row(W, ok=204, body={"n": 1}),
    ("GET", S): row(R),
    ("DELETE", S): row(D, ok=204),
    ("GET", f"{T}/views"): row(R),
    ("PUT", V): row(A, body=VIEW),
    ("GET", V): row(R),
    ("DELETE", V): row(A),
    ("GET", f"{V}/stats"): row(R),
    ("POST", f"{V}/query"): row(R, body={"query": "all"}),
    ("GET", f"{V}/query/{{query}}"): row(R),
    # The name of the query is missing: an allowed caller gets that error.
    ("GET", f"{V}/live"): row(R, ok=400),
    ("POST", f"{V}/rebuild"): row(A, body={}),
    ("GET", "/v0/routers"): row(R),
    ("PUT", "/v0/routers/{router}"): row(A, body={"source": "t.src", "dest": "t.dst"}),
    ("GET", "/v0/routers/{router}"): row(R),
    ("DELETE", "/v0/routers/{router}"): row(D),
    ("POST", "/v0/watch"): row(R, body={"topics": {INSIDE: {}}}),
    # No such session exists: an allowed caller gets that error.
    ("GET", "/v0/watch/{wid}"): row(R, ok=404),
    ("GET", f"{T}/live"): row(R),
    ("POST", f"{T}/live"): row(R),
    # There are neither topics nor a prefix: an allowed caller gets that error.
    ("GET", "/v0/live"): row(R, ok=400),
    ("POST", "/v0/live"): row(R, ok=400),
    ("GET", "/v0/ws"): row(ok=400),
    ("GET", "/v0/health"): OPEN,
    ("GET", "/healthz"): OPEN,
    ("GET", "/v0/ready"): OPEN,
    ("GET", "/readyz"): OPEN,
    ("GET", "/v0/metrics"): row(R),
    ("POST", "/v0/admin/seal"): row(A, body={}),
    # There is no folder for backups: an allowed caller gets that error.
    ("POST", "/v0/admin/backup"): row(A, ok=404),
    ("GET", "/v0/admin/backup"): row(A, ok=404),
    ("GET", "/"): OPEN,
    ("GET", "/console"): OPEN,
    ("GET", "/console/static/{file}"): OPEN,
    ("GET", "/v0/openapi.json"): OPEN,
    ("GET", "/v0/docs"): OPEN,
    ("GET", "/v0/docs/{file}"): OPEN,
}
# The scopes that WebSocket commands need, and their bodies; names are filled in as in a path.
COMMANDS: Final[dict[str, tuple[frozenset[str], dict[str, Any]]]] = {
    "subscribe": (frozenset({R}), {"op": "subscribe", "topic": "{topic}", "tail": True}),
    "subscribe to a map": (frozenset({R}), {"op": "subscribe", "topics": {"{topic}": {}}}),
    "unsubscribe": (frozenset(), {"op": "unsubscribe", "topic": "{topic}"}),
    "subscribe to a prefix": (frozenset({R}), {"op": "subscribe", "prefixes": {"{topic}": {}}}),
    "unsubscribe a prefix": (frozenset(), {"op": "unsubscribe", "prefixes": ["{topic}"]}),
    "publish": (frozenset({W}), {"op": "publish", "topic": "{topic}", **RECORD}),
    "publish with config": (
        frozenset({W, A}),
        {"op": "publish", "topic": "{topic}", "config": {}, **RECORD},
    ),
    "ping": (frozenset(), {"op": "ping"}),
}
NAMED: Final = [
    key for key in ROWS if any(kind in key[1] for kind in ("{topic}", "{router}", "{path}"))
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    if URL:
        pytest.skip("needs a server of its own; TOPICS_CONTRACT_URL names a shared one")
    guarded = Guarded(tmp_path_factory.mktemp("matrix"))
    yield guarded
    guarded.close()


@pytest.fixture
def ready(server: Guarded) -> Guarded:
    """The server with every name that the tests use, also if an earlier test deleted it."""
    for name in (INSIDE, OUTSIDE):
        server.good("PUT", f"/v0/topics/{name}", QUEUE)
        assert server.ask("all", "PUT", path_of(S, name), []).status in (200, 201)
    server.good("PUT", "/v0/topics/t.dead", {})
    server.good("PUT", f"/v0/routers/{INSIDE}", {"source": "t.src", "dest": "t.dst"})
    server.good("PUT", f"/v0/routers/{OUTSIDE}", {"source": "x.src", "dest": "x.dst"})
    for name in (INSIDE, OUTSIDE):
        server.good("PUT", path_of(V, name), VIEW)
        server.good("PUT", path_of(C, name), {})
    server.good("DELETE", f"/v0/topics/{ABSENT}")
    return server


def path_of(template: str, name: str) -> str:
    """The path of a template for this name."""
    path = template.replace("{topic}", name).replace("{router}", name)
    path = path.replace("{path}", f"{name}/of its own".replace(" ", "%20"))
    path = path.replace("{wid}", "wid_nobody-has-such-a-one").replace("{file}", "start.js")
    path = path.replace("{view}", "v").replace("{query}", "all").replace("{seq}", "0")
    path = path.replace("{consumer}", "c")
    return f"{path}?node=n" if path.endswith("/work") else path


def expected(row: Row, caller: str) -> int:
    """The status that the table requires."""
    scopes = GRANTS[caller]
    if row.needs is None:
        return row.ok
    if scopes is None:
        return 401
    return row.ok if row.needs <= scopes else 403


CODES: Final = {401: "unauthorized", 403: "forbidden", 404: "not_found", 400: "invalid_request"}


def test_every_route_and_every_command_has_its_row() -> None:
    """§0.2: a route without a row has no decided access rule."""
    routes = {
        (method, route.template)
        for route in build_routes().table
        for method in route.handlers
        if method != "HEAD"
    }
    assert routes == ROWS.keys()
    assert {command["op"] for _, command in COMMANDS.values()} == set(OPS)


@pytest.mark.parametrize("caller", GRANTS)
@pytest.mark.parametrize(("method", "template"), ROWS)
def test_each_caller_gets_the_documented_code(
    ready: Guarded, method: str, template: str, caller: str
) -> None:
    """Contract §0.2 [0.2-01, 0.2-02, 0.2-07, 0.2-08, 0.2-09, 0.2-10, 0.2-11, 0.2-12, 0.2-13,
    0.2-14, 0.2-15, 0.2-16, 0.2-18, 0.2-25, 0.2-03, 8.3-13]
    """
    found = ROWS[method, template]
    told = ready.ask(caller, method, path_of(template, INSIDE), found.body)
    wanted = expected(found, caller)
    assert told.status == wanted, told.body
    if wanted >= 400:
        assert told.code == CODES[wanted]
    assert ("www-authenticate" in told.headers) == (wanted == 401)
    assert b"secret" not in told.body
    if method == "GET":
        head = ready.ask(caller, "HEAD", path_of(template, INSIDE))
        assert (head.status, head.body) == (wanted, b"")


def told_of(answer: Told, name: str) -> tuple[dict[str, str], bytes]:
    """An answer without its time-dependent parts, and with `{name}` in place of the name."""
    moment = ("date", "content-length")
    headers = {key: value for key, value in answer.headers.items() if key not in moment}
    body = re.sub(rb',"performance":\{[^{}]*\}\}\Z', b"}", answer.body)
    return headers, body.replace(name.encode(), b"{name}")


@pytest.mark.parametrize(("method", "template"), NAMED)
def test_a_name_outside_is_refused_alike_whether_or_not_it_exists(
    ready: Guarded, method: str, template: str
) -> None:
    """Contract §0.2 [0.2-19, 0.2-21, 0.2-25]"""
    body = ROWS[method, template].body
    there, absent = (
        ready.ask("prefix", method, path_of(template, name), body) for name in (OUTSIDE, ABSENT)
    )
    assert there.status == 403
    assert there.code == "forbidden"
    assert told_of(there, OUTSIDE) == told_of(absent, ABSENT)
    # The refused requests changed nothing and created nothing.
    assert ready.ask("all", "GET", f"/v0/topics/{OUTSIDE}").status == 200
    assert ready.ask("all", "GET", f"/v0/routers/{OUTSIDE}").status == 200
    assert ready.ask("all", "GET", path_of(S, OUTSIDE)).status == 200
    for kind in ("topics", "routers"):
        assert ready.ask("all", "GET", f"/v0/{kind}/{ABSENT}").status == 404
    assert ready.ask("all", "GET", path_of(S, ABSENT)).status == 404


# Each request whose body or query names a topic, with the field that a refusal names.
BODIES: Final[dict[str, tuple[str, str, str, object]]] = {
    "watch": ("POST", "/v0/watch", "topics.{name}", {"topics": {"t.in": {}, "{name}": {}}}),
    "watch, leniently": (
        "POST",
        "/v0/watch?lenient=true",
        "topics.{name}",
        {"topics": {"{name}": {}}},
    ),
    "source": ("PUT", "/v0/routers/t.r", "source", {"source": "{name}", "dest": "t.dst2"}),
    "dest": ("PUT", "/v0/routers/t.r", "dest", {"source": "t.src2", "dest": "{name}"}),
    "dead_letter": ("PUT", "/v0/topics/t.q", "dead_letter", {**QUEUE, "dead_letter": "{name}"}),
    "lease_log": ("PUT", "/v0/topics/t.q", "lease_log", {**QUEUE, "lease_log": "{name}"}),
    "config of an append": (
        "POST",
        "/v0/topics/t.q",
        "config.dead_letter",
        RECORD | {"config": QUEUE | {"dead_letter": "{name}"}},
    ),
    "live": ("POST", "/v0/live?topics=t.in,{name}", "topics", None),
    "live by prefix": ("POST", "/v0/live?prefix={name}", "prefix", None),
    "redrive": ("POST", "/v0/topics/t.in/redrive", "from", {"from": "{name}", "all": True}),
}


def named(sent: Any, name: str) -> Any:
    """The request with the name in it."""
    if isinstance(sent, dict):
        return {named(key, name): named(value, name) for key, value in sent.items()}
    if isinstance(sent, list):
        return [named(value, name) for value in sent]
    return sent.replace("{name}", name).replace("{topic}", name) if isinstance(sent, str) else sent


@pytest.mark.parametrize("case", BODIES)
def test_a_name_in_a_body_is_as_one_in_a_path(ready: Guarded, case: str) -> None:
    """Contract §0.2 [0.2-22, 0.2-23, 7.1-04]"""
    method, path, field, body = BODIES[case]
    there, absent = (
        ready.ask("prefix", method, named(path, name), named(body, name))
        for name in (OUTSIDE, ABSENT)
    )
    assert (there.status, there.code) == (403, "forbidden")
    assert there.json()["error"]["detail"] == {"field": named(field, OUTSIDE), "name": OUTSIDE}
    assert told_of(there, OUTSIDE) == told_of(absent, ABSENT)
    # The refused requests created nothing; with a name inside the prefix all of them are allowed.
    for made in ("t.r", "t.q", "t.src2", "t.dst2", ABSENT):
        for kind in ("topics", "routers"):
            assert ready.ask("all", "GET", f"/v0/{kind}/{made}").status == 404
    allowed = ready.ask("prefix", method, named(path, "t.dead"), named(body, "t.dead"))
    assert allowed.status in (200, 201), allowed.body
    for made in ("t.r", "t.q", "t.src2", "t.dst2"):
        ready.good("DELETE", f"/v0/routers/{made}")
        ready.good("DELETE", f"/v0/topics/{made}")


def test_a_redrive_from_a_dead_letter_topic_outside_is_refused(ready: Guarded) -> None:
    ready.good("PUT", f"/v0/topics/{INSIDE}", {**QUEUE, "dead_letter": OUTSIDE})
    told = ready.ask("prefix", "POST", f"/v0/topics/{INSIDE}/redrive", {"all": True})
    assert (told.status, told.code) == (403, "forbidden")
    assert OUTSIDE.encode() not in told.body


# --- WebSocket ------------------------------------------------------------------------------------


@pytest.mark.parametrize("caller", GRANTS)
def test_each_caller_may_send_its_commands(ready: Guarded, caller: str) -> None:
    """Contract §7 WebSocket [0.2-17, 7-ws-02]"""
    scopes = GRANTS[caller]
    if scopes is None:
        assert ready.refusal_of_socket(caller).status_code == 401
        return
    with ready.socket(caller) as socket:
        for name, (needs, command) in COMMANDS.items():
            told = said(socket, request_id=name, **named(command, INSIDE))
            assert told["request_id"] == name
            if needs <= scopes:
                # A caller whose subscribe was refused has no subscription.
                is_absent = name.startswith("unsubscribe") and R not in scopes
                assert told.get("code") == ("invalid_request" if is_absent else None), told
            else:
                assert (told["op"], told["code"]) == ("error", "forbidden")
                assert told["detail"] == {
                    "scopes": [s for s in (R, W, D, A) if s in needs - scopes]
                }


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "ping"])
def test_a_command_for_a_name_outside_is_refused_alike(ready: Guarded, name: str) -> None:
    """Contract §7 WebSocket [0.2-17, 0.2-19]"""
    command = COMMANDS[name][1]
    with ready.socket("prefix") as socket:
        there = said(socket, **named(command, OUTSIDE))
        absent = said(socket, **named(command, ABSENT))
        expected = "invalid_request" if name.startswith("unsubscribe") else "forbidden"
        assert there["code"] == expected
        assert named_as(there, OUTSIDE, ABSENT) == absent
        assert said(socket, op="ping")["op"] == "pong"
    assert ready.ask("all", "GET", f"/v0/topics/{ABSENT}").status == 404


def test_a_command_whose_config_names_a_topic_outside_is_refused(ready: Guarded) -> None:
    with ready.socket("prefix") as socket:
        config = {**QUEUE, "dead_letter": OUTSIDE}
        told = said(socket, op="publish", topic="t.new", config=config, **RECORD)
    assert told["detail"] == {"field": "config.dead_letter", "name": OUTSIDE}
    assert ready.ask("all", "GET", "/v0/topics/t.new").status == 404


def named_as(told: Any, name: str, other: str) -> Any:
    """The answer with another name in it."""
    if isinstance(told, dict):
        return {key: named_as(value, name, other) for key, value in told.items()}
    return told.replace(name, other) if isinstance(told, str) else told


def test_every_kind_of_caller_is_there() -> None:
    assert KEYS.keys() == GRANTS.keys()
