"""Fixtures of the tests of known mistakes: a bench that is released whatever happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.design7.bench import Bench

NewBench = Callable[..., Bench]


@pytest.fixture
def new_bench() -> Iterator[NewBench]:
    """Makes benches, with other settings by name."""
    made: list[Bench] = []

    def make(**changes: Any) -> Bench:
        made.append(Bench(**changes))
        return made[-1]

    yield make
    for bench in made:
        bench.world.abandon()


@pytest.fixture
def bench(new_bench: NewBench) -> Bench:
    """One bench with small settings and one shard."""
    return new_bench()
