"""`topics append --producer`: the producer's position, repeats, and which answers belong to its own
requests.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result

from tests.unit.cli.door import Door, Said, opened
from topics_server.cli.data import append, producers

STORED = Said(200, {}, b'{"first_seq":1}\n')
MOST = str(2**53 - 1)


def gap(expected: int) -> Said:
    return Said(409, {"Producer-Expected-Seq": str(expected)})


def fenced(epoch: int) -> Said:
    return Said(403, {"Producer-Epoch": str(epoch)})


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    monkeypatch.setattr(producers, "PAUSE_S", 0.001)
    monkeypatch.setattr(producers, "TRIES", 3)
    with opened() as found:
        yield found


def run(door: Door, *words: str) -> Result:
    words = ("t", "1", "--producer", "Zoë", *words, "--url", door.url)
    ran = CliRunner().invoke(append.command, words)
    assert door.answers == []
    return ran


def places(door: Door) -> list[tuple[str, str]]:
    return [(a.headers["producer-epoch"], a.headers["producer-seq"]) for a in door.asked]


@pytest.mark.parametrize(
    ("words", "probe", "asked", "place"),
    [
        ([], gap(0), "0", ("0", "0")),
        ([], gap(3), "0", ("1", "0")),
        ([], fenced(6), "0", ("7", "0")),
        (["--epoch", "4"], gap(3), "4", ("4", "3")),
        (["--epoch", "4"], Said(400), "4", ("4", "0")),
    ],
)
def test_the_place(
    door: Door, words: list[str], probe: Said, asked: str, place: tuple[str, str]
) -> None:
    door.answers = [probe, STORED]
    ran = run(door, *words)
    assert places(door) == [(asked, MOST), place]
    told = {"producer_epoch": int(place[0]), "producer_seq": int(place[1])}
    assert json.loads(ran.stdout) == {"first_seq": 1, **told}
    assert door.asked[0].headers["producer-id"].encode("latin-1").decode() == "Zoë"


def test_requests_with_lost_answers_are_repeated(door: Door) -> None:
    door.answers = [gap(0), None, Said(503), Said(204)]
    assert json.loads(run(door).stdout)["repeated"] is True
    assert places(door)[1:] == [("0", "0")] * 3


def test_a_seq_that_is_named_may_be_there(door: Door) -> None:
    door.answers = [Said(204)]
    assert run(door, "--epoch", "1", "--seq", "2").exit_code == 0
    assert places(door) == [("1", "2")]


@pytest.mark.parametrize(
    ("answers", "code"),
    [
        ([gap(0), Said(204)], 1),  # another producer's
        ([STORED], 1),  # no producers here
        ([Said(404)], 1),
        ([fenced(2)], 1),
        ([Said(429), Said(429), Said(429)], 1),
        ([gap(0), None, None, None], 2),
    ],
)
def test_what_fails(door: Door, answers: list[Said | None], code: int) -> None:
    door.answers = answers
    words = ["--epoch", "1"] if answers == [fenced(2)] else []
    assert run(door, *words).exit_code == code
