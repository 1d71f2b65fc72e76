"""Must-show 2: 329 webhook events stay equal byte by byte through every operation of the store.

`data` is the line as in the example file, `meta` an object with unusual spaces; the tag is the
event's name. The test compares a hash over the raw bytes of both, in order.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec
import pytest

from tests.contract.driver import ROOT, Server, eventually, good

FILE: Final = ROOT / "examples" / "webhooks" / "github-webhooks.jsonl.gz"
EVENTS: Final = 329
TOPIC: Final = "webhooks"
CAP: Final = 100
TAG: Final = "issues"
SEALING: Final = {"TOPICS_SEGMENT_MAX_EVENTS": "20"}


class Event(msgspec.Struct, frozen=True):
    """One record in its expected form."""

    seq: int
    tag: str
    data: bytes
    meta: bytes


class _Record(msgspec.Struct):
    seq: int = msgspec.field(name="$seq")
    tag: str = msgspec.field(name="$tag")
    data: msgspec.Raw
    meta: msgspec.Raw


class _Page(msgspec.Struct):
    records: list[_Record]
    next_from_seq: int
    caught_up: bool


class _Line(msgspec.Struct):
    event: str


def _events() -> list[Event]:
    lines = gzip.decompress(FILE.read_bytes()).splitlines()
    assert len(lines) == EVENTS
    return [
        Event(
            seq,
            msgspec.json.decode(line, type=_Line).event,
            line,
            b'{ "line" :%d,\t"text":"\\u00e9 \xc3\xa9" }' % seq,
        )
        for seq, line in enumerate(lines, 1)
    ]


EVENT_LIST: Final = _events()


def digest(events: list[Event]) -> str:
    """Hash over seq, tag, `data` and `meta` of every record, in order."""
    total = hashlib.sha256()
    for event in events:
        for part in (b"%d" % event.seq, event.tag.encode(), event.data, event.meta):
            total.update(b"%d:" % len(part) + part)
    return total.hexdigest()


def load(server: Server, durability: str = "disk") -> None:
    """Append all events, in batches of 25, byte for byte."""
    good(server.api.put(TOPIC, {"durability": durability}))
    for first in range(0, EVENTS, 25):
        records = b",".join(
            b'{"data":%b,"tag":"%b","meta":%b}' % (e.data, e.tag.encode(), e.meta)
            for e in EVENT_LIST[first : first + 25]
        )
        answer = server.api.http.post(
            f"/v0/topics/{TOPIC}",
            content=b'{"records":[' + records + b"]}",
            headers={"Content-Type": "application/json"},
        )
        assert good(answer)["first_seq"] == first + 1


def read_back(server: Server) -> list[Event]:
    """Every record from the start, raw."""
    events: list[Event] = []
    cursor = 0
    for _ in range(1000):
        answer = server.api.diff(TOPIC, from_seq=cursor, limit=40, include_tags=True)
        page = msgspec.json.decode(answer.content, type=_Page)
        events += [Event(r.seq, r.tag, bytes(r.data), bytes(r.meta)) for r in page.records]
        if page.caught_up:
            return events
        cursor = page.next_from_seq
    raise AssertionError("no end")


def expect(server: Server, keep: Callable[[Event], bool] = lambda event: True) -> None:
    """Check that the topic holds exactly the events that `keep` names, byte by byte."""
    assert digest(read_back(server)) == digest([e for e in EVENT_LIST if keep(e)])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server of its own with all events loaded."""
    made = Server(tmp_path / "server", {"TOPICS_WAL_SHARDS": "2"})
    made.start()
    load(made)
    yield made
    if made.process is not None:
        made.stop()


def _again(server: Server, **env: str) -> None:
    """Stop, start with other settings, then crash and start: so no result depends on memory."""
    server.stop()
    server.env = {**server.env, **env}
    server.start()
    server.crash()


def _wait_for_segments(folder: Path, count: int) -> None:
    eventually(lambda: len(list(folder.rglob("*.data"))) >= count, f"{count} segments in {folder}")


@pytest.mark.slow
def test_webhooks_come_back_as_they_were_sent(server: Server) -> None:
    expect(server)


@pytest.mark.slow
def test_webhooks_survive_a_restart(server: Server) -> None:
    server.restart()
    expect(server)


@pytest.mark.slow
def test_webhooks_survive_kill_9(server: Server) -> None:
    server.crash()
    expect(server)
    server.crash()
    expect(server)


@pytest.mark.slow
def test_webhooks_survive_sealing_with_tiny_segments(server: Server) -> None:
    _again(server, **SEALING)
    _wait_for_segments(server.data_dir, EVENTS // 20)
    expect(server)
    server.crash()
    expect(server)


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.slow
def test_webhooks_survive_the_deletes_of_others(server: Server, sealed: bool) -> None:
    if sealed:
        _again(server, **SEALING)
        _wait_for_segments(server.data_dir, EVENTS // 20)
    hit = sum(event.tag == TAG for event in EVENT_LIST)
    assert hit > 3
    assert good(server.api.delete(TOPIC, match=TAG))["deleted"] == hit
    expect(server, lambda event: event.tag != TAG)
    server.crash()
    expect(server, lambda event: event.tag != TAG)
    good(server.api.delete(TOPIC, before_seq=61))
    server.crash()
    expect(server, lambda event: event.tag != TAG and event.seq > 60)
    server.restart()
    expect(server, lambda event: event.tag != TAG and event.seq > 60)


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.slow
def test_webhooks_survive_eviction_by_a_cap(server: Server, sealed: bool) -> None:
    if sealed:
        _again(server, **SEALING)
        _wait_for_segments(server.data_dir, EVENTS // 20)
    good(server.api.put(TOPIC, {"cap_records": CAP}))
    eventually(lambda: bool(server.api.get_state(TOPIC)["count"] <= CAP), "the cap holds")
    for step in (server.crash, server.restart):
        expect(server, lambda event: event.seq > EVENTS - CAP)
        stone = server.api.read(TOPIC)["tombstone"]
        assert (stone["gap_from"], stone["gap_to"]) == (1, EVENTS - CAP)
        # After the cap is lifted, no evicted record returns.
        good(server.api.put(TOPIC, {}))
        step()
    expect(server, lambda event: event.seq > EVENTS - CAP)


@pytest.mark.slow
def test_webhooks_survive_moving_to_the_cold_folder(server: Server, tmp_path: Path) -> None:
    cold = tmp_path / "cold"
    retain = {"TOPICS_HOT_RETAIN_SEGMENTS": "1", "TOPICS_COLD_DIR": str(cold)}
    _again(server, **SEALING, **retain)
    _wait_for_segments(cold, EVENTS // 20 - 2)
    expect(server)
    server.crash()
    expect(server)
    good(server.api.delete(TOPIC, match=TAG))
    server.crash()
    expect(server, lambda event: event.tag != TAG)


@pytest.mark.slow
def test_webhooks_survive_a_changed_shard_count(server: Server) -> None:
    for shards in ("5", "1", "3"):
        _again(server, TOPICS_WAL_SHARDS=shards)
        expect(server)
