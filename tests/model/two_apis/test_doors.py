"""One log, two APIs: each API's view is a fold of the same history; and the test can fail."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import msgspec
import pytest

from tests.model.two_apis.doors import DoorsSimulation
from topics_server.engine.background import capture, sealer
from topics_server.engine.topic.stream_facts import StreamState
from topics_server.streams import forks, positions, service
from topics_server.streams.values import Position
from topics_server.values import blocks, json_cache, record_codecs
from topics_server.values.appends import of_columns
from topics_server.values.errors import StorageError, TopicsError

_RUNS: Final = range(1, 41)
_TRIES: Final = range(1, 31)


def test_both_doors_show_one_history() -> None:
    counts: Counter[str] = Counter()
    for seed in _RUNS:
        simulation = DoorsSimulation(seed)
        simulation.run()
        counts += simulation.counts
    assert min(counts[name] for name in ("clean", "kill", "power", "forked", "410", "woken")) >= 8


def _no_kinds(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(blocks, "BYTES_MARK", b"!")


def _no_base64(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(json_cache, "b2a_base64", lambda data, newline: bytes(data))


def _no_stream_in_snapshots(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(capture, "_stream_of", lambda topic: None)


def _offsets_of_any_stream(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(service.Streams, "_check", lambda self, topic, path, at: None)


def _forks_with_positions_of_their_own(patch: pytest.MonkeyPatch) -> None:
    def position_after(topic: Any, seq: int) -> Position:
        return Position(seq, topic.topic_id if seq else 0)

    patch.setattr(positions, "position_after", position_after)
    patch.setattr(service, "position_after", position_after)
    patch.setattr(forks, "position_after", position_after)


def _losses_are_silent(patch: pytest.MonkeyPatch) -> None:
    whole = service.Streams._page

    def page(self: Any, topic: Any, path: str, page: Any, *, explicit: bool) -> Any:
        return whole(self, topic, path, page, explicit=False)

    patch.setattr(service.Streams, "_page", page)


def _deleted_records_come_back_in_forks(patch: pytest.MonkeyPatch) -> None:
    whole = forks._columns

    def columns(page: Any, first_seq: int, last_seq: int) -> Any:
        return whole(page, first_seq, last_seq)[0], []

    patch.setattr(forks, "_columns", columns)


def _copies_name_the_grammar_of_their_request(patch: pytest.MonkeyPatch) -> None:
    def with_grammar(decoded: Any) -> Any:
        has_bytes = record_codecs._columns_form(decoded) != 0
        return msgspec.structs.replace(decoded, form=5) if has_bytes else decoded

    patch.setattr("topics_server.engine.stream_writes.with_grammar", with_grammar)


def _deletes_of_sealed_records_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    async def keep(self: Any, topic: Any) -> None:
        topic.files.pending = {segment_id: array("I") for segment_id in topic.files.pending}

    patch.setattr(sealer.Sealer, "_flip", keep)


def _replay_loses_traces(patch: pytest.MonkeyPatch) -> None:
    def decode_body(body: bytes, grammar: int, trace: bytes) -> Any:
        return record_codecs.decode_body(body, grammar)

    patch.setattr("topics_server.engine.topic.writes.append.decode_body", decode_body)


def _copies_lose_traces(patch: pytest.MonkeyPatch) -> None:
    whole = forks._columns

    def columns(page: Any, first_seq: int, last_seq: int) -> Any:
        decoded, dead = whole(page, first_seq, last_seq)
        metas = [blocks.split_trace(meta)[1] for meta in decoded.metas]
        return of_columns(decoded.datas, metas, decoded.tags, decoded.nodes), dead

    patch.setattr(forks, "_columns", columns)


def _closed_streams_take_more(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StreamState, "check", lambda self, name, step: None)


BREAKS: Final[list[Callable[[pytest.MonkeyPatch], None]]] = [
    _no_kinds,
    _no_base64,
    _no_stream_in_snapshots,
    _offsets_of_any_stream,
    _forks_with_positions_of_their_own,
    _losses_are_silent,
    _deleted_records_come_back_in_forks,
    _copies_name_the_grammar_of_their_request,
    _deletes_of_sealed_records_are_forgotten,
    _replay_loses_traces,
    _copies_lose_traces,
    _closed_streams_take_more,
]


@pytest.mark.parametrize("take_out", BREAKS, ids=lambda take_out: take_out.__name__.strip("_"))
def test_without_it_some_door_shows_something_else(
    take_out: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one rule removed some run must fail."""
    take_out(monkeypatch)
    for seed in _TRIES:
        try:
            DoorsSimulation(seed).run()
        except (AssertionError, ValueError, StorageError, TopicsError):
            return
    pytest.fail(f"{len(_TRIES)} runs did not notice")
