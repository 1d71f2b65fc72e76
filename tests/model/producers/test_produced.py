"""Producers through both APIs by random requests: every answer and every start follows the
contract.

Some hundred sequences; thousands are in `tests/crash/simulated/test_producer_sequences.py`. Then
the same sequences run on servers with one promise removed: they must fail, or they prove nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import msgspec
import pytest

from tests.model.producers.produced import ProducedSimulation
from topics_server.engine import stream_writes
from topics_server.engine.background import capture
from topics_server.engine.commit import repeats
from topics_server.engine.topic.producers import Producers, StampAccepted
from topics_server.engine.topic.stream_facts import StreamState
from topics_server.values.entries import Entry, ProducerMoved, RecordsAppended, StreamChanged
from topics_server.values.model import StreamFacts
from topics_server.wal.format import frames
from topics_server.wal.journal import wal_writer

_SEQUENCES: Final = range(1, 201)
# How many sequences may pass until a broken server must be caught.
# The rarest of the faults shows in one sequence of eighty.
_TRIES: Final = range(1, 601)


def test_every_answer_is_the_contracts_and_nothing_acknowledged_is_lost() -> None:
    answers: Counter[object] = Counter()
    crashes = 0
    for seed in _SEQUENCES:
        simulation = ProducedSimulation(seed)
        simulation.run()
        answers += simulation.answers
        crashes += simulation.crashes
    assert crashes > len(_SEQUENCES)
    wanted = {"appended", "repeated", "deduped", "gap", "fenced", "no beginning", "closed", "low"}
    assert set(answers) == wanted
    assert min(answers.values()) >= 20, answers


def _no_producers_in_snapshots(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(capture, "_producers_of", lambda topic: {})


def _no_close_in_snapshots(patch: pytest.MonkeyPatch) -> None:
    whole = capture._stream_of

    def opened(topic: Any) -> StreamFacts | None:
        facts = whole(topic)
        return facts and msgspec.structs.replace(facts, is_closed=False, closed_by=None)

    patch.setattr(capture, "_stream_of", opened)


def _no_stream_seq_in_snapshots(patch: pytest.MonkeyPatch) -> None:
    whole = capture._stream_of

    def anew(topic: Any) -> StreamFacts | None:
        facts = whole(topic)
        return facts and msgspec.structs.replace(facts, last_seq=None)

    patch.setattr(capture, "_stream_of", anew)


def _frames(patch: pytest.MonkeyPatch, change: Callable[[Entry], Entry]) -> None:
    patch.setattr(
        wal_writer, "encode_entry", lambda lsn, entry: frames.encode_entry(lsn, change(entry))
    )


def _no_producer_in_frames(patch: pytest.MonkeyPatch) -> None:
    def change(entry: Entry) -> Entry:
        if isinstance(entry, RecordsAppended):
            return msgspec.structs.replace(entry, producer=None)
        return entry

    _frames(patch, change)


def _no_step_in_frames(patch: pytest.MonkeyPatch) -> None:
    def change(entry: Entry) -> Entry:
        if isinstance(entry, RecordsAppended):
            return msgspec.structs.replace(entry, step=None)
        return entry

    _frames(patch, change)


def _no_closer_in_frames(patch: pytest.MonkeyPatch) -> None:
    def change(entry: Entry) -> Entry:
        if isinstance(entry, StreamChanged):
            return msgspec.structs.replace(entry, producer=None)
        return entry

    _frames(patch, change)


def _no_moves_of_producers(patch: pytest.MonkeyPatch) -> None:
    def change(entry: Entry) -> Entry:
        if isinstance(entry, ProducerMoved):
            old = msgspec.structs.replace(entry.producer, producer_id="nobody")
            return msgspec.structs.replace(entry, producer=old)
        return entry

    _frames(patch, change)


def _nothing_on_its_way_counts(patch: pytest.MonkeyPatch) -> None:
    def last(self: Producers, producer_id: str, now_ms: int) -> tuple[None, StampAccepted | None]:
        return None, self.known.get(producer_id)

    patch.setattr(Producers, "_last", last)


def _no_close_on_its_way_counts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StreamState, "newest", property(lambda self: self.facts))


def _a_failed_request_stays_accepted(patch: pytest.MonkeyPatch) -> None:
    def keep(self: Producers, producer_id: str) -> None:
        _, accepted = self._staged[producer_id].pop()
        self.known[producer_id] = accepted
        if not self._staged[producer_id]:
            del self._staged[producer_id]

    patch.setattr(Producers, "undo", keep)


def _a_failed_close_stays_closed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StreamState, "undo", lambda self, lsn: None)


def _repeats_do_not_wait(patch: pytest.MonkeyPatch) -> None:
    async def at_once(ticket: object) -> None:
        pass

    patch.setattr(repeats, "applied", at_once)


def _closers_are_not_judged(patch: pytest.MonkeyPatch) -> None:
    whole = stream_writes.StreamWrites.close

    def close(self: Any, topic: Any, producer: Any) -> Any:
        return whole(self, topic, None)

    patch.setattr(stream_writes.StreamWrites, "close", close)


BREAKS: Final[list[Callable[[pytest.MonkeyPatch], None]]] = [
    _no_producers_in_snapshots,
    _no_close_in_snapshots,
    _no_stream_seq_in_snapshots,
    _no_producer_in_frames,
    _no_step_in_frames,
    _no_closer_in_frames,
    _no_moves_of_producers,
    _nothing_on_its_way_counts,
    _no_close_on_its_way_counts,
    _a_failed_request_stays_accepted,
    _a_failed_close_stays_closed,
    _repeats_do_not_wait,
    _closers_are_not_judged,
]


@pytest.mark.parametrize("take_out", BREAKS, ids=lambda take_out: take_out.__name__.strip("_"))
def test_without_it_the_sequences_fail(
    take_out: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one promise removed some sequence must fail."""
    take_out(monkeypatch)
    for seed in _TRIES:
        try:
            ProducedSimulation(seed).run()
        except AssertionError:
            return
    pytest.fail(f"{len(_TRIES)} sequences did not notice")
