"""`garbage_collector`: when the collector runs, and on which objects."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Iterator

import pytest

from topics_server.runtime import garbage_collector

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _collector_as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.enable()
    # As `tests/conftest.py` does it: the collected tests stay out of later collections.
    gc.unfreeze()
    gc.freeze()


class Cycle:
    """Refers to itself: only the collector finds it."""

    def __init__(self) -> None:
        self.me = self


def lost_cycle() -> weakref.ref[Cycle]:
    return weakref.ref(Cycle())


def test_what_lives_when_it_begins_is_never_looked_at() -> None:
    gc.unfreeze()
    garbage_collector.rest()
    assert not gc.isenabled()
    old = lost_cycle()
    garbage_collector.begin()
    assert gc.isenabled()
    assert gc.get_threshold()[0] < 1000, "few at a time"
    gc.collect()
    assert old() is not None


def test_settling_frees_the_young_and_leaves_the_rest_alone() -> None:
    gc.disable()
    young, kept = lost_cycle(), [Cycle()]
    garbage_collector.freeze()
    assert young() is None
    found = weakref.ref(kept.pop())
    gc.collect()
    assert found() is not None, "it was frozen"


@pytest.fixture
async def pressed() -> AsyncIterator[garbage_collector.Collections]:
    """Pressure: the collector then runs by the clock, not by the number of new objects."""
    gc.collect()
    gc.disable()
    collections = garbage_collector.Collections(asyncio.get_running_loop())
    collections.on_pressure(True)
    yield collections
    collections.on_pressure(False)


async def until_gone(found: weakref.ref[Cycle]) -> None:
    for _ in range(20_000):
        if found() is None:
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it is never collected")


async def test_under_pressure_collections_go_by_the_clock(
    pressed: garbage_collector.Collections,
) -> None:
    for _ in range(3):
        await until_gone(lost_cycle())


async def test_under_pressure_survivors_of_a_collection_are_examined_again(
    pressed: garbage_collector.Collections,
) -> None:
    young = [Cycle()]
    found = weakref.ref(young[0])
    gc.collect(0)
    young.clear()
    await until_gone(found)


async def test_under_pressure_old_objects_are_not_examined(
    pressed: garbage_collector.Collections,
) -> None:
    old = [Cycle()]
    found = weakref.ref(old[0])
    gc.collect(1)
    old.clear()
    for _ in range(6):
        await until_gone(lost_cycle())
    assert found() is not None


async def test_when_pressure_is_over_only_python_decides(
    pressed: garbage_collector.Collections,
) -> None:
    pressed.on_pressure(False)
    found = lost_cycle()
    await asyncio.sleep(0.05)
    assert found() is not None


async def test_after_two_starts_collections_stop_when_pressure_ends(
    pressed: garbage_collector.Collections,
) -> None:
    pressed.on_pressure(True)
    pressed.on_pressure(False)
    found = lost_cycle()
    await asyncio.sleep(0.05)
    assert found() is not None
