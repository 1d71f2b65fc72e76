"""`kept_parts`: what it keeps, as a plain dict would; the largest dict inside."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from topics_server.engine.background.kept_parts import KeptParts

# Ids around the borders of the ranges, and ids of the parts that are no topics.
IDS = st.sampled_from([1, 2, 4095, 4096, 4097, 8191, 8192, 2**32 + 1, 2**64 - 2, 2**64 - 1])
STEPS = st.lists(st.tuples(st.sampled_from(["keep", "discard"]), IDS, st.integers(0, 9)))


@given(STEPS)
def test_parts_are_kept_and_discarded_as_by_one_dict(steps: list[tuple[str, int, int]]) -> None:
    parts, expected = KeptParts(), dict[int, tuple[int, bytes]]()
    for step, topic_id, revision in steps:
        if step == "keep":
            part = b"%d of %d" % (revision, topic_id)
            parts.keep(topic_id, revision, part)
            expected[topic_id] = revision, part
        else:
            parts.discard(topic_id)
            expected.pop(topic_id, None)
        kept = {each: parts.get(each) for each in (1, 2, 4095, 4096, 8192, 2**64 - 1, topic_id)}
        assert kept == {each: expected.get(each, (-1, b"")) for each in kept}


def test_no_dict_holds_more_than_4096_parts_and_an_empty_one_is_freed() -> None:
    parts = KeptParts()
    for topic_id in range(1, 10_001):
        parts.keep(topic_id, 0, b"")
    assert sorted(map(len, parts._ranges.values())) == [1_809, 4_095, 4_096]
    for topic_id in range(1, 10_001):
        parts.discard(topic_id)
    assert parts._ranges == {}
