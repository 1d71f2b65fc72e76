"""The clocks and ids for all other modules."""

from __future__ import annotations

from topics_server.runtime.clock import SystemClock, monotonic_ms, now_ms, random_id, random_u64


def test_wall_time_is_integer_milliseconds_of_this_century() -> None:
    assert isinstance(now_ms(), int)
    assert 1_600_000_000_000 < now_ms() < 5_000_000_000_000


def test_monotonic_time_does_not_go_back() -> None:
    readings = [monotonic_ms() for _ in range(100)]
    assert readings == sorted(readings)


def test_the_clock_object_reads_the_same_clocks() -> None:
    clock = SystemClock()
    assert now_ms() - 1000 <= clock.now_ms() <= now_ms()
    assert monotonic_ms() - 1000 <= clock.monotonic_ms() <= monotonic_ms()


def test_ids_are_url_safe_and_differ() -> None:
    ids = {random_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(name.replace("-", "").replace("_", "").isalnum() for name in ids)
    assert all(len(name) == 22 for name in ids)


def test_counts_begin_somewhere_else_at_every_start() -> None:
    begins = {random_u64() for _ in range(100)}
    assert len(begins) == 100
    assert all(0 <= begin < 2**64 for begin in begins)
    assert max(begins) > 2**56
