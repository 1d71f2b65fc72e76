"""§10, §0.5: malformed requests to queues: each gets its status, code and field, and changes
nothing.

`{q}` is a queue of three jobs, one of them leased; `{l}` a log; `{a}` a topic that does not exist.
After each request the queue with its leases, the log and the number of topics are unchanged.
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from typing import Final

import pytest

from tests.contract.conftest import new_name
from tests.contract.driver import Api, Json, refused
from tests.contract.malformed import MEDIA, Bad, Table, as_json, sent
from tests.contract.queues.queues import LONG_MS, Queue

HELD: Final = ("ack", "nack", "extend")
POSTS: Final = ("claim", *HELD, "redrive")


CASES = Table()
_add = CASES.add


def _body(action: str, **fields: object) -> Json:
    """A valid body for the endpoint, except for these fields; `...` leaves one out."""
    bodies: dict[str, Json] = {
        "claim": {"node": "w"},
        "ack": {"node": "w", "seqs": [1]},
        "nack": {"node": "w", "seqs": [1]},
        "extend": {"node": "w", "seqs": [1], "lease_ms": LONG_MS},
        "redrive": {"all": True},
    }
    return {k: v for k, v in (bodies[action] | fields).items() if v is not ...}


# --- text that is no JSON object ------------------------------------------------------------------
NOT_JSON: Final[dict[str, bytes]] = {
    "nothing": b"",
    "half an object": b'{"node":"w","seqs":[1]',
    "two values": b'{"node":"w","seqs":[1],"lease_ms":1,"all":true} {}',
    "a trailing comma": b'{"node":"w","seqs":[1],"lease_ms":1,"all":true,}',
    "single quotes": b"{'node':'w'}",
    "NaN": b'{"node":"w","seqs":[NaN],"lease_ms":NaN,"max":NaN,"all":true}',
    "invalid UTF-8": b'{"node":"\xff","seqs":[1],"lease_ms":1,"tag":"\xff"}',
    "a lone surrogate": rb'{"node":"\ud800","seqs":[1],"lease_ms":1,"tag":"\ud800"}',
    "a byte order mark": b'\xef\xbb\xbf{"node":"w","seqs":[1],"lease_ms":1}',
    "a million brackets": b"[" * 1_000_000,
    "a deep unknown field": b'{"node":"w","seqs":[1],"lease_ms":1,"all":true,"x":'
    + b"[" * 600
    + b"]" * 600
    + b"}",
    "an array": b"[]",
    "a number": b"7",
    "null": b"null",
    "a string": b'"{}"',
}
for _action in POSTS:
    for _what, _text in NOT_JSON.items():
        _add(f"{_action}: {_what}", Bad("POST", f"/v0/topics/{{q}}/{_action}", _text))

# --- fields ---------------------------------------------------------------------------------------
NODES: Final[dict[str, object]] = {
    "missing": ...,
    "null": None,
    "a number": 1,
    "true": True,
    "a list": ["w"],
    "an object": {},
    "empty": "",
    "129 bytes": "n" * 129,
    "65 letters of two bytes": "ä" * 65,
}
# The refusal names fields where it can; for the others a JSON reader may give up before it reads
# the name.
NUMBERS: Final[dict[str, bytes]] = {
    "-1": b"-1",
    "1.0": b"1.0",
    "1e3": b"1e3",
    "a string": b'"1"',
    "true": b"true",
    "2**64": b"18446744073709551616",
    "a list": b"[1]",
    "an object": b"{}",
}
UNREADABLE: Final[dict[str, bytes]] = {"1e400": b"1e400", "a huge number": b"9" * 5000}
SEQS: Final[dict[str, tuple[object, str]]] = {
    "missing": (..., "seqs"),
    "null": (None, "seqs"),
    "a number": (1, "seqs"),
    "a string": ("1", "seqs"),
    "an object": ({"1": 1}, "seqs"),
    "empty": ([], "seqs"),
    "of null": ([1, None], "seqs[1]"),
    "of strings": ([1, "2"], "seqs[1]"),
    "of fractions": ([1.0], "seqs[0]"),
    "of negatives": ([-1], "seqs[0]"),
    "of truth": ([True], "seqs[0]"),
    "of lists": ([[1]], "seqs[0]"),
    "of 2**64": ([1, 2**64], "seqs[1]"),
}
TOKENS: Final[dict[str, tuple[object, str]]] = {
    "a string": ("lease_1", "lease_ids"),
    "a number": (1, "lease_ids"),
    "an object": ({}, "lease_ids"),
    "empty": ([], "lease_ids"),
    "too many": (["lease_1", "lease_2"], "lease_ids"),
    "of numbers": ([1], "lease_ids[0]"),
    "of null": ([None], "lease_ids[0]"),
    "of lists": ([["lease_1"]], "lease_ids[0]"),
}


def _field(action: str, name: str, what: str, value: object, where: str | None = None) -> None:
    body = as_json(_body(action, **{name: value}))
    target = f"/v0/topics/{{q}}/{action}"
    _add(f"{action}: {name} {what}", Bad("POST", target, body, where=where or name))


def _number(action: str, name: str) -> None:
    for what, text in (NUMBERS | UNREADABLE).items():
        body = as_json(_body(action, **{name: "@"})).replace(b'"@"', text)
        where: str | None = name if what in NUMBERS else None
        target = f"/v0/topics/{{q}}/{action}"
        _add(f"{action}: {name} {what}", Bad("POST", target, body, where=where))


for _action in ("claim", *HELD):
    for _what, _value in NODES.items():
        _field(_action, "node", _what, _value)
for _action in HELD:
    for _what, (_value, _path) in SEQS.items():
        _field(_action, "seqs", _what, _value, _path)
    for _what, (_value, _path) in TOKENS.items():
        _field(_action, "lease_ids", _what, _value, _path)
    _add(
        f"{_action}: 1,001 seqs",
        Bad(
            "POST",
            f"/v0/topics/{{q}}/{_action}",
            as_json(_body(_action, seqs=list(range(1, 1002)))),
            code="batch_too_large",
        ),
    )
for _action, _name in (
    ("claim", "max"),
    ("claim", "lease_ms"),
    ("claim", "wait_ms"),
    ("nack", "delay_ms"),
    ("extend", "lease_ms"),
    ("redrive", "max"),
    ("redrive", "after_seq"),
):
    _number(_action, _name)
_field("claim", "max", "2**32", 2**32)
_field("claim", "max", "null", None)
_field("extend", "lease_ms", "missing", ...)
_field("extend", "lease_ms", "null", None)
_field("extend", "no_more", "a number", 1)

# --- an ack in a claim, a claim in an ack ---------------------------------------------------------
for _what, _value in {"a number": 1, "true": True, "a list": [[1]], "a string": "1"}.items():
    _field("claim", "ack", _what, _value, "ack")
    _field("ack", "claim_next", _what, _value, "claim_next")
for _what, (_value, _path) in SEQS.items():
    _part = {} if _value is ... else {"seqs": _value}
    _field("claim", "ack", f"with seqs {_what}", _part, f"ack.{_path}")
for _what, (_value, _path) in TOKENS.items():
    _part = {"seqs": [1], "lease_ids": _value}
    _field("claim", "ack", f"with lease_ids {_what}", _part, f"ack.{_path}")
for _count in (1_001, 20_000):
    _add(
        f"claim: ack of {_count:,} seqs",
        Bad(
            "POST",
            "/v0/topics/{q}/claim",
            as_json(_body("claim", ack={"seqs": list(range(1, _count + 1))})),
            code="batch_too_large",
            where="ack.seqs",
        ),
    )
for _name in ("max", "lease_ms", "wait_ms"):
    for _what, _text in NUMBERS.items():
        _body_of = as_json(_body("ack", claim_next={_name: "@"})).replace(b'"@"', _text)
        _add(
            f"ack: claim_next.{_name} {_what}",
            Bad("POST", "/v0/topics/{q}/ack", _body_of, where=f"claim_next.{_name}"),
        )
_field("ack", "claim_next", "of no job", {"max": 0}, "claim_next.max")

# --- redrive --------------------------------------------------------------------------------------
for _what, _fields, _where in (
    ("nothing to choose", {"all": ...}, None),
    ("all false", {"all": False}, None),
    ("all a number", {"all": 1}, "all"),
    ("all and seqs", {"seqs": [1]}, None),
    ("all and tag", {"tag": "t"}, None),
    ("tag and seqs", {"all": ..., "tag": "t", "seqs": [1]}, None),
    ("seqs empty", {"all": ..., "seqs": []}, "seqs"),
    ("seqs a number", {"all": ..., "seqs": 1}, "seqs"),
    ("tag a number", {"all": ..., "tag": 1}, "tag"),
    ("match of a star inside", {"all": ..., "match": ["tag", "Glob", "*a"]}, "match"),
    ("match of seqs", {"all": ..., "match": ["seq", "Eq", "a"]}, "match"),
    ("from itself", {"from": "{q}"}, "from"),
    ("from no name", {"from": "a b"}, "from"),
    ("from a number", {"from": 1}, "from"),
    ("from nowhere said", {}, "from"),
):
    _add(
        f"redrive: {_what}",
        Bad("POST", "/v0/topics/{q}/redrive", as_json(_body("redrive", **_fields)), where=_where),
    )
_add(
    "redrive: 1,001 seqs",
    Bad(
        "POST",
        "/v0/topics/{q}/redrive",
        as_json({"seqs": list(range(1, 1002)), "from": "{l}"}),
        code="batch_too_large",
    ),
)
_add(
    "redrive: from an absent topic",
    Bad(
        "POST",
        "/v0/topics/{q}/redrive",
        as_json({"all": True, "from": "{a}"}),
        404,
        "topic_not_found",
    ),
)

# # --- headers, methods and paths
# -------------------------------------------------------------------
for _action in POSTS:
    _good = as_json(_body(_action))
    _target = f"/v0/topics/{{q}}/{_action}"
    for _media in ("text/json", "application/x-www-form-urlencoded", ""):
        _add(
            f"{_action}: media type {_media!r}",
            Bad(
                "POST",
                _target,
                _good,
                415,
                "unsupported_media_type",
                headers=(f"Content-Type: {_media}",),
            ),
        )
    _add(
        f"{_action}: no media type",
        Bad("POST", _target, _good, 415, "unsupported_media_type", headers=()),
    )
    _add(
        f"{_action}: gzip cut short",
        Bad("POST", _target, gzip.compress(_good)[:-9], headers=(MEDIA, "Content-Encoding: gzip")),
    )
    for _method in ("GET", "PUT", "DELETE"):
        _add(
            f"{_action}: {_method}",
            Bad(_method, _target, b"" if _method == "GET" else _good, 405, "method_not_allowed"),
        )
    for _name in ("%2F", "a%20b", ".a", "n" * 256, "%C3%A4"):
        _add(f"{_action}: name {_name[:9]}", Bad("POST", f"/v0/topics/{_name}/{_action}", _good))
    _add(
        f"{_action}: an unknown path below",
        Bad("POST", f"{_target}/1", _good, 404, "not_found"),
    )
    _add(
        f"{_action}: an absent topic",
        Bad("POST", f"/v0/topics/{{a}}/{_action}", _good, 404, "topic_not_found"),
    )
    _add(
        f"{_action}: a log",
        Bad("POST", f"/v0/topics/{{l}}/{_action}", _good, 409, "not_a_queue"),
    )
_add("leases: an absent topic", Bad("GET", "/v0/topics/{a}/leases", b"", 404, "topic_not_found"))
_add("leases: a log", Bad("GET", "/v0/topics/{l}/leases", b"", 409, "not_a_queue"))
_add("leases: POST", Bad("POST", "/v0/topics/{q}/leases", b"{}", 405, "method_not_allowed"))
for _query in ("page_size=x", "page_size=-1", "page_size=1.5", "cursor=%25", "cursor=nonsense"):
    _add(f"leases: {_query}", Bad("GET", f"/v0/topics/{{q}}/leases?{_query}"))
for _what, _config in (
    ("type", {"type": "log"}),
    ("type", {"type": "stack"}),
    ("dead_letter", {"dead_letter": "{q}"}),
    ("dead_letter", {"dead_letter": "a b"}),
    ("lease_ms", {"lease_ms": -1}),
    ("claim_jitter_ms", {"claim_jitter_ms": 1.5}),
    ("max_deliveries", {"max_deliveries": "3"}),
    ("leases_durable", {"leases_durable": 1}),
    ("lease_log", {"lease_log": "{q}"}),
):
    _is_type = _config == {"type": "log"}
    _add(
        f"PUT {_config}",
        Bad(
            "PUT",
            "/v0/topics/{q}",
            as_json(_config),
            409 if _is_type else 400,
            "topic_exists_incompatible" if _is_type else "invalid_request",
            where=None if _is_type else _what,
        ),
    )


@dataclass(frozen=True, slots=True)
class Standing:
    """The state that no case may change."""

    queue: Queue
    log: str
    facts: Json


@pytest.fixture(scope="module")
def standing(api: Api) -> Standing:
    """A queue of three jobs, the first of them leased to w, and a log."""
    queue = Queue.made(api, new_name("standing"), lease_ms=LONG_MS)
    queue.add(1, 2, 3, tag="t")
    queue.take("w")
    log = new_name("log")
    api.add(log, 1)
    standing = Standing(queue, log, _facts(api, queue, log))
    assert standing.facts[queue.name]["queue"]["in_flight"] == 1
    return standing


def _facts(api: Api, queue: Queue, log: str) -> Json:
    moving = ("performance", "last_read_ts", "effective_priority", "disk_bytes")
    facts: Json = {
        name: {key: value for key, value in api.get_state(name).items() if key not in moving}
        for name in (queue.name, log)
    }
    return facts | {"held": queue.held()}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_a_malformed_request_is_refused_and_changes_nothing(
    api: Api, standing: Standing, case: Bad
) -> None:
    """Contract §10, §0.5 [10-04, 10-02, 10-03, 10.2-02, 10.2-13, 10.4-06, 10.4-07, 10.4-03,
    10.5-01, 10.6-01, 10.6-11, 11-11]
    """
    absent = new_name("absent")
    topics_before = api.http.get("/v0/ready").json()["topics"]
    sent(api, case, {"q": standing.queue.name, "l": standing.log, "a": absent})
    assert _facts(api, standing.queue, standing.log) == standing.facts
    assert api.http.get("/v0/ready").json()["topics"] == topics_before
    refused(api.state(absent), 404, "topic_not_found")


def test_the_table_is_long_enough() -> None:
    """There are at least 60 malformed requests, each of another kind. [10-04]"""
    CASES.check(60)


def test_unknown_fields_are_no_error(standing: Standing, topic: str) -> None:
    """Contract §10, settled rules [10-05]: additive versions."""
    queue = Queue.made(standing.queue.api, topic, lease_ms=LONG_MS)
    queue.add(1, 2)
    [job] = queue.take("w", later={"x": [1]}, seqs="?")
    assert queue.extend("w", [1], LONG_MS, max="x", lease_ids=[job["lease_id"]])["extended"] == 1
    assert queue.nack("w", [1], lease_ms="?")["nacked"] == 1
    assert queue.take("w")[0]["deliveries"] == 2
    assert queue.ack("w", [1], delay_ms="?")["acked"] == 1


def test_limits_themselves_are_good(standing: Standing, topic: str) -> None:
    """Contract §10.2, §10.4, §11 [10.2-02, 10.4-06, 11-11]: the longest node and the most seqs are
    accepted.
    """
    queue = Queue.made(standing.queue.api, topic, lease_ms=LONG_MS)
    queue.add(*range(1000))
    for node in ("n" * 128, "ä" * 64):
        jobs = queue.take(node, 1000)
        assert len(jobs) == 1000
        seqs = list(range(1, 1001))
        assert queue.extend(node, seqs, LONG_MS)["extended"] == 1000
        assert queue.nack(node, seqs)["nacked"] == 1000
    queue.take("w", 1000)
    assert queue.ack("w", list(range(1, 1001)))["acked"] == 1000
