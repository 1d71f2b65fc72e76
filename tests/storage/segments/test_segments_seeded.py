"""Seeded lives of one topic's segments on a failing disk, compared with a dict of promises."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tests.storage.fake_disk import FakeDisk, Mode, Op, SimulatedCrash
from tests.storage.segments.segment_samples import TOPIC, sample_block, sample_facts, sample_plan
from topics_server.values.errors import StorageError
from topics_server.wal.segments.packing_process import InlinePacker
from topics_server.wal.segments.store import SealedSegments

FAILING: tuple[Op, ...] = ("write", "sync", "rename", "unlink", "sync_dir", "open")
LIVES = 5
STEPS = 12


class Promised:
    """Segments by id: first seq, count, rows with an acknowledged flip, rows that may be dead."""

    def __init__(self) -> None:
        self.spans: dict[int, tuple[int, int]] = {}
        self.flipped: dict[int, set[int]] = {}
        self.perhaps: dict[int, set[int]] = {}
        self.kept: set[int] = set()  # acknowledged, and no drop was begun
        self.gone: set[int] = set()  # acknowledged drops
        self.next_id = 1
        self.next_seq = 1


def step(rng: random.Random, segments: SealedSegments, promised: Promised) -> None:
    """One random job; its promises are noted when it returns."""
    kept = sorted(promised.kept)
    job = rng.choice(("put", "put", "flip", "flip", "flip", "relocate", "relocate", "drop"))
    if job == "put" or not kept:
        number, count = promised.next_id, rng.randint(1, 60)
        promised.next_id += 1
        promised.spans[number] = (promised.next_seq, count)
        promised.next_seq += count
        promised.flipped[number], promised.perhaps[number] = set(), set()
        segments.put(sample_plan(number, *promised.spans[number]), sample_facts())
        promised.kept.add(number)
    elif job == "flip":
        hit: dict[int, Sequence[int]] = {
            number: rng.sample(range(count), rng.randint(1, count))
            for number in rng.sample(kept, rng.randint(1, len(kept)))
            for count in [promised.spans[number][1]]
        }
        for number, rows in hit.items():
            promised.perhaps[number].update(rows)
        segments.flip(TOPIC, hit)
        for number, rows in hit.items():
            promised.flipped[number].update(rows)
    elif job == "relocate":
        segments.relocate(TOPIC, rng.choice(kept), sample_facts())
    else:
        number = rng.choice(kept)
        promised.kept.discard(number)
        segments.drop(TOPIC, [number], sample_facts())
        promised.gone.add(number)


def recover(disk: FakeDisk, promised: Promised) -> SealedSegments:
    """Open and compare with the promises."""
    segments = SealedSegments(disk, "data", "cold", InlinePacker(), 16)
    report, opened = segments.open_topic(TOPIC)
    for path, reason in report.objections:
        raise StorageError(reason, path)
    segments.finish_recovery(TOPIC)
    indexes = {index.segment_id: index for index in opened}
    assert promised.kept <= set(indexes)
    assert not promised.gone & set(indexes)
    for number, index in indexes.items():
        first_seq, count = promised.spans[number]
        assert (index.first_seq, index.record_count) == (first_seq, count)
        assert segments.read(TOPIC, number, 0, count) == sample_block(first_seq, count)
        dead = {row for row, flag in enumerate(index.flags()) if flag}
        assert promised.flipped[number] <= dead <= promised.perhaps[number]
        # Rows that recovery has seen dead stay dead.
        promised.flipped[number] = dead
    # An unacknowledged but listed segment counts from now on.
    promised.kept |= set(indexes)
    promised.next_id = max([promised.next_id, *(number + 1 for number in indexes)])
    return segments


def run_seed(seed: int) -> None:
    disk = FakeDisk(seed)
    disk.make_dir("data")
    disk.make_dir("cold")
    disk.sync_dir(".")
    rng, promised = disk.rng, Promised()
    for _ in range(LIVES):
        if rng.random() < 0.8:
            disk.crash_at(rng.randint(1, 120))
        for _ in range(rng.choice((0, 0, 1, 2))):
            disk.fail(rng.choice(FAILING), rng.choice(("eio", "enospc")), nth=rng.randint(1, 40))
        try:
            segments = recover(disk, promised)
            for _ in range(STEPS):
                try:
                    step(rng, segments, promised)
                except StorageError:
                    continue
        except SimulatedCrash:
            pass
        except StorageError:
            disk.heal()  # a fault hit recovery itself: the server does not start
        mode: Mode = rng.choice(("kill", "power"))
        disk.crash(mode)
        disk = disk.reopen()
    recover(disk, promised)


@pytest.mark.parametrize("chunk", range(8))
def test_no_promise_is_broken(chunk: int) -> None:
    for seed in range(chunk * 25, chunk * 25 + 25):
        try:
            run_seed(seed)
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
