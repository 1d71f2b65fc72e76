"""`heap`: when the collector looks, and that it is put off under pressure."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Iterator

import pytest

from topics_server import heap

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _collector_as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)
    gc.enable()


class Cycle:
    """Refers to itself: only the collector finds it."""

    def __init__(self) -> None:
        self.me = self


def lost_cycle() -> weakref.ref[Cycle]:
    return weakref.ref(Cycle())


def test_what_lives_when_it_begins_is_never_looked_at() -> None:
    gc.unfreeze()
    heap.rest()
    assert not gc.isenabled()
    old = lost_cycle()
    heap.begin()
    assert gc.isenabled()
    assert gc.get_threshold()[0] < 1000, "few at a time"
    gc.collect()
    assert old() is not None


def test_settling_frees_the_young_and_leaves_the_rest_alone() -> None:
    gc.disable()
    young, kept = lost_cycle(), [Cycle()]
    heap.settle()
    assert young() is None
    found = weakref.ref(kept.pop())
    gc.collect()
    assert found() is not None, "it was frozen"


@pytest.fixture
async def pressed(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[heap.Collections]:
    """Pressure, and a look every millisecond."""
    monkeypatch.setattr(heap, "_LOOK_S", 0.001)
    collections = heap.Collections(asyncio.get_running_loop())
    gc.collect()
    collections.told(True)
    yield collections
    collections.told(False)


async def until_gone(found: weakref.ref[Cycle]) -> None:
    for _ in range(20_000):
        if found() is None:
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it is never collected")


async def test_under_pressure_nothing_is_collected_until_much_more_lives(
    pressed: heap.Collections,
) -> None:
    first = lost_cycle()
    kept = [[number] for number in range(2000)]
    await asyncio.sleep(0.02)
    assert not gc.isenabled()
    assert first() is not None
    kept += [[number] for number in range(20_000)]
    await until_gone(first)
    assert not gc.isenabled()
    assert len(kept) == 22_000


async def test_under_pressure_there_is_a_collection_now_and_then(
    pressed: heap.Collections, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = lost_cycle()
    await asyncio.sleep(0.02)
    assert found() is not None
    pressed.told(False)
    monkeypatch.setattr(heap, "_EVERY_S", 0.01)
    pressed.told(True)
    await until_gone(found)


async def test_when_pressure_is_over_it_looks_no_more(pressed: heap.Collections) -> None:
    pressed.told(False)
    assert gc.isenabled()
    gc.disable()
    found = lost_cycle()
    kept = [[number] for number in range(20_000)]
    await asyncio.sleep(0.02)
    assert found() is not None
    assert len(kept) == 20_000
