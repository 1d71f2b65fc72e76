"""Reads a topic page by page and prints its records and gaps.

Used by `read`, `tail` and `load`. Records are printed as the server rendered them. A gap (a
tombstone) is always printed: as a line on standard error, and in NDJSON also as a line
`{"tombstone":…}` in its place.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any, Final

import click
import msgspec

from topics_server.cli.connection import (
    CallRefused,
    ServerConnection,
    ServerUnreachable,
    topic_path,
)
from topics_server.cli.output import note, one_line, write_line
from topics_server.cli.retries import is_passing, tried

PAGE_RECORDS: Final = 1000
WAIT_MS: Final = 30_000
# How long a follower waits for a server that does not answer (a restart, a short failure of the
# network).
AWAY_MS: Final = 30_000


class DiffPage(msgspec.Struct):
    """A page of a diff; records stay bytes."""

    records: list[msgspec.Raw]
    next_from_seq: int
    caught_up: bool
    # Not `Raw | None`: msgspec accepts only null for such a union.
    tombstone: msgspec.Raw = msgspec.Raw(b"null")


_DIFF_PAGE: Final = msgspec.json.Decoder(DiffPage)


class _Gap(msgspec.Struct):
    gap_from: int
    gap_to: int
    reason: str
    missed_estimate: int = 0


_GAP: Final = msgspec.json.Decoder(_Gap)


class _Record(msgspec.Struct):
    seq: int = msgspec.field(name="$seq")
    data: msgspec.Raw
    ts: int = msgspec.field(name="$ts", default=0)
    node: str | None = msgspec.field(name="$node", default=None)
    tag: str | None = msgspec.field(name="$tag", default=None)


_RECORD: Final = msgspec.json.Decoder(_Record)


def show_records(
    records: Sequence[msgspec.Raw], *, as_json: bool, topic: str | None = None
) -> None:
    """Print records, one a line; with a `topic` each line begins with its name."""
    if not records:
        return
    if as_json:
        lines = [one_line(bytes(record)) for record in records]
        if topic is not None:
            head = b'{"topic":' + msgspec.json.encode(topic) + b","
            lines = [head + line[1:] for line in lines]
        click.echo(b"\n".join(lines))
        return
    name = "" if topic is None else f"{topic}  "
    width = max(shutil.get_terminal_size().columns - len(name), 1)
    click.echo("\n".join(name + as_row(record, width) for record in records))


def pages(
    client: ServerConnection,
    topic: str,
    from_seq: int,
    query: dict[str, Any],
    *,
    follow: bool = False,
    limit: int | None = None,
    since: str | None = None,
) -> Iterator[DiffPage]:
    """Yield every page from a cursor to the head, and later ones if `follow`.

    `query` holds further fields of the request; `limit` bounds the records of one request. The
    first page begins at the time `since`, if given, instead of at the cursor.
    """
    wait_ms = 0
    start: dict[str, Any] = {"from_seq": from_seq} if since is None else {"since": since}
    while True:
        records = PAGE_RECORDS if limit is None else min(PAGE_RECORDS, limit)
        asked = {**query, **start, "limit": records, "wait_ms": wait_ms}
        body = msgspec.json.encode(asked)
        page = _DIFF_PAGE.decode(_ask(client, topic, body, wait_ms, patient=follow))
        yield page
        # The cursor may also move back: after `recreated` the reader continues in the new log.
        moved = page.next_from_seq != start.get("from_seq")
        start = {"from_seq": page.next_from_seq}
        if page.caught_up:
            if not follow:
                return
            wait_ms = WAIT_MS
        else:
            assert moved or wait_ms or page.records, "a page below the head moves its cursor"
            wait_ms = 0


def _ask(
    client: ServerConnection, topic: str, body: bytes, wait_ms: int, *, patient: bool
) -> bytes:
    """Request one diff; a follower keeps trying while no server answers."""
    path = topic_path(topic, "/diff")
    timeout_s = 60.0 + wait_ms / 1000
    announced: list[str] = []

    def attempt() -> bytes:
        return client.call("POST", path, body, timeout_s=timeout_s, repeatable=True)

    def tell(error: CallRefused | ServerUnreachable) -> None:
        if not announced:
            note(f"{error.message}; trying again")
            announced.append(error.message)

    return tried(attempt, is_passing, AWAY_MS if patient else 0, tell)


def show_gap(tombstone: msgspec.Raw, *, as_json: bool) -> None:
    """Print a tombstone: a line on standard error, and in NDJSON also a line in its place."""
    gap = _GAP.decode(tombstone)
    note(
        f"gap: records {gap.gap_from} to {gap.gap_to} are gone ({gap.reason}), "
        f"about {gap.missed_estimate}"
    )
    if as_json:
        write_line(b'{"tombstone":' + bytes(tombstone) + b"}")


def as_row(raw: msgspec.Raw, width: int) -> str:
    """A record as one line of at most `width` columns: seq, time, tag, node, data."""
    record = _RECORD.decode(raw)
    moment = datetime.fromtimestamp(record.ts / 1000).isoformat(sep=" ", timespec="milliseconds")
    marks = [f"#{record.tag}"] if record.tag is not None else []
    marks += [f"@{record.node}"] if record.node is not None else []
    data = one_line(bytes(record.data)).decode()
    line = "  ".join([f"{record.seq:>9}", moment, *marks, data])
    line = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in line)
    return line if len(line) <= width else line[: max(width - 1, 1)] + "…"
