"""Requests that fail, waits that end, and clients that hang up: what a server meets every day.

Each is a function of a `Caller` and of the number of the attempt, with its own topics, so that the
failures may come in any order and any number of times.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable
from typing import Any, Final

from tests.crash.garbage.caller import Caller

Failure = Callable[[Caller, int], object]

ONE: Final = {"records": [{"data": 1, "tag": "t"}]}
QUEUE: Final = {"type": "queue"}
_LARGE: Final = {"records": [{"data": "x" * 1_100_000}]}
_JSON: Final = {"content-type": "application/json"}
_HEAD: Final = (
    b"POST /v0/topics/log HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
)

FAILURES: Final[dict[str, Failure]] = {}


def failure(work: Failure) -> Failure:
    """Add a failure under its name."""
    FAILURES[work.__name__] = work
    return work


def prepare(caller: Caller) -> None:
    """Create what the failures use."""
    good(caller.post("/v0/topics/log", ONE))
    good(caller.call("PUT", "/v0/topics/queue", QUEUE))
    good(caller.call("PUT", "/v0/topics/window", {**QUEUE, "claim_jitter_ms": 5}))
    good(caller.call("PUT", "/v0/topics/full", {"cap_records": 1, "discard": "reject"}))
    good(caller.post("/v0/topics/full", ONE))
    good(caller.call("PUT", "/v1/stream/stream", b"[1]", _JSON))
    good(caller.post("/v0/topics/log", ONE, producer_id="p", producer_epoch="5", producer_seq="0"))
    good(caller.call("PUT", "/v0/topics/log/views/tags", {"shortcut": {"count_by_tag": True}}))
    for _ in range(1_000):
        if caller.post("/v0/topics/log/views/tags/query?after=1", {"query": "all"})[0] == 200:
            return
    raise AssertionError("the view is not built")


def good(answer: tuple[int, Any]) -> Any:
    """The body of a success."""
    assert answer[0] < 300, answer
    return answer[1]


def refused(answer: tuple[int, Any], status: int) -> None:
    """The request was refused with this status."""
    assert answer[0] == status, answer


# -- appends and reads -------------------------------------------------------------------------


@failure
def broken_json(caller: Caller, number: int) -> None:
    refused(caller.post("/v0/topics/log", b'{"records":['), 400)
    refused(caller.post("/v0/topics/log/diff", {"from_seq": "x"}), 400)


@failure
def missing_topic(caller: Caller, number: int) -> None:
    refused(caller.post("/v0/topics/none", {**ONE, "create": False}), 404)
    refused(caller.call("GET", "/v0/topics/none"), 404)
    refused(caller.post("/v0/topics/none/diff", {"from_seq": 0}), 404)
    refused(caller.post("/v0/topics/none/diff", {"from_seq": 0, "wait_ms": 5}), 404)


@failure
def full_topic(caller: Caller, number: int) -> None:
    refused(caller.post("/v0/topics/full", ONE), 422)


@failure
def failed_condition(caller: Caller, number: int) -> None:
    refused(caller.post("/v0/topics/log", {**ONE, "if": {"none_match": "t"}}), 409)
    refused(caller.post("/v0/topics/log/delete", {"before_seq": 1, "if": {"head_seq": 99}}), 409)


@failure
def race_under_a_condition(caller: Caller, number: int) -> None:
    body = {**ONE, "if": {"none_match": "t"}, "config": {"durability": "fsync"}}
    path = f"/v0/topics/race{number}"
    with caller.waiting("POST", path, body), caller.waiting("POST", path, body):
        caller.post(path, body)


@failure
def stale_producer(caller: Caller, number: int) -> None:
    answer = caller.post(
        "/v0/topics/log", ONE, producer_id="p", producer_epoch="3", producer_seq="1"
    )
    refused(answer, 403)


@failure
def large_append(caller: Caller, number: int) -> None:
    refused(caller.post("/v0/topics/log", _LARGE), 400)


@failure
def broken_gzip(caller: Caller, number: int) -> None:
    packed = gzip.compress(b'{"records":[{"data":1}]}' * 1_000)
    refused(caller.post("/v0/topics/log", packed[:-9], content_encoding="gzip"), 400)


@failure
def wait_that_ends(caller: Caller, number: int) -> None:
    head = good(caller.call("GET", "/v0/topics/log"))["head_seq"]
    good(caller.post("/v0/topics/log/diff", {"from_seq": head, "wait_ms": 5}))
    body = {"from_seq": head, "wait_ms": 20_000}
    caller.hang_up("POST", "/v0/topics/log/diff", body, is_reset=bool(number % 2))


@failure
def wait_on_a_dropped_topic(caller: Caller, number: int) -> None:
    path = f"/v0/topics/dropped{number}"
    good(caller.post(path, ONE))
    with caller.waiting("POST", f"{path}/diff", {"from_seq": 1, "wait_ms": 9_000}) as answer:
        good(caller.call("DELETE", path))
    refused(answer.result(), 404)


# -- the wire ----------------------------------------------------------------------------------


@failure
def half_an_upload(caller: Caller, number: int) -> None:
    is_reset = bool(number % 2)
    caller.send_raw(_HEAD + b'content-length: 300\r\n\r\n{"records"', is_reset=is_reset)
    body = b'content-length: 900000\r\n\r\n{"records"' + b" " * 200_000
    caller.send_raw(_HEAD + body, is_reset=is_reset)


@failure
def wrong_heads(caller: Caller, number: int) -> None:
    caller.send_raw(b"GET\0 / HTTP/9\r\n\r\n")
    caller.send_raw(_HEAD + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\nabc")
    caller.send_raw(_HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n")
    caller.send_raw(_HEAD + b"content-length: 99999999999\r\n\r\n")
    caller.send_raw(b"GET /" + b"a" * 9_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n")
    caller.send_raw(b"GET / HTTP/1.1\r\nhost: evil.example\r\n\r\n")
    caller.send_raw(b"GET", is_reset=True)
    caller.send_raw(b"")


# -- queues ------------------------------------------------------------------------------------


@failure
def claim_that_ends(caller: Caller, number: int) -> None:
    for name in ("queue", "window"):
        good(caller.post(f"/v0/topics/{name}/claim", {"node": "w", "wait_ms": 5}))
        body = {"node": "w", "wait_ms": 20_000}
        caller.hang_up("POST", f"/v0/topics/{name}/claim", body, is_reset=bool(number % 2))


@failure
def claim_of_a_dropped_queue(caller: Caller, number: int) -> None:
    path = f"/v0/topics/jobs{number}"
    good(caller.call("PUT", path, QUEUE))
    with caller.waiting("POST", f"{path}/claim", {"node": "w", "wait_ms": 9_000}) as answer:
        good(caller.call("DELETE", path))
    refused(answer.result(), 404)


@failure
def lost_leases(caller: Caller, number: int) -> None:
    body = {"node": "w", "seqs": [999_999]}
    good(caller.post("/v0/topics/queue/ack", body))
    good(caller.post("/v0/topics/queue/nack", body))
    good(caller.post("/v0/topics/queue/extend", {**body, "lease_ms": 1_000}))
    refused(caller.post("/v0/topics/log/claim", {"node": "w"}), 409)


@failure
def push_stream(caller: Caller, number: int) -> None:
    good(caller.post("/v0/topics/queue", ONE))
    caller.hang_up("GET", "/v0/topics/queue/work?node=w", is_reset=bool(number % 2))
    path = f"/v0/topics/pushed{number}"
    good(caller.call("PUT", path, QUEUE))
    caller.follow(f"{path}/work?node=w", lambda: caller.call("DELETE", path))


@failure
def refused_dead_letter(caller: Caller, number: int) -> None:
    path = f"/v0/topics/dead{number}"
    config = {**QUEUE, "max_deliveries": 1, "dead_letter": "full"}
    good(caller.call("PUT", path, config))
    good(caller.post(path, ONE))
    (job,) = good(caller.post(f"{path}/claim", {"node": "w"}))["claimed"]
    good(caller.post(f"{path}/nack", {"node": "w", "seqs": [job["$seq"]]}))
    assert not good(caller.post(f"{path}/claim", {"node": "w"}))["claimed"]


# -- streams -----------------------------------------------------------------------------------


@failure
def live_stream(caller: Caller, number: int) -> None:
    is_reset = bool(number % 2)
    caller.hang_up("GET", "/v0/topics/log/live?from_seq=0", is_reset=is_reset)
    caller.hang_up("GET", "/v0/live?prefix=l", is_reset=is_reset)
    path = f"/v0/topics/lived{number}"
    good(caller.post(path, ONE))
    caller.follow(f"{path}/live", lambda: caller.call("DELETE", path))


@failure
def watch_stream(caller: Caller, number: int) -> None:
    opened = good(caller.post("/v0/watch", {"topics": {"log": {"from_seq": 0}}}))
    caller.hang_up("GET", opened["stream_url"], is_reset=bool(number % 2))
    refused(caller.post("/v0/watch", {"topics": {"none": {}}}), 404)


@failure
def websocket(caller: Caller, number: int) -> None:
    is_reset = bool(number % 2)
    subscribe = {"op": "subscribe", "request_id": "1", "topic": "log", "from_seq": 0}
    publish = {"op": "publish", "request_id": "2", "topic": "log", **ONE}
    caller.say(is_reset=is_reset)
    caller.say(subscribe, is_reset=is_reset)
    caller.say(publish, is_reset=is_reset)
    caller.say({**publish, "if": {"head_seq": 99_999}})
    caller.say({**subscribe, "topic": "none"})
    caller.say("{")
    caller.say(b"\0")
    caller.say("x" * 1_200_000)


@failure
def durable_stream(caller: Caller, number: int) -> None:
    is_reset = bool(number % 2)
    refused(caller.call("GET", "/v1/stream/none?offset=-1"), 404)
    refused(caller.post("/v1/stream/stream", b"[2"), 400)
    assert caller.call("GET", "/v1/stream/stream?offset=now&live=long-poll")[0] == 204
    caller.hang_up("GET", "/v1/stream/stream?offset=now&live=long-poll", is_reset=is_reset)
    caller.hang_up("GET", "/v1/stream/stream?offset=-1&live=sse", is_reset=is_reset)
    path = f"/v1/stream/s{number}"
    good(caller.call("PUT", path, b"[1]", _JSON))
    with caller.waiting("GET", f"{path}?offset=now&live=long-poll"):
        good(caller.call("DELETE", path))
    good(caller.call("PUT", path, b"", {"stream-forked-from": "/v1/stream/stream", **_JSON}))
    good(caller.call("DELETE", path))


# -- views, routers, and what is dropped -------------------------------------------------------


@failure
def view_queries(caller: Caller, number: int) -> None:
    path = "/v0/topics/log/views/tags"
    refused(caller.post(f"{path}/query", {"sql": "selec 1"}), 400)
    refused(caller.post(f"{path}/query?after=99999999", {"query": "all"}), 504)
    refused(caller.post("/v0/topics/log/views/none/query", {"query": "all"}), 404)
    caller.hang_up("GET", f"{path}/live?query=all", is_reset=bool(number % 2))


@failure
def router_to_a_full_topic(caller: Caller, number: int) -> None:
    path = f"/v0/routers/r{number}"
    good(caller.call("PUT", path, {"source": f"source{number}", "dest": "full"}))
    good(caller.post(f"/v0/topics/source{number}", ONE))
    good(caller.call("DELETE", path))
    refused(caller.call("PUT", path, {"source": "log", "dest": "log"}), 400)


@failure
def dropped_with_all_parts(caller: Caller, number: int) -> None:
    path = f"/v0/topics/whole{number}"
    good(caller.post(path, ONE))
    good(caller.call("PUT", f"{path}/consumers/c", {}))
    good(caller.call("PUT", f"{path}/views/v", {"shortcut": {"count_by_tag": True}}))
    good(caller.call("PUT", f"/v0/routers/w{number}", {"source": f"whole{number}", "dest": "b"}))
    good(caller.post("/v0/admin/seal", {"topics": [f"whole{number}"]}))
    good(caller.call("DELETE", path))
