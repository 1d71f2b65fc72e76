"""A topic's stream facts: judged with entries in flight, undone with failed ones."""

from __future__ import annotations

import msgspec
import pytest

from topics_server.engine.topic.stream_facts import (
    USES_PER_LIFE,
    StreamState,
    plain_facts,
    stepped,
)
from topics_server.values.errors import Code, TopicsError
from topics_server.values.model import ProducerStamp, StreamFacts, StreamStep

FACTS = StreamFacts("p", "text/plain")
STAMP = ProducerStamp("a", 1, 2)


def with_(facts: StreamFacts = FACTS, **changes: object) -> StreamFacts:
    return msgspec.structs.replace(facts, **changes)


def refusal(state: StreamState, step: StreamStep | None = None) -> TopicsError:
    with pytest.raises(TopicsError) as raised:
        state.check("t", step)
    return raised.value


def test_an_open_stream_takes_records() -> None:
    state = StreamState(FACTS)
    for step in (None, StreamStep(), StreamStep("a"), StreamStep(None, True)):
        state.check("t", step)


def test_a_closed_one_takes_none_whatever_their_seq() -> None:
    state = StreamState(with_(is_closed=True, last_seq="5"))
    for step in (None, StreamStep("1"), StreamStep("9"), StreamStep(None, True)):
        error = refusal(state, step)
        assert (error.code, error.detail) == (Code.STREAM_CLOSED, {"topic": "t"})


def test_one_that_is_being_made_is_not_to_be_written_yet() -> None:
    error = refusal(StreamState(with_(is_copying=True, is_closed=True)))
    assert (error.code, error.detail) == (Code.THROTTLED, {"limit": "fork", "topic": "t"})


@pytest.mark.parametrize("low", ["5", "4", "", "10", "49", "0"])
def test_a_stream_seq_is_higher_than_the_last_byte_by_byte(low: str) -> None:
    error = refusal(StreamState(with_(last_seq="5")), StreamStep(low))
    assert error.code is Code.STREAM_CONFLICT
    assert error.detail == {"field": "Stream-Seq", "last_seq": "5"}


@pytest.mark.parametrize("high", ["50", "6", "a", "5 ", "é"])
def test_a_higher_one_is_taken_and_none_is_as_well(high: str) -> None:
    state = StreamState(with_(last_seq="5"))
    state.check("t", StreamStep(high))
    state.check("t", StreamStep(None))


def test_what_is_under_way_counts_and_is_not_told() -> None:
    state = StreamState(FACTS)
    state.stage(4, with_(last_seq="b"))
    state.stage(7, with_(last_seq="b", is_closed=True))
    assert refusal(state).code is Code.STREAM_CLOSED
    assert state.facts == FACTS
    state.undo(7)
    assert refusal(state, StreamStep("a")).code is Code.STREAM_CONFLICT
    state.check("t", StreamStep("c"))
    state.undo(4)
    state.check("t", StreamStep("a"))
    assert state.newest == state.facts == FACTS


def test_a_failure_takes_all_behind_it_and_nothing_before() -> None:
    state = StreamState(FACTS)
    for lsn, seq in ((2, "a"), (3, "b"), (5, "c")):
        state.stage(lsn, with_(last_seq=seq))
    state.undo(4)
    assert state.newest.last_seq == "b"
    state.undo(1)
    assert state.newest == FACTS
    state.undo(1)


def test_what_is_applied_is_under_way_no_more() -> None:
    state = StreamState(FACTS)
    first, second = with_(last_seq="a"), with_(last_seq="b")
    state.stage(2, first)
    state.stage(5, second)
    state.apply(2, first)
    assert (state.facts, state.newest) == (first, second)
    state.apply(5, second)
    assert state.facts == state.newest == second
    # In replay nothing was staged.
    state.apply(9, with_(last_seq="c", used_ms=77))
    assert (state.newest.last_seq, state.used_ms) == ("c", 77)


def test_a_step_changes_only_what_it_names() -> None:
    facts = with_(last_seq="5", ttl_s=9)
    assert stepped(facts, StreamStep(), STAMP) == facts
    assert stepped(facts, StreamStep("6"), STAMP) == with_(facts, last_seq="6")
    closed = with_(facts, is_closed=True, closed_by=STAMP)
    assert stepped(facts, StreamStep(None, True), STAMP) == closed
    assert stepped(facts, StreamStep(None, True), None) == with_(facts, is_closed=True)
    # The stream keeps the producer that first closed it.
    assert stepped(closed, StreamStep(), None) == closed


def test_a_use_is_never_taken_back() -> None:
    state = StreamState(with_(ttl_s=16, used_ms=1_000))
    state.used(5_000)
    state.used(3_000)
    assert state.used_ms == 5_000
    assert state.ends_ms() == 21_000


def test_a_use_is_due_when_the_journal_is_behind_by_more_than_a_part() -> None:
    slack_ms = 1000 * 160 // USES_PER_LIFE
    state = StreamState(with_(ttl_s=160, used_ms=0))
    state.used(slack_ms)
    assert not state.is_use_due()
    state.used(slack_ms + 1)
    assert state.is_use_due()
    state.stage(3, with_(ttl_s=160, used_ms=slack_ms + 1))
    assert not state.is_use_due(), "it is under way"
    for facts in (FACTS, with_(ttl_s=0), with_(expires_at="t", expires_ms=5)):
        other = StreamState(facts)
        other.used(10**12)
        assert not other.is_use_due()


def test_after_a_start_uses_may_have_been_as_late_as_that() -> None:
    state = StreamState(with_(ttl_s=160, used_ms=7))
    state.allow_for_uses()
    assert state.used_ms == 7 + 10_000
    eternal = StreamState(with_(used_ms=7))
    eternal.allow_for_uses()
    assert eternal.used_ms == 7


def test_a_stream_ends_after_its_last_use_at_a_time_or_never() -> None:
    assert StreamState(FACTS).ends_ms() is None
    assert StreamState(with_(ttl_s=0, used_ms=8)).ends_ms() == 8
    assert StreamState(with_(expires_at="t", expires_ms=99, used_ms=8)).ends_ms() == 99
    assert StreamState(with_(expires_at="1970", expires_ms=0)).ends_ms() == 0


def test_a_plain_topic_is_a_stream_of_json() -> None:
    assert plain_facts("t") == StreamFacts("t", "application/json")
