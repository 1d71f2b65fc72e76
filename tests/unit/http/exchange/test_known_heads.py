"""A head that was parsed before is not parsed again, and has the same meaning."""

from __future__ import annotations

import asyncio
import tracemalloc
from typing import Any

import pytest

from tests.unit.api.test_direct import APPEND, DIFF, JSON, Side, request
from tests.unit.http.exchange.test_joined_writes import turns
from topics_server.auth.api_keys import KeyRing
from topics_server.http.connection import HttpConnection
from topics_server.http.exchange import known_heads
from topics_server.http.timeouts import TimeoutSettings
from topics_server.values.texts.key_list import parse_keys

pytestmark = pytest.mark.anyio


async def side_of(**settings: Any) -> tuple[Side, list[bytes]]:
    """A server with a topic, and the bytes that its connection's parser gets."""
    side = Side(HttpConnection, **settings)
    await side.create()
    return side, parsed_by(side.protocol)


def parsed_by(protocol: Any) -> list[bytes]:
    parsed: list[bytes] = []
    parser = protocol.reader._parser

    class Parser:
        def feed_data(self, data: bytes) -> None:
            parsed.append(bytes(data))
            parser.feed_data(data)

        def __getattr__(self, name: str) -> Any:
            return getattr(parser, name)

    protocol.reader._parser = Parser()
    return parsed


def statuses(wire: Any) -> list[int]:
    return [int(part[:3]) for part in b"".join(wire.pieces).split(b"HTTP/1.1 ")[1:]]


async def test_a_head_is_parsed_once_for_all_connections() -> None:
    side, parsed = await side_of()
    one, other = request(APPEND), request(APPEND.replace(b"two", b"six"))
    for sent in (one, other, one):
        side.protocol.data_received(sent)
        await turns()
    assert parsed == [one]
    protocol, wire = side.connect()
    others = parsed_by(protocol)
    protocol.data_received(one)
    await turns()
    assert others == []
    assert statuses(side.wire) + statuses(wire) == [200] * 4
    assert side.rig.store.state("t", touch=False).head_seq == 9
    for each in (side.protocol, protocol):
        each.connection_lost(None)


@pytest.mark.parametrize(
    "headers",
    [
        b"idempotency-key: k\r\n",
        b"x-request-id: mine\r\n",
        b"origin: http://a.example\r\n",
        b"producer-id: p\r\nproducer-epoch: 0\r\nproducer-seq: 0\r\nx-request-id: mine\r\n",
        # The number has blanks behind it, or the name of its field is in the head twice.
        b"producer-id: p\r\nproducer-epoch: 0\r\nproducer-seq: 0 \r\n",
        b"producer-id: p\r\nproducer-epoch: 0\r\nproducer-seq: 0\r\nx-producer-seq: 1\r\n",
        b"x: " + b"y" * 2000 + b"\r\n",
    ],
)
async def test_a_head_that_means_one_request_is_not_kept(headers: bytes) -> None:
    side, _ = await side_of(allowed_origins=frozenset({b"http://a.example"}))
    side.protocol.data_received(request(APPEND, headers=JSON + headers))
    await turns()
    assert statuses(side.wire) == [200]
    assert not side.config.loaded_app.topics_door.known_heads
    side.protocol.connection_lost(None)


def produced(fields: bytes) -> bytes:
    return request(APPEND, headers=JSON + fields)


async def test_a_head_that_counts_is_known_with_every_number() -> None:
    side, parsed = await side_of()
    one = b"producer-id: p\r\nproducer-epoch: 0\r\nproducer-seq: %d\r\nx: y\r\n"
    for seq in (0, 1, 10, 2):
        side.protocol.data_received(produced(one % seq))
        await turns()
    assert parsed == [produced(one % 0)]
    assert statuses(side.wire) == [200, 200, 409, 200]
    # Another producer, another epoch, no number, a negative, a long one, two numbers.
    others = [
        one.replace(b"id: p", b"id: q") % 0,
        one.replace(b"epoch: 0", b"epoch: 1") % 0,
        one.replace(b"%d", b""),
        one.replace(b"%d", b"-3"),
        one.replace(b"%d", b"0" * 16 + b"3"),
        one.replace(b"%d", b"1\r\nproducer-seq: 1"),
    ]
    del parsed[:]
    for fields in others:
        side.protocol.data_received(produced(fields))
        await turns()
    assert parsed == list(map(produced, others))
    assert statuses(side.wire)[4:] == [200, 200, 400, 400, 403, 400]
    side.protocol.connection_lost(None)


async def test_a_counting_head_with_a_key_is_kept_without_the_key() -> None:
    side, parsed = await side_of()
    side.state.keys = KeyRing(parse_keys("one,two"))
    fields = b"authorization: Bearer %b\r\nProducer-Id: p\r\nProducer-Epoch: 0\r\n"
    fields += b"Producer-Seq: %d\r\n"
    for key, seq in ((b"one", 0), (b"one", 1), (b"six", 2), (b"one", 2)):
        side.protocol.data_received(produced(fields % (key, seq)))
        await turns()
    assert statuses(side.wire) == [200, 200, 401, 200]
    assert parsed == [produced(fields % (b"one", 0)), produced(fields % (b"six", 2))]
    heads = side.config.loaded_app.topics_door.known_heads
    assert (len(heads), heads._by_head) == (2, {}), "one for each key"
    heads.clear()
    side.protocol.data_received(produced(fields % (b"one", 3)))
    await turns()
    assert parsed[2:] == [produced(fields % (b"one", 3))]
    side.protocol.connection_lost(None)


async def test_few_spellings_of_a_counter_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_heads, "_COUNTERS_MAX", 1)
    side, parsed = await side_of()
    fields = b"producer-id: p\r\nproducer-epoch: 0\r\nproducer-seq: %d\r\n"
    for seq, spelled in enumerate((b"producer-seq: ", b"Producer-Seq:", b"producer-seq: ")):
        sent = produced(fields.replace(b"producer-seq: ", spelled) % seq)
        side.protocol.data_received(sent)
        await turns()
    assert statuses(side.wire) == [200, 200, 200]
    assert len(parsed) == 2, "the first spelling is known"
    assert len(side.config.loaded_app.topics_door.known_heads) == 1
    side.protocol.connection_lost(None)


async def test_a_known_head_with_another_reception_goes_to_the_parser() -> None:
    side, parsed = await side_of()
    one, get = request(APPEND), request(None, headers=b"", method=b"GET")
    for sent in (one, get):
        side.protocol.data_received(sent)
        await turns()
    # A part of a body, its rest, two requests at once, and further bytes after a request without a
    # body.
    for sent in (one[:-5], one[-5:], one + one, get + b"G", get[1:]):
        del parsed[:]
        side.protocol.data_received(sent)
        await turns()
        assert b"".join(parsed) == sent
    assert statuses(side.wire) == [200] * 7
    # If the same bytes come in the middle of another request, they are a part of that request's
    # body.
    body = b'{"records":[{"data":1}]}'.ljust(len(one) + 30)
    head = request(body)[: -len(body)]
    side.protocol.data_received(head + body[:30])
    side.protocol.data_received(one)
    await turns()
    assert statuses(side.wire)[7:] == [400], "its body is no JSON"
    side.protocol.connection_lost(None)


async def test_what_a_key_may_do_is_asked_again_when_the_keys_change() -> None:
    side, parsed = await side_of()
    side.state.keys = KeyRing(parse_keys("one,two"))
    one = request(APPEND, headers=JSON + b"authorization: Bearer one\r\n")
    wrong = one.replace(b"Bearer one", b"Bearer six")
    for sent in (one, one, wrong):
        side.protocol.data_received(sent)
        await turns()
    assert statuses(side.wire) == [200, 200, 401]
    assert parsed == [one, wrong]
    side.state.keys.replace(parse_keys("one:r,two"))
    side.protocol.data_received(one)
    await turns()
    side.state.keys.replace(parse_keys("two"))
    side.protocol.data_received(one)
    await turns()
    assert statuses(side.wire)[3:] == [403, 401]
    side.protocol.connection_lost(None)


@pytest.mark.parametrize("field", [b"authorization", b"Authorization", b"AUTHORIZATION"])
async def test_no_key_is_kept_in_a_known_head(field: bytes) -> None:
    side, _ = await side_of()
    side.state.keys = KeyRing(parse_keys("one,two"))
    side.protocol.data_received(
        request(DIFF, b"/v0/topics/t/diff", JSON + field + b": Bearer one\r\n")
    )
    heads = side.config.loaded_app.topics_door.known_heads
    assert (len(heads), heads._by_head) == (1, {})
    for digest, call in heads._by_digest.items():
        assert b"one" not in digest
        assert b"authorization" not in call._fields
    side.protocol.connection_lost(None)


async def test_the_oldest_of_the_more_frequent_kind_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(known_heads, "_HEADS_MAX", 3)
    monkeypatch.setattr(known_heads, "_REPLACED_EVERY", 1)
    side, parsed = await side_of()
    heads = side.config.loaded_app.topics_door.known_heads
    asked = [
        request(DIFF, b"/v0/topics/t/diff", JSON + b"authorization: Bearer %d\r\n" % turn)
        if turn % 2
        else request(DIFF, b"/v0/topics/t/diff", JSON + b"x-turn: %d\r\n" % turn)
        for turn in range(4)
    ]
    sizes = []
    for sent in asked:
        side.protocol.data_received(sent)
        sizes.append((len(heads._by_head), len(heads._by_digest)))
    assert sizes == [(1, 0), (1, 1), (2, 1), (1, 2)]
    del parsed[:]
    for sent in (asked[1], asked[2], asked[3], asked[0]):
        side.protocol.data_received(sent)
    assert parsed == [asked[0]], "the other ones are known"
    assert statuses(side.wire) == [200] * 8
    heads.clear()
    assert len(heads) == heads._memory == 0
    side.protocol.connection_lost(None)


async def test_heads_with_many_fields_are_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client decides how many fields a head has, so the number of heads alone bounds nothing."""
    monkeypatch.setattr(known_heads, "_MEMORY_MAX", 30_000)
    monkeypatch.setattr(known_heads, "_REPLACED_EVERY", 1)
    side, parsed = await side_of()
    heads = side.config.loaded_app.topics_door.known_heads
    many = b"".join(b"%c%c:\r\n" % (97 + i // 26, 97 + i % 26) for i in range(80))
    for fields, least, most in ((b"", 12, 25), (many, 2, 4)):
        for turn in range(40):
            side.protocol.data_received(
                request(DIFF, b"/v0/topics/t/diff", JSON + fields + b"x-turn: %d\r\n" % turn)
            )
        assert least <= len(heads) <= most
        calls = heads._by_head.values()
        assert sum(call.kept_bytes for call in calls) == heads._memory <= 30_000
    assert len(parsed) == 80
    side.protocol.connection_lost(None)


async def test_the_estimate_of_a_known_heads_memory_is_no_less_than_the_memory() -> None:
    """Measured with few and with many fields: the server may not keep more than its bound."""
    side, _ = await side_of()
    heads = side.config.loaded_app.topics_door.known_heads
    empty, short = (
        b"".join(b"%c%c:%b\r\n" % (97 + i // 26, 97 + i % 26, text) for i in range(86))
        for text in (b"", b"vv")
    )
    for fields in (b"", empty, short):
        side.protocol.connection_lost(None)
        side, _ = await side_of()
        heads = side.config.loaded_app.topics_door.known_heads
        requests = [
            request(DIFF, b"/v0/topics/t/diff", JSON + fields + b"x-turn: %03d\r\n" % turn)
            for turn in range(200)
        ]
        side.protocol.data_received(requests[0])
        side.wire.pieces.clear()
        tracemalloc.start()
        before, _peak = tracemalloc.get_traced_memory()
        for sent in requests[1:]:
            side.protocol.data_received(sent)
            side.wire.pieces.clear()
        after, _peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(heads) == 200
        estimated = heads._memory * 199 / 200
        assert 0.6 * estimated < after - before < estimated
    side.protocol.connection_lost(None)


async def test_a_known_head_waits_a_moment_for_its_body(monkeypatch: pytest.MonkeyPatch) -> None:
    side, parsed = await side_of()
    # The loop's clock stands still, because on a busy machine the moment would pass between two
    # pieces.
    now = asyncio.get_running_loop().time()
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now)
    one = request(APPEND)
    head, body = one[: -len(APPEND)], one[-len(APPEND) :]
    side.protocol.data_received(one)
    await turns()
    for sent in (head, body, head, body):
        side.protocol.data_received(sent)
        if sent is body:
            await turns()
    assert statuses(side.wire) == [200, 200, 200]
    assert parsed == [one]
    assert side.protocol._early is None
    # A body in pieces, and a request after the body.
    for sent in (head, body[:3], body[3:], head, body + one):
        side.protocol.data_received(sent)
        await turns()
    assert statuses(side.wire) == [200] * 6
    assert parsed == [one, head + body[:3], body[3:], one + one]
    side.protocol.connection_lost(None)


async def test_a_known_head_without_a_body_is_parsed_after_all() -> None:
    side, parsed = await side_of()
    one = request(APPEND)
    head, body = one[: -len(APPEND)], one[-len(APPEND) :]
    side.protocol.data_received(one)
    await turns()
    until_parsed = asyncio.Event()
    on_head = side.protocol.on_head

    def begins(**plain: bool) -> None:
        on_head(**plain)
        until_parsed.set()

    side.protocol.on_head = begins
    side.protocol.data_received(head)
    assert side.protocol.idle_rank is None
    assert side.protocol.overdue(1e9, TimeoutSettings()) is None
    await until_parsed.wait()
    assert parsed == [one, head]
    assert side.protocol.reader.is_partial
    side.protocol.data_received(body)
    await turns()
    assert statuses(side.wire) == [200, 200]
    # The server stops: requests that have begun get their answers.
    side.protocol.data_received(head)
    side.protocol.shutdown()
    assert parsed == [one, head, body, head]
    side.protocol.data_received(body)
    await turns()
    assert statuses(side.wire) == [200, 200, 200]
    side.protocol.connection_lost(None)


async def test_a_lost_connection_forgets_the_head_that_waits() -> None:
    side, parsed = await side_of()
    one = request(APPEND)
    side.protocol.data_received(one)
    await turns()
    side.protocol.data_received(one[: -len(APPEND)])
    early = side.protocol._early
    side.protocol.connection_lost(None)
    assert early is not None
    assert early._end.cancelled()
    assert parsed == [one]


async def test_a_full_table_keeps_its_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that use more heads than the table holds, in turns, still find some of them."""
    monkeypatch.setattr(known_heads, "_HEADS_MAX", 8)
    monkeypatch.setattr(known_heads, "_REPLACED_EVERY", 4)
    side, parsed = await side_of()
    heads = side.config.loaded_app.topics_door.known_heads
    asked = [request(DIFF, b"/v0/topics/t/diff", JSON + b"x-turn: %d\r\n" % n) for n in range(16)]
    for data in asked:
        side.protocol.data_received(data)
    kept = list(heads._by_head)
    # The ninth head took the place of the first; of the seven after it, one was kept.
    assert [key.split(b"x-turn: ")[1][:2].strip() for key in kept] == [
        b"%d" % n for n in (2, 3, 4, 5, 6, 7, 8, 12)
    ]
    found = [data for data in asked if heads._by_head.get(data.partition(b"{")[0])]
    assert len(heads) == len(found) == 8
    assert parsed == asked
    side.protocol.connection_lost(None)


async def test_heads_that_cannot_be_kept_take_no_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full table keeps a new head although every second request has one that is too long."""
    monkeypatch.setattr(known_heads, "_HEADS_MAX", 4)
    monkeypatch.setattr(known_heads, "_REPLACED_EVERY", 4)
    side, parsed = await side_of()
    heads = side.config.loaded_app.topics_door.known_heads

    def asked(turn: int, more: bytes = b"") -> bytes:
        return request(DIFF, b"/v0/topics/t/diff", JSON + more + b"x-turn: %d\r\n" % turn)

    for turn in range(5):
        side.protocol.data_received(asked(turn))
    for _ in range(20):
        side.protocol.data_received(asked(9))
        side.protocol.data_received(asked(9, b"x-long: %b\r\n" % (b"v" * 2_000)))
    assert len(heads) == 4
    assert parsed.count(asked(9)) == 4, "the fourth request of this head was kept"
    side.protocol.connection_lost(None)
