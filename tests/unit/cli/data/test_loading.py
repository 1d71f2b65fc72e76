"""`cli.data.loading` against a server with scripted answers: its messages, and their times."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.cli.door import Door, Said, opened
from topics_server.cli import retries
from topics_server.cli.connection import Failure, ServerConnection
from topics_server.cli.data.cutting import Cutter, Shape
from topics_server.cli.data.lines import LineFile
from topics_server.cli.data.loading import Loading, LoadPlan
from topics_server.client import Backoff


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    """The server; retries follow at once."""
    monkeypatch.setattr(retries, "PAUSES", Backoff(base_ms=10, cap_ms=10))
    with opened() as found:
        yield found


def refused(status: int, code: str) -> Said:
    """A refusal in the envelope."""
    return Said(status, body=json.dumps({"error": {"code": code, "message": "why"}}).encode())


def appended(seq: int) -> Said:
    """The answer to an append of one record."""
    return Said(body=json.dumps({"first_seq": seq, "last_seq": seq}).encode())


def load_of(door: Door, folder: Path, retry_s: float) -> tuple[Loading, list[tuple[int, str]]]:
    """A load of two lines with one request each; the list gets each message, and the number of
    requests before it.
    """
    (folder / "lines").write_text("1\n2\n")
    told: list[tuple[int, str]] = []
    plan = LoadPlan("t", 1, 1_000, None, False, True, retry_s)
    file = LineFile(str(folder / "lines"))

    def tell(line: str) -> None:
        told.append((len(door.asked), line))

    return Loading(ServerConnection(door.url), file, Cutter(Shape(), None), plan, tell), told


def test_a_refusal_is_told_when_it_happens_and_once(door: Door, tmp_path: Path) -> None:
    busy, away = refused(429, "throttled"), refused(503, "not_ready")
    door.answers = [refused(404, "topic_not_found"), busy, busy, away, appended(1), appended(2)]
    load, told = load_of(door, tmp_path, 30)
    result = load.run(lambda *_: None)
    assert (result.loaded, len(door.asked)) == (2, 6)
    assert told == [
        (2, "throttled: why (trying line 1 again for up to 30 s)"),
        (4, "not_ready: why (trying line 1 again for up to 30 s)"),
        (5, "the server has appended line 1 now"),
    ]


def test_a_load_without_refusals_says_nothing(door: Door, tmp_path: Path) -> None:
    door.answers = [refused(404, "topic_not_found"), appended(1), appended(2)]
    load, told = load_of(door, tmp_path, 30)
    assert load.run(lambda *_: None).loaded == 2
    assert told == []


def test_a_refusal_that_is_final_is_the_error_alone(door: Door, tmp_path: Path) -> None:
    door.answers = [refused(404, "topic_not_found"), refused(429, "throttled")]
    load, told = load_of(door, tmp_path, 0)
    with pytest.raises(Failure, match=r"throttled: why \(line 1 not confirmed"):
        load.run(lambda *_: None)
    assert told == []
