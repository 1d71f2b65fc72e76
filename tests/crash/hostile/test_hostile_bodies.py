"""Hostile bodies of every kind, through every route, with either key.

The short form: 6 MB, every kind, plain and as gzip. It checks the answers and their memory; times
are only printed (`-rP`), because a busy machine makes them meaningless. The long form: `python -m
tests.crash.hostile.hostile_bodies --megabytes 60`.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.contract.driver import Server
from tests.crash.hostile.hostile_bodies import (
    APPENDING,
    GROWN_BYTES_MAX,
    KINDS,
    MIB,
    PUBLISH_BYTES,
    READER,
    ROUTES,
    SOCKETS,
    TURN_MS_MAX,
    WRITER,
    Bench,
    head_of,
)

pytestmark = pytest.mark.crash

SIZE: Final = 6_000_000
# Allowed beside three times the body: memory that a first use allocates and keeps.
SPARE_BYTES: Final = 48 * MIB
# The answer to a publish, apart from refusals of the key and acks.
PUBLISHED: Final = {
    "tiny records": "error batch_too_large",
    "seqs": "error invalid_request",
}
# One function refuses the bodies of all routes that append nothing.
FEW_ROUTES: Final = (*APPENDING, "diff", "ack", "websocket")
# The server does not read the bodies of these routes.
ANSWERED: Final = {
    "drop topic": ("403 forbidden", "200"),
    "list": ("200", "200"),
    "drop router": ("403 forbidden", "200"),
    "read stream": ("200", "200"),
    "drop stream": ("403 forbidden", "404 stream_not_found"),
    "probe": ("200", "200"),
    "metrics": ("200", "200"),
    "nowhere": ("404 not_found", "404 not_found"),
}
# The answers to an append of each kind, to a stream of JSON and to one of bytes.
TOLD: Final = {
    "string": ("400 record_too_large", "413 payload_too_large"),
    "brackets": ("400 record_too_large", "413 payload_too_large"),
    "keys": ("400 record_too_large", "413 payload_too_large"),
    "numbers": ("400 record_too_large", "413 payload_too_large"),
    "escapes": ("400 record_too_large", "413 payload_too_large"),
    "wide text": ("400 record_too_large", "413 payload_too_large"),
    "tiny records": ("400 batch_too_large", "413 payload_too_large"),
    "seqs": ("400 invalid_request", "413 payload_too_large"),
    "honest": ("200", "413 payload_too_large"),
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with Bench(tmp_path_factory.mktemp("bodies"), 0.005).running() as running:
        yield running


@pytest.mark.parametrize("coding", ["plain", "gzip"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_hostile_body_is_answered_and_bounded(bench: Bench, kind: str, coding: str) -> None:
    body = KINDS[kind](SIZE)
    sent = gzip.compress(body, 1) if coding == "gzip" else body
    for route in ROUTES if kind == "seqs" else FEW_ROUTES:
        if route in SOCKETS and (coding == "gzip" or route == "websocket publishes"):
            continue
        for key in (READER, WRITER):
            found = bench.measured(route, sent, key, is_gzip=coding == "gzip")
            print(f"{kind}, {coding}, {route}, {key}: {found}")
            assert found.told == expected(kind, route, key)
            is_append = route in APPENDING and key == WRITER
            bound = 3 * len(body) + SPARE_BYTES if is_append else SPARE_BYTES
            assert found.grown_bytes <= bound


def expected(kind: str, route: str, key: str) -> str:
    """The expected answer."""
    if route in SOCKETS:
        return "closed 1009"
    if route in ANSWERED:
        return ANSWERED[route][key == WRITER]
    if key == READER and route not in ("diff", "watch"):
        return "403 forbidden"
    if route not in APPENDING:
        return "413 payload_too_large"
    of_topic, of_stream = TOLD[kind]
    return of_topic if route == "append" else of_stream


@pytest.mark.parametrize("kind", KINDS)
def test_messages_of_a_socket_are_bounded_as_their_whole_is(bench: Bench, kind: str) -> None:
    """Sixty messages of almost a MiB each, sent without waiting for an answer."""
    body = KINDS[kind](PUBLISH_BYTES)
    for key in (READER, WRITER):
        found = bench.measured("websocket publishes", body, key, is_gzip=False)
        print(f"{kind}, {key}: {found}")
        assert found.told == ("error forbidden" if key == READER else PUBLISHED.get(kind, "ack"))
        # Evicted records may have been sealed before, which needs the same memory again.
        assert found.grown_bytes <= GROWN_BYTES_MAX


@pytest.mark.parametrize(
    ("frame", "first"),
    [
        (b"\x89\x80" + bytes(4), b""),
        (b"\x8a\x80" + bytes(4), b""),
        (b"\x00\x80" + bytes(4), b"\x01\x80" + bytes(4)),
        (b"\x00\x81" + bytes(4) + b" ", b"\x01\x80" + bytes(4)),
        (b"\x81\x81" + bytes(4) + b"x", b""),
    ],
    ids=["pings", "pongs", "empty fragments", "fragments of a byte", "messages of a byte"],
)
def test_small_frames_are_read_in_many_turns(bench: Bench, frame: bytes, first: bytes) -> None:
    """One received piece has 40,000 frames. The machine may stall, so the best of a few tries
    counts.
    """
    for _ in range(4):
        found = bench.flooded(frame, first, MIB, 1.5)
        print(found)
        if found.turn_ms <= TURN_MS_MAX:
            break
    assert found.turn_ms <= TURN_MS_MAX
    assert found.requests > 1


@pytest.mark.parametrize("is_socket", [False, True], ids=["http", "websocket"])
def test_bodies_that_become_whole_together_are_decoded_in_many_turns(
    bench: Bench, is_socket: bool
) -> None:
    """Eighty clients send all but the end of a body that takes 1 ms, and then all their ends."""
    body = KINDS["brackets"](60 * 1024)
    if is_socket:
        message = b'{"op":"publish","topic":"few",' + body[1:]
        whole = b"\x81\xfe" + len(message).to_bytes(2) + bytes(4) + message
    else:
        whole = head_of("POST", "/v0/topics/few", WRITER, len(body)) + body
    begins, ends = [whole[:-2000]] * 80, [whole[-2000:]] * 80
    for _ in range(4):
        found = bench.together(begins, ends, ws=is_socket)
        print(found)
        if found.turn_ms <= TURN_MS_MAX:
            break
    assert found.turn_ms <= TURN_MS_MAX
    assert found.told == ("b'\\x81~'" if is_socket else "b'HTTP/1.1 200'")


RECORDS: Final = [
    {
        "data": {"n": number, "text": "\u00e4\U0001f600" * 500},
        "tag": f"t{number % 3}",
        "node": "n" if number % 2 else None,
        "meta": {"m": number},
    }
    for number in range(1000)
]


def test_a_large_append_is_as_any_other_over_a_crash(tmp_path: Path) -> None:
    server = Server(tmp_path)
    api = server.start()
    try:
        sent = [{k: v for k, v in record.items() if v is not None} for record in RECORDS]
        body = json.dumps({"records": sent, "idempotency_key": "large"}, ensure_ascii=False)
        messages = json.dumps([record["data"] for record in RECORDS], ensure_ascii=False)
        assert min(len(body.encode()), len(messages.encode())) > 2 * MIB
        headers = ["Content-Type: application/json"]
        first = api.raw("POST", "/v0/topics/large", body.encode(), headers)
        assert first.status == 201
        assert first.json()["last_seq"] == 1000
        assert api.raw("PUT", "/v1/stream/lines", b"[]", headers).status == 201
        assert api.raw("POST", "/v1/stream/lines", messages.encode(), headers).status == 204
        for _ in range(2):
            read = api.read_all("large", include_tags=True, limit=300)
            assert [record["data"] for record in read] == [record["data"] for record in RECORDS]
            assert [record["meta"] for record in read] == [record["meta"] for record in RECORDS]
            assert [record["$tag"] for record in read] == [record["tag"] for record in RECORDS]
            assert [record.get("$node") for record in read] == [r["node"] for r in RECORDS]
            lines = api.read_all("lines", limit=300)
            assert [record["data"] for record in lines] == json.loads(messages)
            again = api.raw("POST", "/v0/topics/large", body.encode(), headers).json()
            assert again["deduped"] is True
            assert again["last_seq"] == 1000
            api = server.crash()
    finally:
        server.stop()
