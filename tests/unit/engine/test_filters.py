"""`engine/filters`: a compiled filter gives the same result as its definition, at a bounded
cost.
"""

from __future__ import annotations

import asyncio
import json
import random

import pytest

from tests.unit.engine.drive import Driver
from tests.unit.engine.rig import Rig
from topics_server.engine.answers import BackwardRequest, ReadRequest, ReadStart
from topics_server.engine.filters import (
    AllOf,
    AnyOf,
    Filter,
    Matcher,
    NodeLeaf,
    Not,
    TagLeaf,
    matches,
)
from topics_server.engine.read.backward import plan_backward
from topics_server.engine.read.filtered import Search
from topics_server.engine.read.page import plan_page
from topics_server.values.appends import decode_append
from topics_server.values.limits import BLOCK_RECORDS_MAX, PAGE_BYTES_MAX, PAGE_LOOKUPS_MAX
from topics_server.values.model import TagMatch

TEXTS = ("", "a", "ab", "abc", "abd", "b", "ba", "\uffff", "a\U0010ffff")
# The most expensive form: no two of its leaves can be looked up together.
COSTLY = AnyOf(
    tuple(
        AllOf((TagLeaf((TagMatch("k", is_prefix=True),)), NodeLeaf(frozenset((f"m{n}",)))))
        for n in range(128)
    )
)


def some_filter(rng: random.Random, depth: int = 3) -> Filter:
    match rng.randrange(5 if depth else 2):
        case 0:
            count = rng.randrange(1, 4)
            return TagLeaf(
                tuple(TagMatch(rng.choice(TEXTS), rng.random() < 0.5) for _ in range(count))
            )
        case 1:
            return NodeLeaf(frozenset(rng.sample(TEXTS, rng.randrange(1, 3))))
        case 2:
            return Not(some_filter(rng, depth - 1))
        case kind:
            parts = tuple(some_filter(rng, depth - 1) for _ in range(rng.randrange(1, 4)))
            return AnyOf(parts) if kind == 3 else AllOf(parts)


@pytest.mark.parametrize("seed", range(20))
def test_a_matcher_decides_what_the_filter_means(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(40):
        wanted = some_filter(rng)
        matcher = Matcher(wanted)
        for tag in (None, *TEXTS):
            for node in (None, *TEXTS):
                assert matcher(tag, node) == matches(wanted, tag, node), (wanted, tag, node)


def test_many_tags_cost_as_much_as_one() -> None:
    many = Matcher(AnyOf(tuple(TagLeaf((TagMatch(f"a{n}", n % 2 == 0),)) for n in range(256))))
    assert many("b", None) is False
    assert many.spent == 1
    # A tag that was checked before costs nothing.
    assert many("b", None) is False
    assert many.spent == 1


def tagged_apart(blocks: int) -> Driver:
    """Records that all have other tags, in memory."""
    driver = Driver()
    for block in range(blocks):
        rows = [{"data": 0, "tag": f"k{block}:{n}"} for n in range(BLOCK_RECORDS_MAX)]
        driver.append_body(json.dumps({"records": rows}).encode())
    return driver


def test_a_costly_filter_examines_few_records_for_a_page() -> None:
    driver = tagged_apart(8)
    head = driver.topic.log.head_seq
    request = ReadRequest(0, 1000, PAGE_BYTES_MAX, filter=COSTLY)
    search = Search(COSTLY)
    pages = [plan_page(driver.topic, request, driver.now_ms, search=search)]
    while pages[-1].next_from_seq < head:
        before = pages[-1].next_from_seq
        again = ReadRequest(before, 1000, PAGE_BYTES_MAX, filter=COSTLY)
        spent = search.matcher.spent
        pages.append(plan_page(driver.topic, again, driver.now_ms, search=search))
        assert pages[-1].next_from_seq > before
        assert search.matcher.spent - spent <= PAGE_LOOKUPS_MAX + 256 * BLOCK_RECORDS_MAX
    assert len(pages) == 8
    assert not any(page.pieces for page in pages)


@pytest.mark.anyio
async def test_a_search_for_the_last_records_lets_others_run() -> None:
    rig, turns = Rig(), 0
    for block in range(6):
        records = [{"data": 0, "tag": f"k{block}:{n}"} for n in range(BLOCK_RECORDS_MAX)]
        body = json.dumps({"records": records}).encode()
        await rig.store.append("t", body, decode_append(body), header_key=None, config=None)

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    request = ReadRequest(0, 10, PAGE_BYTES_MAX, filter=COSTLY, start=ReadStart(None, 10))
    assert await rig.store.cursor_of("t", request) == 0
    counting.cancel()
    assert turns >= 5


def test_a_costly_filter_examines_few_records_backwards() -> None:
    driver = tagged_apart(4)
    before, pages = driver.topic.log.head_seq + 1, 0
    search = Search(COSTLY)
    while before > 1:
        asked = BackwardRequest(before, 0, 10, PAGE_BYTES_MAX)
        plan = plan_backward(driver.topic, asked, driver.now_ms, search)
        assert plan.next_before_seq < before
        before, pages = plan.next_before_seq, pages + 1
    assert pages == 4
