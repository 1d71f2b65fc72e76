"""Conditional writes against staged records, sealing and topics that are made again."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import Any

import pytest

from tests.unit.engine.rig import ListJournal, Rig, body_of
from topics_server.engine.answers import Appended
from topics_server.engine.filters import AnyOf, Filter, NodeLeaf, TagLeaf
from topics_server.engine.topic.writes.condition import Condition, UndecidedError
from topics_server.values.entries import RecordsAppended
from topics_server.values.errors import Code, TopicsError
from topics_server.values.limits import BLOCK_RECORDS_MAX
from topics_server.values.model import TagMatch, TopicConfig

pytestmark = pytest.mark.anyio


def tagged(*tags: str) -> Filter:
    return TagLeaf(tuple(map(TagMatch, tags)))


async def append_if(rig: Rig, condition: Condition, tag: str = "new", key: str = "") -> Appended:
    body, decoded = body_of(1, tag=tag)
    check = rig.store.check_of(condition)
    attempt = partial(
        rig.store.append,
        "t",
        body,
        decoded,
        header_key=key or None,
        config=None,
        check=check,
    )
    return await rig.store.decided(check, attempt)


async def reason(rig: Rig, condition: Condition) -> Any:
    """The reason why the condition does not hold, and the seq in its error."""
    with pytest.raises(TopicsError) as caught:
        await append_if(rig, condition)
    assert caught.value.code is Code.CONDITION_FAILED
    return caught.value.detail["reason"], caught.value.detail.get("seq")


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def slow_rig() -> tuple[Rig, ListJournal]:
    """A topic with one visible record; its journal writes when the test says so."""
    rig = Rig(is_prompt=False)
    first = asyncio.create_task(rig.append("t", 1, tag="old"))
    await settled()
    rig.journal.sync_everything()
    await first
    return rig, rig.journal


@pytest.mark.parametrize(
    "condition", [Condition(head_seq=1), Condition(none_match=tagged("new"), after=1)]
)
async def test_a_conflict_with_a_staged_record_waits_and_fails(condition: Condition) -> None:
    rig, journal = await slow_rig()
    winner = asyncio.create_task(append_if(rig, condition))
    loser = asyncio.create_task(reason(rig, condition))
    await settled()
    assert not loser.done()
    journal.sync_everything()
    assert (await winner).first_seq == 2
    assert (await loser)[1] == 2
    assert len([e for e in journal.entries if isinstance(e, RecordsAppended)]) == 2


@pytest.mark.parametrize(
    "condition", [Condition(head_seq=1), Condition(none_match=tagged("new"), after=1)]
)
async def test_a_conflict_with_a_staged_record_that_fails_is_none(condition: Condition) -> None:
    rig, journal = await slow_rig()
    first = asyncio.create_task(append_if(rig, condition))
    second = asyncio.create_task(append_if(rig, condition))
    await settled()
    lsn = journal.submitted[-1].lsn
    journal.fail(journal.submitted[-1].shard, lsn, "disk_full")
    with pytest.raises(TopicsError):
        await first
    await settled()
    journal.sync_everything()
    assert (await second).first_seq == 2


async def test_staged_records_without_a_match_do_not_hold_up() -> None:
    rig, journal = await slow_rig()
    others = [asyncio.create_task(rig.append("t", 1, tag="other")) for _ in range(3)]
    await settled()
    mine = asyncio.create_task(append_if(rig, Condition(none_match=tagged("new"))))
    await settled()
    assert isinstance(journal.entries[-1], RecordsAppended)
    assert journal.entries[-1].first_seq == 5
    journal.sync_everything()
    assert (await mine).first_seq == 5
    await asyncio.gather(*others)


async def test_a_repeat_of_a_staged_append_is_not_judged() -> None:
    rig, journal = await slow_rig()
    condition = Condition(head_seq=1)
    first = asyncio.create_task(append_if(rig, condition, key="k"))
    again = asyncio.create_task(append_if(rig, condition, key="k"))
    await settled()
    journal.sync_everything()
    assert (await first).first_seq == (await again).first_seq == 2
    assert (await again).deduped


async def test_two_creations_under_exists_false_make_one_topic() -> None:
    rig = Rig()
    absent = Condition(exists=False)
    done = await asyncio.gather(
        append_if(rig, absent), append_if(rig, absent), return_exceptions=True
    )
    assert isinstance(done[0], Appended)
    assert isinstance(done[1], TopicsError)
    assert done[1].detail["reason"] == "exists"


async def test_a_segment_made_during_the_search_is_searched() -> None:
    rig = Rig()
    await rig.append("t", *range(8), tag="a")
    await rig.sealer.seal_topics(["t"])
    topic = rig.store.topic("t")
    check = rig.store.check_of(Condition(none_match=tagged("new")))
    with pytest.raises(UndecidedError):
        check.decide(topic, 0)
    assert check.segments_to_search(topic, 8) == [1]

    def meanwhile() -> None:
        # A matching record is appended while the first segment is searched.
        body, decoded = body_of(1, tag="new")
        late = rig.store.begin_append("t", body, decoded, header_key=None)
        assert late is not None

    rig.segments.meanwhile = meanwhile
    assert await reason(rig, Condition(none_match=tagged("new"))) == ("match", 9)
    await rig.sealer.seal_topics(["t"])
    assert await reason(rig, Condition(none_match=tagged("new"))) == ("match", 9)
    assert (await append_if(rig, Condition(none_match=tagged("new"), after=9))).first_seq == 10


async def test_a_topic_made_again_during_the_search_is_searched_anew() -> None:
    rig = Rig()
    for _ in range(3):
        await rig.append("t", *range(8), tag="a")
        await rig.sealer.seal_topics(["t"])
    condition = Condition(none_match=tagged("b"))
    check = rig.store.check_of(condition)
    old = rig.store.topic("t")
    with pytest.raises(UndecidedError) as undecided:
        check.decide(old, 0)
    await rig.store.conditions._progress(check, undecided.value)
    assert check.found.keys() == {1, 2, 3}
    await rig.store.drop_topic("t", if_empty=False)
    await rig.append("t", *range(8), tag="b")
    await rig.sealer.seal_topics(["t"])
    with pytest.raises(UndecidedError):
        # The rows found in segment 1 of the old topic are not rows of the new topic's segment 1.
        check.decide(rig.store.topic("t"), 0)
    assert not check.found


async def test_a_long_tail_is_searched_in_turns() -> None:
    rig = Rig()
    for _ in range(3):
        await rig.append("t", *range(BLOCK_RECORDS_MAX), tag="a")
    check = rig.store.check_of(Condition(none_match=NodeLeaf(frozenset("n"))))
    attempts = 0

    async def attempt() -> None:
        nonlocal attempts
        attempts += 1
        check.decide(rig.store.topic("t"), 0)

    await rig.store.decided(check, attempt)
    assert attempts >= 3 * BLOCK_RECORDS_MAX // 2048


async def test_a_check_far_behind_the_head_costs_no_look_at_old_records() -> None:
    rig = Rig()
    for _ in range(4):
        await rig.append("t", *range(BLOCK_RECORDS_MAX), tag="a")
    head = rig.store.topic("t").log.head_seq
    check = rig.store.check_of(Condition(none_match=NodeLeaf(frozenset("n")), after=head))
    check.decide(rig.store.topic("t"), 0)
    assert check._matcher is None, "it is made for the first record that is looked at"


async def test_expired_records_are_trimmed_ones() -> None:
    rig = Rig()
    await rig.append("t", 1, tag="a", config=TopicConfig(ttl_ms=1_000))
    rig.clock.move(5_000)
    assert await reason(rig, Condition(none_match=tagged("b"))) == ("trimmed", None)
    assert (await append_if(rig, Condition(none_match=tagged("b"), after=1))).first_seq == 2


async def test_damaged_records_are_trimmed_ones() -> None:
    rig = Rig()
    await rig.append("t", *range(8), tag="a")
    await rig.sealer.seal_topics(["t"])
    rig.store.topic("t").note_damage(1, 2, 3)
    assert await reason(rig, Condition(none_match=tagged("b"), after=1)) == ("trimmed", None)
    assert (await append_if(rig, Condition(none_match=tagged("b"), after=4))).first_seq == 9


@pytest.mark.parametrize("seed", range(8))
async def test_conditions_agree_with_a_plain_list(seed: int) -> None:
    rng = random.Random(seed)
    rig = Rig()
    model: dict[int, tuple[str, str | None]] = {}
    head = 0
    for _ in range(150):
        match rng.randrange(10):
            case 0:
                await rig.sealer.seal_topics(["t"])
            case 1 if head:
                tag = f"k{rng.randrange(6)}"
                await rig.delete("t", tag=tag)
                model = {seq: row for seq, row in model.items() if row[0] != tag}
            case 2:
                count = rng.choice((1, 3, 300))
                tag = f"k{rng.randrange(6)}"
                await rig.append("t", *range(count), tag=tag)
                model |= {head + n: (tag, None) for n in range(1, count + 1)}
                head += count
            case _:
                after = rng.choice((0, max(0, head - 1), rng.randrange(head + 1)))
                tags = {f"k{rng.randrange(6)}" for _ in range(rng.randrange(1, 3))}
                wanted: Filter = tagged(*tags)
                form = rng.randrange(3)
                if form == 0:
                    wanted = AnyOf((wanted, NodeLeaf(frozenset("n"))))
                elif form == 1:
                    prefix = rng.choice(("k", "k1", "x"))
                    wanted = TagLeaf((TagMatch(prefix, is_prefix=True),))
                    tags = {f"k{n}" for n in range(6) if f"k{n}".startswith(prefix)}
                hits = [seq for seq, row in model.items() if seq > after and row[0] in tags]
                condition = Condition(none_match=wanted, after=after)
                if hits:
                    assert await reason(rig, condition) == ("match", min(hits))
                else:
                    tag = f"k{rng.randrange(6)}"
                    head += 1
                    assert (await append_if(rig, condition, tag)).first_seq == head
                    model[head] = (tag, None)
