"""`tag_watchers`: which tags wake which readers, and the position of each reader afterwards."""

from __future__ import annotations

import random

import pytest

from topics_server.engine.filters import (
    AllOf,
    AnyOf,
    Filter,
    Matcher,
    NodeLeaf,
    Not,
    TagLeaf,
    matches,
    tags_of,
)
from topics_server.engine.subscribe import subscription as module
from topics_server.engine.subscribe import tag_watchers
from topics_server.engine.subscribe.cursors import Cursor
from topics_server.engine.subscribe.subscription import Subscription, SubscriptionOptions
from topics_server.engine.subscribe.tag_watchers import TagWatchers
from topics_server.engine.topic.topic import Topic
from topics_server.values.appends import decode_append
from topics_server.values.model import LossReason, TagMatch, TopicConfig


def tag(text: str) -> TagLeaf:
    return TagLeaf((TagMatch(text),))


def prefix(text: str) -> TagLeaf:
    return TagLeaf((TagMatch(text, is_prefix=True),))


NODE = NodeLeaf(frozenset({"n"}))


class Followed:
    """A topic with readers at its head."""

    def __init__(self) -> None:
        self.topic = Topic(1, "t", 1, TopicConfig(), 0)
        self.watchers = TagWatchers()

    def reader(self, wanted: Filter) -> Subscription:
        options = SubscriptionOptions(matcher=Matcher(wanted))
        cursor = Cursor("t", 1, 1, self.topic.log.head_seq)
        made = Subscription(cursor, self.topic, options)
        made.is_live = True
        return made

    def joined(self, wanted: Filter) -> Subscription:
        made = self.reader(wanted)
        assert self.watchers.add(made)
        return made

    def append(self, *tags: str | None) -> None:
        records = b",".join(
            b'{"data":1}' if each is None else b'{"data":1,"tag":"%b"}' % each.encode()
            for each in tags
        )
        decoded = decode_append(b'{"records":[%b]}' % records, max_records=100_000)
        self.topic.log.append(1000, decoded, 1)

    def advance(self) -> list[Subscription]:
        left: list[Subscription] = []
        is_done = False
        while not is_done:
            more, is_done = self.watchers.advance(self.topic.log)
            left += more
        return left


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (tag("a"), {"a"}),
        (AnyOf((tag("a"), tag("b"))), {"a", "b"}),
        (AnyOf((tag("a"), NODE)), None),
        (AnyOf((tag("a"), Not(tag("b")))), None),
        (AllOf((tag("a"), NODE)), {"a"}),
        (AllOf((AnyOf((tag("a"), tag("b"))), tag("c"))), {"c"}),
        (AllOf((NODE, Not(tag("a")))), None),
        (Not(tag("a")), None),
        (NODE, None),
    ],
)
def test_the_tags_that_a_filter_needs(wanted: Filter, found: set[str] | None) -> None:
    tags = tags_of(wanted)
    assert (None if tags is None else {each.text for each in tags}) == found


def test_only_the_readers_of_a_new_tag_are_woken() -> None:
    followed = Followed()
    readers = [followed.joined(tag(f"t{number}")) for number in range(1000)]
    followed.append("t7", None, "x", "t7", "t31")
    assert set(followed.advance()) == {readers[7], readers[31]}
    # These readers continue before the records, all others after them.
    assert {each.cursor.seq for each in (readers[7], readers[31])} == {0}
    assert {each.cursor.seq for each in readers if each.cursor.shared_cursor} == {5}
    assert len(followed.watchers.members) == 998
    # The readers read, and wait again.
    readers[7].cursor.seq = 5
    assert followed.watchers.add(readers[7])
    readers[31].cursor.seq = 4
    assert not followed.watchers.add(readers[31]), "there is more for it"
    followed.append("t7")
    assert followed.advance() == [readers[7]]


def test_a_filter_without_tags_is_not_taken() -> None:
    followed = Followed()
    for wanted in (Not(tag("a")), NODE):
        assert not followed.watchers.add(followed.reader(wanted))


def test_the_first_reader_sets_the_position() -> None:
    followed = Followed()
    followed.append("a", "b")
    late = followed.reader(tag("b"))
    late.cursor.seq = 1
    assert followed.watchers.add(late)
    assert followed.advance() == [late]
    assert late.cursor.seq == 1


def test_readers_leave_with_the_position_of_all() -> None:
    followed = Followed()
    first, second = followed.joined(prefix("or")), followed.joined(tag("b"))
    followed.append("c", "d")
    assert followed.advance() == []
    followed.watchers.remove(first)
    assert first.cursor.shared_cursor is None
    assert first.cursor.seq == second.cursor.seq == 2
    followed.append("order")
    assert followed.advance() == []


def test_a_hole_behind_the_position_wakes_all() -> None:
    followed = Followed()
    followed.append("a")
    reader = followed.joined(tag("zzz"))
    followed.topic.log.jump_head(400, LossReason.RESTART)
    assert followed.advance() == [reader]
    assert reader.cursor.seq == 1


def test_everybody_is_looked_at_when_many_records_were_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tag_watchers, "SKIPPED_SLOTS_MAX", 100)
    monkeypatch.setattr(module, "SKIPPED_SLOTS_MAX", 100)
    followed = Followed()
    old = followed.joined(tag("z"))
    followed.append(*["b"] * 40)
    assert followed.advance() == []
    young = followed.joined(tag("z"))
    followed.append(*["b"] * 60)
    assert set(followed.advance()) == {old, young}
    assert {old.cursor.seq, young.cursor.seq} == {100}


def test_whoever_wants_a_record_is_woken_before_it() -> None:
    """The result is compared with a plain filter, over random filters and records, in steps of many
    blocks.
    """
    dice = random.Random(3)
    labels = ["a", "ab", "abc", "b", "ba", "c", None]

    def some_filter(depth: int = 0) -> Filter:
        kind = dice.randrange(6 if depth < 2 else 3)
        text = str(dice.choice(labels[:-1]))
        if kind == 0:
            return tag(text)
        if kind == 1:
            return prefix(text[: dice.randrange(3)])
        if kind == 2:
            return NODE
        parts = tuple(some_filter(depth + 1) for _ in range(2))
        return (AnyOf(parts), AllOf(parts), Not(parts[0]))[kind - 3]

    followed = Followed()
    waiting: set[Subscription] = set()
    woken_in_vain = woken_for_some = 0
    for turn in range(300):
        for _ in range(3):
            reader = followed.reader(some_filter())
            if followed.watchers.add(reader):
                waiting.add(reader)
        before = followed.topic.log.head_seq
        count = 20_000 if turn == 150 else dice.randrange(3)
        tags = [dice.choice(labels) for _ in range(count)]
        if count:
            followed.append(*tags)
        left = followed.advance()
        assert len(set(left)) == len(left)
        for reader in left:
            waiting.remove(reader)
            assert reader.cursor.seq == before
            assert reader.options.matcher is not None
            wanted = reader.options.matcher.wanted
            is_wanted = any(matches(wanted, each, node) for each in tags for node in ("n", None))
            woken_for_some += is_wanted
            woken_in_vain += not is_wanted
        for reader in waiting:
            assert reader.cursor.seq == followed.topic.log.head_seq
            assert reader.options.matcher is not None
            wanted = reader.options.matcher.wanted
            assert not any(matches(wanted, each, node) for each in tags for node in ("n", None))
    assert woken_for_some > 100
    assert followed.watchers.members.keys() == waiting
    for reader in tuple(waiting):
        followed.watchers.remove(reader)
    assert followed.watchers._by_tag == followed.watchers._by_prefix == {}
    assert followed.watchers._lengths == []
