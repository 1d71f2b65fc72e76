"""The cache of sealed blocks: bounded by bytes, least recently used first."""

from __future__ import annotations

from array import array

from topics_server.engine.read.block_cache import BlockCache
from topics_server.values.blocks import Block


def block(size: int) -> Block:
    """One record of this many bytes."""
    return Block(
        first_seq=1,
        times=array("q", [1]),
        ends=array("Q", [size, size]),
        body=bytes(size),
        tags=[None],
        nodes=[None],
        kinds=bytes(1),
        hops=bytes(1),
    )


def test_what_was_put_is_got_until_it_is_evicted() -> None:
    cache = BlockCache(10_000)
    kept = block(100)
    cache.put((1, 1, 0), kept)
    assert cache.get((1, 1, 0)) is kept
    assert cache.get((1, 1, 256)) is None


def test_the_least_recently_used_block_goes_first() -> None:
    cache = BlockCache(2_500)
    for number in range(2):
        cache.put((1, number, 0), block(1_000))
    cache.get((1, 0, 0))
    cache.put((1, 2, 0), block(1_000))
    assert [cache.get((1, number, 0)) is None for number in range(3)] == [False, True, False]


def test_the_bound_is_kept_whatever_comes() -> None:
    cache = BlockCache(2_500)
    for number in range(50):
        cache.put((1, number, 0), block(40 * number))
        assert cache.held_bytes <= cache.max_bytes


def test_a_block_larger_than_the_cache_is_not_kept_and_evicts_nobody() -> None:
    cache = BlockCache(2_500)
    cache.put((1, 1, 0), block(1_000))
    cache.put((1, 2, 0), block(3_000))
    assert cache.get((1, 2, 0)) is None
    assert cache.get((1, 1, 0)) is not None


def test_a_block_that_is_put_twice_counts_once() -> None:
    cache = BlockCache(10_000)
    cache.put((1, 1, 0), block(1_000))
    held = cache.held_bytes
    cache.put((1, 1, 0), block(1_000))
    assert cache.held_bytes == held
