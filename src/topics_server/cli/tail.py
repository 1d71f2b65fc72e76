"""`topics tail`: new records of one or more topics, as they come, for as long as it takes (§7).

A record is printed as the server rendered it, once; `streams` brings the stream back after any
disconnect. What was lost is never passed over in silence: a line on standard error, and in NDJSON
also a line `{"tombstone":…}` in its place.
"""

from __future__ import annotations

import shutil
from typing import Any

import click
import msgspec

from topics_server.cli.client import Client, Failure, server_options
from topics_server.cli.output import format_options, note, one_line, write_line
from topics_server.cli.read import as_row
from topics_server.cli.stopping import stopped_by_reader
from topics_server.cli.streams import (
    Following,
    Frame,
    Records,
    Tombstone,
    TopicDeleted,
    Trouble,
    watch_options,
)


@click.command("tail")
@click.argument("topics", metavar="TOPIC...", nargs=-1, required=True)
@click.option(
    "--from",
    "from_seq",
    type=click.IntRange(min=0),
    metavar="SEQ",
    help="Begin after this seq of each topic; default: with the next record.",
)
@click.option("--from-start", is_flag=True, help="Begin with the first record.")
@click.option("-n", "limit", type=click.IntRange(min=1), metavar="N", help="Stop after N records.")
@watch_options
@format_options
@server_options
def command(
    topics: tuple[str, ...],
    from_seq: int | None,
    from_start: bool,
    limit: int | None,
    options: dict[str, Any],
    client: Client,
    as_json: bool,
) -> None:
    """Print records of TOPICs as they come, until Ctrl-C.

    A stream that breaks is resumed by itself, with no record missing or printed twice. With
    several topics each line begins with the topic's name (in NDJSON: the field "topic").
    """
    if from_start and from_seq is not None:
        raise click.UsageError("--from and --from-start: give one of them")
    if from_start:
        from_seq = 0
    start = {"tail": True} if from_seq is None else {"from_seq": from_seq}
    following = Following(client, dict.fromkeys(topics, start), options)
    printer = _Printer(limit, as_json=as_json, names=len(set(topics)) > 1)
    with stopped_by_reader():
        for frame in following.frames():
            printer.show(frame)
            if printer.left == 0:
                return
        raise Failure("every topic is deleted; nothing is left to follow")


class _Printer:
    """Frames as what a person or a script reads; `left` counts down to the limit."""

    def __init__(self, limit: int | None, *, as_json: bool, names: bool) -> None:
        self.left = limit
        self._as_json = as_json
        self._names = names

    def show(self, frame: Frame) -> None:
        """Print what the frame brings; heads and heartbeats are not shown."""
        match frame.body:
            case Records() as page:
                self._show_records(page)
            case Tombstone() as gap:
                seqs = f"{gap.gap_from}-{gap.gap_to}"
                if gap.gap_to < gap.gap_from:
                    note(f"gap: {gap.topic} begins anew ({gap.reason})")
                else:
                    note(f"gap: seqs {seqs} of {gap.topic} are gone ({gap.reason})")
                if self._as_json:
                    write_line(b'{"tombstone":' + frame.payload + b"}")
            case TopicDeleted(topic=topic):
                note(f"{topic} is deleted")
            case Trouble(code=429, error=error):
                note(f"the server slows this stream down: {error}")
            case _:
                pass

    def _show_records(self, page: Records) -> None:
        records = page.records if self.left is None else page.records[: self.left]
        if not records:
            return
        if self.left is not None:
            self.left -= len(records)
        if self._as_json:
            head = b'{"topic":' + msgspec.json.encode(page.topic) + b","
            lines = [one_line(bytes(record)) for record in records]
            click.echo(b"\n".join([head + line[1:] for line in lines] if self._names else lines))
        else:
            name = f"{page.topic}  " if self._names else ""
            width = max(shutil.get_terminal_size().columns - len(name), 1)
            click.echo("\n".join(name + as_row(record, width) for record in records))
