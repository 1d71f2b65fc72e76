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
