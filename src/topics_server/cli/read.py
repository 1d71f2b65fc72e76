"""`topics read`: records from a position on, followed by long-polling (§3).

A record is printed as the server rendered it. What was lost (a tombstone) is never passed over in
silence: a line on standard error, and in NDJSON also a line `{"tombstone":…}` in its place.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from datetime import datetime
from typing import Any, Final

import click
import msgspec

from topics_server.cli.client import Client, Refused, Unreachable, server_options, topic_path
from topics_server.cli.output import format_options, note, one_line, write_line

PAGE_RECORDS: Final = 1000
WAIT_MS: Final = 30_000
# A followed server may be away this long (a restart, a short network failure).
AWAY_TRIES: Final = 30
AWAY_PAUSE_S: Final = 1.0


class Page(msgspec.Struct):
    """An answer of diff; records stay bytes."""

    records: list[msgspec.Raw]
    next_from_seq: int
    caught_up: bool
    # Not `Raw | None`: such a union takes nothing but null.
    tombstone: msgspec.Raw = msgspec.Raw(b"null")


class _Gap(msgspec.Struct):
    gap_from: int
    gap_to: int
    reason: str
    missed_estimate: int = 0


class _Record(msgspec.Struct):
    seq: int = msgspec.field(name="$seq")
    data: msgspec.Raw
    ts: int = msgspec.field(name="$ts", default=0)
    node: str | None = msgspec.field(name="$node", default=None)
    tag: str | None = msgspec.field(name="$tag", default=None)


@click.command("read")
@click.argument("topic")
@click.option(
    "--from",
    "from_seq",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="SEQ",
    help="Records after this seq; 0 = from the first one.",
)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Stop after N records.")
@click.option("--follow", "-f", is_flag=True, help="Go on with new records as they come.")
@click.option("--node", multiple=True, help="Leave out what this node wrote; may be repeated.")
@click.option("--tags/--no-tags", default=False, help="Show tags.")
@format_options
@server_options
def command(
    topic: str,
    from_seq: int,
    limit: int | None,
    follow: bool,
    node: tuple[str, ...],
    tags: bool,
    client: Client,
    as_json: bool,
) -> None:
    """Print the records of TOPIC."""
    query: dict[str, Any] = {"include_tags": tags}
    if node:
        query["node"] = list(node)
    left = limit
    for page in pages(client, topic, from_seq, query, follow=follow, limit=limit):
        if bytes(page.tombstone) != b"null":
            _show_gap(page.tombstone, as_json=as_json)
        records = page.records if left is None else page.records[:left]
        if as_json and records:
            click.echo(b"\n".join([one_line(bytes(record)) for record in records]))
        elif records:
            width = shutil.get_terminal_size().columns
            click.echo("\n".join(as_row(record, width) for record in records))
        if left is not None:
            left -= len(records)
            if left <= 0:
                return


def pages(
    client: Client,
    topic: str,
    from_seq: int,
    query: dict[str, Any],
    *,
    follow: bool = False,
    limit: int | None = None,
) -> Iterator[Page]:
    """Every page from a cursor to the head, and on from there if `follow`.

    `query` holds further fields of the request; `limit` bounds what one request asks for.
    """
    wait_ms = 0
    while True:
        records = PAGE_RECORDS if limit is None else min(PAGE_RECORDS, limit)
        asked = {**query, "from_seq": from_seq, "limit": records, "wait_ms": wait_ms}
        body = msgspec.json.encode(asked)
        page = msgspec.json.decode(_ask(client, topic, body, wait_ms, patient=follow), type=Page)
        yield page
        # Also backwards: after `recreated` the reader goes on in the new log.
        moved = page.next_from_seq != from_seq
        from_seq = page.next_from_seq
        if page.caught_up:
            if not follow:
                return
            wait_ms = WAIT_MS
        else:
            assert moved or wait_ms or page.records, "a page below the head moves its cursor"
            wait_ms = 0


def _ask(client: Client, topic: str, body: bytes, wait_ms: int, *, patient: bool) -> bytes:
    """One diff; a follower outlives a server that is away for a while."""
    path = topic_path(topic, "/diff")
    timeout_s = 60.0 + wait_ms / 1000
    for attempt in range(AWAY_TRIES + 1):
        try:
            return client.call("POST", path, body, timeout_s=timeout_s, repeatable=True)
        except (Refused, Unreachable) as error:
            away = isinstance(error, Unreachable) or error.status in {429, 503}
            if not (patient and away) or attempt == AWAY_TRIES:
                raise
            if attempt == 0:
                note(f"{error.message}; trying again")
        threading.Event().wait(AWAY_PAUSE_S)
    raise AssertionError("the last try returns or raises")


def _show_gap(tombstone: msgspec.Raw, *, as_json: bool) -> None:
    gap = msgspec.json.decode(tombstone, type=_Gap)
    note(
        f"gap: records {gap.gap_from} to {gap.gap_to} are gone ({gap.reason}), "
        f"about {gap.missed_estimate}"
    )
    if as_json:
        write_line(b'{"tombstone":' + bytes(tombstone) + b"}")


def as_row(raw: msgspec.Raw, width: int) -> str:
    """A record as one line of at most `width` columns: seq, time, tag, node, data."""
    record = msgspec.json.decode(raw, type=_Record)
    moment = datetime.fromtimestamp(record.ts / 1000).isoformat(sep=" ", timespec="milliseconds")
    marks = [f"#{record.tag}"] if record.tag is not None else []
    marks += [f"@{record.node}"] if record.node is not None else []
    data = one_line(bytes(record.data)).decode()
    line = "  ".join([f"{record.seq:>9}", moment, *marks, data])
    line = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in line)
    return line if len(line) <= width else line[: max(width - 1, 1)] + "…"
