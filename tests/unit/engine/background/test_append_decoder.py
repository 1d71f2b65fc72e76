"""Large appends: the helper process decodes like the server, and if it dies, no answer is lost."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import sys
from array import array
from collections.abc import Iterator

import pytest

from tests.garbage import nothing_for_the_collector
from topics_server.engine.background import append_decoder, large_appends
from topics_server.engine.background.append_decoder import DecoderError, DecoderProcess, serve
from topics_server.engine.background.large_appends import LargeAppends
from topics_server.engine.log.log import Log
from topics_server.values.appends import GRAMMAR, AppendLimits, DecodedAppend, decode_append
from topics_server.values.blocks import ends_in_blocks
from topics_server.values.errors import Code, TopicsError
from topics_server.values.limits import BLOCK_BYTES_MAX, BLOCK_RECORDS_MAX, MIB
from topics_server.values.record_codecs import (
    BYTES_GRAMMAR,
    MESSAGES_GRAMMAR,
    bytes_body,
    decode_bytes,
    decode_messages,
)

LIMITS = AppendLimits()
BODIES: dict[str, bytes] = {
    "plain": b'{"records":[' + b",".join(b'{"data":%d}' % n for n in range(1000)) + b"]}",
    "all of it": json.dumps(
        {
            "records": [
                {
                    "data": {"n": n, "text": "ä" * (n % 7)},
                    "tag": f"t{n % 3}",
                    **({"node": "other"} if n % 5 == 0 else {}),
                    **({"meta": {"m": n}} if n % 2 else {}),
                    **({"delay_ms": n} if n % 11 == 0 else {}),
                }
                for n in range(700)
            ],
            "node": "batch",
            "idempotency_key": "key",
            "create": True,
            "config": {"ttl_ms": 5},
            "disable_backpressure": True,
            "if": {"head_seq": 3},
            "idempotency": "per_record",
            "unknown": [1, 2, 3],
        },
        ensure_ascii=False,
    ).encode(),
    "blocks by bytes": b'{"records":['
    + b",".join(b'{"data":"%b"}' % (b"x" * 900_000) for _ in range(11))
    + b"]}",
    "one": b'{"records":[{"data":null}]}',
}
COLUMNS = (
    *("datas", "metas", "tags", "nodes", "payload_bytes", "text_chars", "longest_bytes"),
    *("has_metas", "has_nodes", "batch_node", "idempotency_key", "create", "config"),
    *("disable_backpressure", "delays", "form", "grammar", "count", "weight"),
    *("condition", "idempotency"),
)


@pytest.fixture(scope="module")
def process() -> Iterator[DecoderProcess]:
    made = DecoderProcess()
    yield made
    made.close()


def columns_of(decoded: DecodedAppend) -> dict[str, object]:
    """All fields of a decoded append, whatever objects hold its data."""
    found: dict[str, object] = {name: getattr(decoded, name) for name in COLUMNS}
    return found | {"datas": list(map(bytes, decoded.datas))}


@pytest.mark.parametrize("name", BODIES)
def test_the_helper_decodes_as_the_server_does(process: DecoderProcess, name: str) -> None:
    body = BODIES[name]
    decoded = process.decode(body, GRAMMAR, LIMITS)
    assert columns_of(decoded) == columns_of(decode_append(body))
    assert b"".join(part.body for part in decoded.payloads) == b"".join(
        bytes(piece) for pair in zip(decoded.datas, decoded.metas, strict=True) for piece in pair
    )
    for part in decoded.payloads:
        assert part.count <= BLOCK_RECORDS_MAX
        assert len(part.body) <= BLOCK_BYTES_MAX or part.count == 1


@pytest.mark.parametrize("body", [b"[" + b'{"a":[1,2]},' * 600 + b'"x"]', b"  [ ] ", b" 7 "])
def test_the_helper_reads_the_messages_of_a_stream(process: DecoderProcess, body: bytes) -> None:
    decoded = process.decode(body, MESSAGES_GRAMMAR, LIMITS)
    assert columns_of(decoded) == columns_of(decode_messages(body))


@pytest.mark.parametrize(
    ("body", "code", "detail"),
    [
        (b"{", Code.INVALID_REQUEST, {}),
        (b'{"records":[{"data":1,"tag":5}]}', Code.INVALID_REQUEST, {"field": "records[0].tag"}),
        (
            b'{"records":[' + b",".join([b'{"data":1}'] * 10_001) + b"]}",
            Code.BATCH_TOO_LARGE,
            {"field": "records", "max_batch_records": 10_000},
        ),
        (
            b'{"records":[{"data":"%b"}]}' % (b"x" * MIB),
            Code.RECORD_TOO_LARGE,
            {"field": "records[0]", "max_record_bytes": MIB},
        ),
    ],
)
def test_the_helper_refuses_as_the_server_does(
    process: DecoderProcess, body: bytes, code: Code, detail: dict[str, object]
) -> None:
    with pytest.raises(TopicsError) as refusal:
        process.decode(body, GRAMMAR, LIMITS)
    assert (refusal.value.code, refusal.value.detail) == (code, detail)
    # The process is also ready for the next body.
    assert process.decode(BODIES["one"], GRAMMAR, LIMITS).count == 1


def test_a_child_that_died_is_replaced(process: DecoderProcess) -> None:
    process.decode(BODIES["one"], GRAMMAR, LIMITS)
    started, pid = process.started_count, process.child_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert process.decode(BODIES["plain"], GRAMMAR, LIMITS).count == 1000
    assert process.started_count == started + 1
    assert process.child_pid != pid


def test_without_any_child_there_is_an_error_and_no_decoding_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(DecoderError):
        DecoderProcess().decode(BODIES["one"], GRAMMAR, LIMITS)


def test_a_child_without_an_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    made = DecoderProcess()
    try:
        made.decode(BODIES["one"], GRAMMAR, LIMITS)
        # A stopped child cannot answer before the wait ends, and a new one needs time to start.
        assert made.child_pid is not None
        os.kill(made.child_pid, signal.SIGSTOP)
        monkeypatch.setattr(append_decoder, "_ANSWER_WAIT_S", 0.0)
        with pytest.raises(DecoderError):
            made.decode(BODIES["one"], GRAMMAR, LIMITS)
        assert made.child_pid is None
    finally:
        made.close()


def test_a_child_that_stops_in_the_middle_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has read only part of the body: the writer waits for the child to read and not for an
    answer.
    """
    made = DecoderProcess()
    try:
        made.decode(BODIES["one"], GRAMMAR, LIMITS)
        assert made.child_pid is not None
        os.kill(made.child_pid, signal.SIGSTOP)
        monkeypatch.setattr(append_decoder, "_ANSWER_WAIT_S", 5.0)
        body = BODIES["blocks by bytes"]
        assert columns_of(made.decode(body, GRAMMAR, LIMITS)) == columns_of(decode_append(body))
        assert made.started_count == 2
    finally:
        made.close()


def test_what_was_kept_is_decoded_whatever_the_limits_are_and_without_the_helper(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tight = AppendLimits(
        max_batch_records=1, max_record_bytes=1, max_meta_bytes=1, max_tag_bytes=1, max_node_bytes=1
    )
    octets = bytes_body("image/png", b"\xff" * 2 * MIB)

    async def all_kept() -> list[DecodedAppend]:
        made = LargeAppends(tight)
        try:
            kept = [await made.decode_kept(body, GRAMMAR) for body in BODIES.values()]
            assert made.process.started_count == 1
            monkeypatch.setattr(sys, "executable", "/bin/false")
            made.process.close()
            kept += [await made.decode_kept(body, GRAMMAR) for body in BODIES.values()]
            kept.append(await made.decode_kept(octets, BYTES_GRAMMAR))
            return kept
        finally:
            made.close()

    expected = [decode_append(body) for body in BODIES.values()] * 2
    expected.append(decode_bytes("image/png", b"\xff" * 2 * MIB))
    kept = asyncio.run(all_kept())
    assert list(map(columns_of, kept)) == list(map(columns_of, expected))
    for decoded in kept:
        assert sum(part.count for part in decoded.payloads) == decoded.count
        for part in decoded.payloads:
            assert part.count <= BLOCK_RECORDS_MAX
            assert len(part.body) <= BLOCK_BYTES_MAX or part.count == 1
    assert any(kept[-1].payloads[0].kinds)


def test_the_child_ends_when_the_server_is_gone_in_the_middle_of_a_body() -> None:
    for cut in (b"", b"\x01", append_decoder._REQUEST.pack(9, 2, 1, 1, 1, 1, 1) + b"half"):
        out = io.BytesIO()
        serve(io.BytesIO(cut), out)
        assert out.getvalue() == b""


# -- in the log --------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [0, 1, 300])
@pytest.mark.parametrize("name", BODIES)
def test_what_the_helper_put_together_is_as_any_append_in_the_log(
    process: DecoderProcess, name: str, before: int
) -> None:
    small = decode_append(b'{"records":[{"data":1,"tag":"s"}]}')
    logs = Log(), Log()
    for log, decoded in zip(
        logs,
        (decode_append(BODIES[name]), process.decode(BODIES[name], GRAMMAR, LIMITS)),
        strict=True,
    ):
        for lsn in range(1, before + 1):
            log.append(lsn, small, lsn)
        log.append(500, decoded, 500)
        log.append(501, small, 501)
        log.freeze_open()
    one, other = ([_rows(log), log.head_seq, log.live_count, log.live_bytes] for log in logs)
    assert one == other
    assert sum(block.live_bytes for block in logs[1].tail()) == logs[1].live_bytes


def _rows(log: Log) -> list[tuple[object, ...]]:
    return [
        (
            block.block.first_seq + row,
            block.block.times[row],
            block.block.data(row),
            block.block.meta(row),
            block.block.tags[row],
            block.block.nodes[row],
            block.block.kinds[row],
            block.row_bytes(row),
        )
        for block in log.tail()
        for row in range(block.count)
    ]


def test_payloads_are_cut_at_both_bounds_of_a_block() -> None:
    assert ends_in_blocks([], None) == []
    assert ends_in_blocks([b"ab", b"c"], [b"", b"{}"]) == [array("I", [2, 2, 3, 5])]
    counts = [len(ends) // 2 for ends in ends_in_blocks([b"1"] * 600, None)]
    assert counts == [256, 256, 88]
    large = b"x" * (BLOCK_BYTES_MAX // 2)
    counts = [len(ends) // 2 for ends in ends_in_blocks([large, large, b"1", 3 * large], None)]
    assert counts == [2, 1, 1]


# -- on the loop -------------------------------------------------------------------------------


def test_the_loop_turns_while_a_large_append_is_decoded() -> None:
    async def turns() -> tuple[int, int]:
        large = LargeAppends(LIMITS)
        try:
            await large.decode(BODIES["one"])
            decoding = asyncio.ensure_future(large.decode(BODIES["blocks by bytes"]))
            count = 0
            while not decoding.done():
                await asyncio.sleep(0)
                count += 1
            return count, (await decoding).count
        finally:
            large.close()

    count, records = asyncio.run(turns())
    assert records == 11
    assert count > 20


def test_who_leaves_changes_nothing_and_too_many_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most = 4 * len(BODIES["plain"])
    monkeypatch.setattr(large_appends, "LARGE_APPENDS_WAITING_BYTES_MAX", most)

    async def crowd() -> None:
        large = LargeAppends(LIMITS)
        try:
            waiting = [asyncio.ensure_future(large.decode(BODIES["plain"])) for _ in range(4)]
            await asyncio.sleep(0)
            with pytest.raises(TopicsError) as refusal:
                await large.decode(BODIES["plain"])
            assert refusal.value.code is Code.THROTTLED
            assert refusal.value.detail["limit"] == "large_appends"
            waiting[0].cancel()
            found = await asyncio.gather(*waiting, return_exceptions=True)
            assert isinstance(found[0], asyncio.CancelledError)
            assert all(isinstance(each, DecodedAppend) for each in found[1:])
            assert (await large.decode(BODIES["one"])).count == 1
        finally:
            large.close()

    asyncio.run(crowd())


def test_without_a_helper_an_append_is_429(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")

    async def asked() -> TopicsError:
        large = LargeAppends(LIMITS)
        try:
            with pytest.raises(TopicsError) as refusal:
                await large.decode(BODIES["one"])
            return refusal.value
        finally:
            large.close()

    error = asyncio.run(asked())
    assert (error.code, error.detail) == (Code.THROTTLED, {"limit": "large_appends"})


def test_bytes_that_are_over_the_limit_are_refused_before_they_are_copied() -> None:
    async def asked() -> None:
        large = LargeAppends(LIMITS)
        try:
            data = b"\xff" * MIB
            with pytest.raises(TopicsError) as refusal:
                await large.decode_bytes("image/png", data)
            assert refusal.value.code is Code.RECORD_TOO_LARGE
            kept, decoded = await large.decode_bytes("image/png", data[:-100])
            assert kept == b"image/png\n" + data[:-100]
            assert columns_of(decoded) == columns_of(decode_bytes("image/png", data[:-100]))
            assert decoded.payloads[0].kinds == b"\x02"
        finally:
            large.close()

    asyncio.run(asked())


def test_a_refused_large_append_leaves_nothing_for_the_collector() -> None:
    """Otherwise each refusal would keep the body of its request for ever."""

    async def refused() -> None:
        large = LargeAppends(LIMITS)
        try:
            await large.decode(BODIES["one"])
            with nothing_for_the_collector():
                with contextlib.suppress(TopicsError):
                    await large.decode(b"[" * (2 * MIB))
                    raise AssertionError("the body is refused")
                await asyncio.sleep(0)
        finally:
            large.close()

    asyncio.run(refused())
