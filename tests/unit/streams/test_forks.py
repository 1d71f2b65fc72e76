"""Forks contain exactly the requested messages, also after a crash."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.design7.bench import Bench
from tests.storage.fake_disk import Mode, SimulatedCrash
from topics_server.streams.forks import ANCESTORS_MAX
from topics_server.streams.values import (
    BEGINNING,
    AppendAsked,
    CreateAsked,
    ForkAsked,
    Position,
)
from topics_server.values.appends import decode_append
from topics_server.values.errors import Code, TopicsError
from topics_server.values.model import Ancestor


def create(bench: Bench, path: str, asked: CreateAsked) -> None:
    assert bench.world.run(bench.node.streams.create(path, asked)).is_new


def datas(bench: Bench, path: str) -> list[bytes]:
    read = bench.node.streams.read(path, BEGINNING, 1 << 20, explicit=False)
    return [bytes(data) for data in bench.world.run(read).datas]


def refusal(bench: Bench, path: str, asked: CreateAsked) -> TopicsError:
    with pytest.raises(TopicsError) as raised:
        bench.world.run(bench.node.streams.create(path, asked))
    assert bench.node.registry.find(path) is None
    return raised.value


def after(bench: Bench, path: str, seq: int) -> Position:
    """The position after a seq, as a reader gets it."""
    read = bench.node.streams.read(path, BEGINNING, 1 << 20, explicit=False)
    (found,) = [end for end in bench.world.run(read).ends if end.seq == seq]
    return found


@pytest.mark.parametrize(
    ("content_type", "body", "records"),
    [
        ("application/json", b'[1, {"a" : 2}]', [b"1", b'{"a" : 2}']),
        ("application/json", b' "x" ', [b'"x"']),
        ("text/plain", b"[1, 2]", [b"[1, 2]"]),
    ],
)
def test_the_first_records_of_a_fork_are_the_same_after_a_crash(
    content_type: str, body: bytes, records: list[bytes]
) -> None:
    bench = Bench()
    try:
        create(bench, "s", CreateAsked(content_type, body=b'"source"'))
        create(bench, "f", CreateAsked(fork=ForkAsked("s"), body=body))
        for _ in range(2):
            assert datas(bench, "f") == [b'"source"', *records]
            bench.crash("kill")
    finally:
        bench.world.abandon()


@pytest.mark.parametrize("seed", range(1, 13))
def test_what_is_deleted_in_the_source_does_not_push_live_records_out_of_a_capped_fork(
    seed: int,
) -> None:
    """The slots of deleted records are empty and never count."""
    bench = Bench(seed, segment_max_events=4)
    try:
        run, store = bench.world.run, bench.store
        bench.put(cap_records=3)
        bench.append()
        for _ in range(6):
            bench.append(2)
            run(store.delete_seqs("t", list(range(2, store.topic("t").log.head_seq + 1))))
        bench.append()
        assert bench.seqs() == [1, 14]
        create(bench, "f", CreateAsked(fork=ForkAsked("t")))
        bench.wait(2)
        assert list(bench.look("f").records) == [1, 14]
        assert bench.look("f").gaps == []
    finally:
        bench.world.abandon()


def test_a_fork_keeps_to_its_cap_once_it_is_whole() -> None:
    """A part of a message and a first message are added to the source's records."""
    bench = Bench()
    try:
        bench.put(cap_records=3)
        bench.append(4)
        create(bench, "f", CreateAsked(fork=ForkAsked("t"), body=b"[7, 8]"))
        bench.wait(0.1)
        assert datas(bench, "f") == [b"4", b"7", b"8"]
        assert bench.look("f").gaps != []
    finally:
        bench.world.abandon()


# --- where a fork leaves its source ---------------------------------------------------------------


def made(content_type: str = "text/plain", *bodies: bytes) -> Bench:
    bench = Bench()
    create(bench, "s", CreateAsked(content_type))
    for body in bodies:
        bench.world.run(bench.node.streams.append("s", body, AppendAsked(content_type)))
    return bench


@pytest.mark.parametrize(
    ("seq", "sub_offset", "wanted"),
    [
        (0, 0, []),
        (1, 0, [b"abc"]),
        (2, 0, [b"abc", b"de"]),
        (0, 1, [b"a"]),
        (0, 3, [b"abc"]),
        (1, 1, [b"abc", b"d"]),
        (1, 2, [b"abc", b"de"]),
    ],
)
def test_bytes_are_cut_at_a_record_or_inside_of_one(
    seq: int, sub_offset: int, wanted: list[bytes]
) -> None:
    bench = made("text/plain", b"abc", b"de")
    try:
        at = after(bench, "s", seq) if seq else BEGINNING
        create(bench, "f", CreateAsked(fork=ForkAsked("s", at, sub_offset)))
        bench.crash("kill")
        assert datas(bench, "f") == wanted
        assert datas(bench, "s") == [b"abc", b"de"]
    finally:
        bench.world.abandon()


@pytest.mark.parametrize(
    ("seq", "sub_offset", "wanted"),
    [(0, 2, [b"1", b"3"]), (1, 1, [b"1", b"3"]), (3, 1, [b"1", b"3", b"4"]), (1, 0, [b"1"])],
)
def test_messages_are_counted_and_what_is_deleted_is_none(
    seq: int, sub_offset: int, wanted: list[bytes]
) -> None:
    bench = made("application/json", b"[1, 2, 3, 4]")
    try:
        bench.world.run(bench.store.delete_seqs("s", [2]))
        at = after(bench, "s", seq) if seq else BEGINNING
        create(bench, "f", CreateAsked(fork=ForkAsked("s", at, sub_offset)))
        assert datas(bench, "f") == wanted
    finally:
        bench.world.abandon()


def test_what_is_not_in_the_source_is_no_place_to_leave_it() -> None:
    bench = made("text/plain", b"abc", b"de")
    try:
        one, end = after(bench, "s", 1), after(bench, "s", 2)
        wrong = [
            ForkAsked("s", one, 3),
            ForkAsked("s", end, 1),
            ForkAsked("s", Position(3, one.topic_id)),
            ForkAsked("s", Position(1, one.topic_id + 1)),
        ]
        for asked in wrong:
            assert refusal(bench, "f", CreateAsked(fork=asked)).code is Code.INVALID_REQUEST
        other = CreateAsked("application/json", fork=ForkAsked("s"))
        assert refusal(bench, "f", other).code is Code.STREAM_CONFLICT
        assert refusal(bench, "f", CreateAsked(fork=ForkAsked("no"))).code is Code.STREAM_NOT_FOUND
    finally:
        bench.world.abandon()


def test_too_long_a_line_of_forks_is_refused() -> None:
    bench = made("text/plain", b"x")
    try:
        stream = bench.node.streams
        path = "s"
        for number in range(ANCESTORS_MAX):
            create(bench, f"f{number}", CreateAsked(fork=ForkAsked(path)))
            path = f"f{number}"
        assert datas(bench, path) == [b"x"]
        assert (
            bench.world.run(stream.read(path, after(bench, "s", 1), 9, explicit=True)).datas == []
        )
        error = refusal(bench, "more", CreateAsked(fork=ForkAsked(path)))
        assert error.code is Code.INVALID_REQUEST
    finally:
        bench.world.abandon()


def test_a_fork_inherits_what_it_does_not_ask_for() -> None:
    bench = Bench()
    try:
        create(bench, "s", CreateAsked("text/plain;a=b", ttl_s=60, body=b"x", closes=True))
        create(bench, "f", CreateAsked(fork=ForkAsked("s")))
        create(bench, "g", CreateAsked("text/plain", ttl_s=5, fork=ForkAsked("f", BEGINNING)))
        f, g = (bench.store.topic(name).stream_facts for name in ("f", "g"))
        assert (f.content_type, f.ttl_s, f.is_closed) == ("text/plain;a=b", 60, False)
        assert (g.content_type, g.ttl_s, g.fork_at) == ("text/plain", 5, (0, 0))
        s = bench.store.topic("s").topic_id
        assert f.ancestors == (Ancestor("s", s, 1),)
        # None of the forks shares messages after its fork point.
        assert [each.upto_seq for each in g.ancestors] == [0, 0]
    finally:
        bench.world.abandon()


# --- complete or not at all -----------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["kill", "power"])
def test_after_a_crash_at_any_moment_a_fork_is_whole_or_not_there(mode: Mode) -> None:
    whole = [b"1", b"3", b"4", b'"new"']
    found: list[bool] = []
    for at_op in range(1, 40):
        bench = made("application/json", b"[1, 2, 3, 4]")
        try:
            bench.put(cap_records=0)
            run = bench.world.run
            run(bench.store.delete_seqs("s", [2]))
            bench.checkpoint()
            bench.world.disk.crash_at(at_op)
            asked = CreateAsked(fork=ForkAsked("s"), body=b'"new"')
            is_told = False
            try:
                create(bench, "f", asked)
                is_told = True
            except SimulatedCrash:
                pass
            bench.crash(mode)
            found.append(bench.node.registry.find("f") is not None)
            assert found[-1] or not is_told or mode == "power"
            if found[-1]:
                assert datas(bench, "f") == whole
            else:
                create(bench, "f", asked)
                assert datas(bench, "f") == whole
            assert datas(bench, "s") == [b"1", b"3", b"4"]
        finally:
            bench.world.abandon()
        if is_told:
            break
    assert found[:1] == [False]
    assert is_told, "the crashes did not reach the fork's end"


def test_a_fork_that_the_disk_refuses_leaves_nothing() -> None:
    asked = CreateAsked(fork=ForkAsked("s"))
    refused: list[Code] = []
    for nth in range(1, 9):
        bench = made("application/json", b"[1, 2, 3]")
        try:
            bench.world.disk.fail("write", "enospc", nth=nth)
            try:
                create(bench, "f", asked)
            except TopicsError as error:
                refused.append(error.code)
            if len(refused) and bench.node.registry.find("f") is None:
                bench.world.disk.heal()
                create(bench, "f", asked)
            bench.crash("kill")
            assert datas(bench, "f") == [b"1", b"2", b"3"]
        finally:
            bench.world.abandon()
    assert len(refused) >= 2
    assert set(refused) == {Code.THROTTLED}


def test_of_many_who_make_the_same_fork_one_does() -> None:
    bench = made("application/json", b"[1, 2, 3]")
    try:

        async def story() -> list[Any]:
            asked = CreateAsked(fork=ForkAsked("s"))
            return await asyncio.gather(
                *(bench.node.streams.create("f", asked) for _ in range(5)),
                bench.node.streams.create("f", CreateAsked("text/plain")),
                return_exceptions=True,
            )

        *same, other = bench.world.run(story())
        assert sorted(made.is_new for made in same) == [False] * 4 + [True]
        assert isinstance(other, TopicsError)
        assert other.code is Code.STREAM_CONFLICT
        assert datas(bench, "f") == [b"1", b"2", b"3"]
    finally:
        bench.world.abandon()


def test_no_client_sees_or_writes_an_unfinished_fork() -> None:
    bench = made("application/json", b"[1, 2, 3]")
    body = b'{"records":[{"data":1}]}'
    try:

        async def story() -> None:
            streams, store = bench.node.streams, bench.store
            making = asyncio.ensure_future(streams.create("f", CreateAsked(fork=ForkAsked("s"))))
            looks = 0
            while not making.done():
                await asyncio.sleep(0)
                topic = bench.node.registry.find("f")
                if topic is None or topic.stream is None or not topic.stream.newest.is_copying:
                    continue
                looks += 1
                with pytest.raises(TopicsError) as raised:
                    streams.head("f")
                assert raised.value.code is Code.STREAM_NOT_FOUND
                if "f" in store.pending_names:
                    continue
                with pytest.raises(TopicsError) as raised:
                    store.begin_append("f", body, decode_append(body), header_key=None)
                assert raised.value.detail == {"limit": "fork", "topic": "f"}
            assert looks
            await streams.append("f", b"9", AppendAsked("application/json"))

        bench.world.run(story())
        assert datas(bench, "f") == [b"1", b"2", b"3", b"9"]
    finally:
        bench.world.abandon()


def test_an_offset_of_the_source_is_one_of_the_fork_up_to_where_it_left() -> None:
    bench = made("application/json", b"[1, 2, 3, 4]")
    try:
        run, streams = bench.world.run, bench.node.streams
        two, three = after(bench, "s", 2), after(bench, "s", 3)
        create(bench, "f", CreateAsked(fork=ForkAsked("s", two)))
        run(streams.append("f", b"[30, 40]", AppendAsked("application/json")))
        page = run(streams.read("f", two, 99, explicit=True))
        assert [bytes(data) for data in page.datas] == [b"30", b"40"]
        for path, position in (("f", three), ("s", page.ends[0])):
            with pytest.raises(TopicsError) as raised:
                run(streams.read(path, position, 99, explicit=True))
            assert raised.value.code is Code.STREAM_GONE
    finally:
        bench.world.abandon()
