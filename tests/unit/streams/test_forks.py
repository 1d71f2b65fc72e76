"""Forks: what they hold is what was asked for, also after a crash."""

from __future__ import annotations

import pytest

from tests.design7.bench import Bench
from topics_server.streams.values import BEGINNING, CreateAsked, ForkAsked


def create(bench: Bench, path: str, asked: CreateAsked) -> None:
    assert bench.world.run(bench.node.streams.create(path, asked)).is_new


def datas(bench: Bench, path: str) -> list[bytes]:
    read = bench.node.streams.read(path, BEGINNING, 1 << 20, explicit=False)
    return [bytes(data) for data in bench.world.run(read).datas]


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
    """The places of deleted records hold nothing, and count for nothing, at any moment."""
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
    """A part of a message and a first message come on top of what the source has."""
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
