"""Lists and names in bodies are bounded before the decoder builds them."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import pytest

from topics_server.api.messages.requests import decode_delete, decode_diff
from topics_server.api.queues.requests import (
    decode_ack,
    decode_extend,
    decode_nack,
    decode_redrive,
)
from topics_server.api.routers.requests import decode_router
from topics_server.api.topics.config_requests import members_of
from topics_server.api.watch.requests import decode_watch
from topics_server.api.websocket.commands import (
    CommandLimits,
    Publish,
    RefusedCommandError,
    decode_command,
)
from topics_server.settings import Settings
from topics_server.values.errors import Code, TopicsError
from topics_server.values.limits import (
    CONTROL_BODY_BYTES_MAX,
    MATCH_TAG_BYTES_MAX,
    NODE_FILTER_IDS_MAX,
)
from topics_server.values.record_codecs import decode_messages

QUEUE = Settings(max_claim=1000, max_node_bytes=128)
COMMANDS = CommandLimits(max_limit=9, max_topics=256, max_node_bytes=128, max_batch_records=9)


def filled(start: bytes, item: bytes, end: bytes) -> bytes:
    """A body of about the size limit of the control plane, with as many items as fit."""
    room = CONTROL_BODY_BYTES_MAX - len(start) - len(end) - 64
    return start + b",".join([item] * (room // (len(item) + 1))) + end


def watch(body: bytes) -> object:
    """A watch with the default limits."""
    return decode_watch(body, max_topics=256, max_limit=9, max_node_bytes=128)


Decode = Callable[[bytes], object]
LONG: dict[str, tuple[Decode, bytes, str]] = {
    "ack": (
        lambda body: decode_ack(body, QUEUE),
        filled(b'{"node":"n","seqs":[', b"1", b"]}"),
        "seqs",
    ),
    "nack": (
        lambda body: decode_nack(body, QUEUE),
        filled(b'{"node":"n","seqs":[1],"lease_ids":[', b'""', b"]}"),
        "lease_ids",
    ),
    "extend": (
        lambda body: decode_extend(body, QUEUE),
        filled(b'{"node":"n","lease_ms":9,"seqs":[', b"4294967296", b"]}"),
        "seqs",
    ),
    "redrive": (
        lambda body: decode_redrive(body, "q", QUEUE),
        filled(b'{"seqs":[', b"7", b"]}"),
        "seqs",
    ),
    "delete": (decode_delete, filled(b'{"match":[', b"[]", b"]}"), "match"),
    "delete, inside": (
        decode_delete,
        filled(b'{"match":["tag","Eq",[', b"[]", b"]]}"),
        "match[2]",
    ),
    "diff": (
        lambda body: decode_diff(body, 9, 128),
        filled(b'{"node":[', b'"a"', b"]}"),
        "node",
    ),
    "watch": (watch, filled(b'{"topics":{', b'"a":{}', b"}}"), "topics"),
    "watch nodes": (watch, filled(b'{"topics":{"a":{}},"node":[', b'"a"', b"]}"), "node"),
    "members": (members_of, filled(b"{", b'"a":0', b"}"), ""),
    "router": (
        decode_router,
        filled(b'{"source":"a","dest":"b","filter":[', b"{}", b"]}"),
        "filter",
    ),
}


@pytest.mark.parametrize("name", LONG)
def test_a_list_without_end_is_refused_before_it_is_built(name: str) -> None:
    decode, body, field = LONG[name]
    assert CONTROL_BODY_BYTES_MAX * 9 // 10 < len(body) <= CONTROL_BODY_BYTES_MAX
    tracemalloc.start()
    try:
        with pytest.raises(TopicsError) as refusal:
            decode(body)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert refusal.value.detail.get("field", "") == field
    # The decoder alone takes eight times the body and more.
    assert peak_bytes < CONTROL_BODY_BYTES_MAX + CONTROL_BODY_BYTES_MAX // 2


def test_seqs_at_the_bound_are_taken_and_one_more_is_not() -> None:
    def body(count: int, space: bytes = b"") -> bytes:
        seqs = b",".join([space + b"18446744073709551615"] * count)
        return b'{"node":"n","seqs":[' + seqs + b"]}"

    for space in (b"", b" " * 40):
        assert len(decode_ack(body(1000, space), QUEUE).seqs) == 1000
        with pytest.raises(TopicsError) as refusal:
            decode_ack(body(1001, space), QUEUE)
        assert refusal.value.code is Code.BATCH_TOO_LARGE
        assert refusal.value.detail == {"field": "seqs", "max_claim": 1000}


@pytest.mark.parametrize("node", ["x" * 129, "ä" * 65])
def test_a_node_that_is_longer_than_a_records_is_refused_wherever_it_is_named(node: str) -> None:
    for named, field in ((f'"{node}"', "node"), (f'["a","{node}"]', "node[1]")):
        for decode, rest in (
            (watch, '"topics":{"a":{}}'),
            (lambda body: decode_diff(body, 9, 128), '"limit":1'),
        ):
            with pytest.raises(TopicsError) as refusal:
                decode(f'{{"node":{named},{rest}}}'.encode())
            assert refusal.value.code is Code.INVALID_REQUEST
            assert refusal.value.detail == {"field": field}
    text = f'{{"op":"subscribe","topic":"a","node":"{node}"}}'
    with pytest.raises(RefusedCommandError) as refused:
        decode_command(text, COMMANDS)
    assert refused.value.refusal.detail == {"field": "node"}


def test_all_nodes_that_may_be_named_may_be_as_long_as_a_node_may_be() -> None:
    nodes = ",".join(f'"{number:0128d}"' for number in range(NODE_FILTER_IDS_MAX))
    request, _ = decode_diff(f'{{"node":[{nodes}]}}'.encode(), 9, 128)
    assert len(request.nodes) == NODE_FILTER_IDS_MAX


@pytest.mark.parametrize("match", ['"{}"', '["tag","Eq","{}"]', '["tag","Glob","{}*"]'])
def test_a_tag_longer_than_any_is_no_match(match: str) -> None:
    is_glob = "Glob" in match
    fitting = match.format("x" * (MATCH_TAG_BYTES_MAX - is_glob))
    assert decode_delete(f'{{"match":{fitting}}}'.encode()).match is not None
    for long in ("x" * (MATCH_TAG_BYTES_MAX + 1), "ä" * (MATCH_TAG_BYTES_MAX // 2 + 1)):
        with pytest.raises(TopicsError) as refusal:
            decode_delete(f'{{"match":{match.format(long)}}}'.encode())
        assert refusal.value.code is Code.INVALID_REQUEST


def test_an_unsubscribe_lists_no_more_topics_than_may_be_followed() -> None:
    names = ",".join(['"a"'] * 200_000)
    with pytest.raises(RefusedCommandError) as refused:
        decode_command(f'{{"op":"unsubscribe","topics":[{names}]}}', COMMANDS)
    assert refused.value.refusal.detail == {"field": "topics"}


@pytest.mark.parametrize("op", ["subscribe", "unsubscribe", "ping"])
def test_only_a_publish_may_be_larger_than_the_control_plane_allows(op: str) -> None:
    padding = " " * CONTROL_BODY_BYTES_MAX
    with pytest.raises(RefusedCommandError) as refused:
        decode_command(f'{{"op":"{op}","topic":"a","request_id":"r"{padding}}}', COMMANDS)
    assert refused.value.refusal.code is Code.PAYLOAD_TOO_LARGE
    assert refused.value.request_id == "r"
    publish = f'{{"op":"publish","topic":"a","records":[{{"data":1}}]{padding}}}'
    assert isinstance(decode_command(publish, COMMANDS), Publish)


def test_a_stream_takes_no_more_messages_at_once_than_a_topic_takes_records() -> None:
    assert decode_messages(b"[" + b"[1,2]," * 8 + b"3]", max_records=9).count == 9
    assert decode_messages(b"[" + b"[1,2]," * 9 + b"3]").count == 10
    for body in (b"[" + b"[1,2]," * 9 + b"3]", b" [" + b"1," * 500_000 + b"3]"):
        with pytest.raises(TopicsError) as refusal:
            decode_messages(body, max_records=9)
        assert refusal.value.code is Code.BATCH_TOO_LARGE
