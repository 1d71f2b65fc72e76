"""`topics tail`: prints new records of topics as they arrive (§7).

Each record is printed once, in the server's own bytes; `watch_stream` reconnects after any
disconnect. A gap is always printed: as a line on standard error, and in NDJSON also as a line
`{"tombstone":…}` in its place.
"""

from __future__ import annotations

from typing import Any, Final

import click
import msgspec

from topics_server.cli.connection import Failure, ServerConnection, server_options
from topics_server.cli.following.watch_stream import (
    Frame,
    RecordsFrame,
    TombstoneFrame,
    TopicDeletedFrame,
    Trouble,
    WatchFollower,
    watch_options,
)
from topics_server.cli.last import last_records
from topics_server.cli.output import format_options, note, write_line
from topics_server.cli.paging import show_records
from topics_server.cli.stopping import stopped_by_reader

# Options that exist for a watch and for a diff.
_QUERY: Final = ("include_meta", "include_tags", "node", "filter")


HELP = """Print records of TOPICs as they arrive, until Ctrl-C.

\b
topics tail orders              new records only
topics tail -n 10 orders        the last ten, then new ones
topics tail --tag paid orders   only records with a tag

After a disconnect the command resumes by itself; it misses no record and prints none twice.
With several topics each line begins with the topic's name (in NDJSON: the field "topic").
"""


@click.command("tail", help=HELP)
@click.argument("topics", metavar="TOPIC...", nargs=-1, required=True)
@click.option(
    "--from",
    "from_seq",
    type=click.IntRange(min=0),
    metavar="SEQ",
    help="Begin after this seq of each topic; default: with the next record.",
)
@click.option("--from-start", is_flag=True, help="Begin with the first record.")
@click.option(
    "--last",
    "-n",
    "last",
    type=click.IntRange(min=0),
    metavar="N",
    help="Begin with the last N records of each topic.",
)
@click.option("--consumer", metavar="NAME", help="Begin where this consumer is; commits nothing.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Stop after N records.")
@watch_options
@format_options
@server_options
def command(
    topics: tuple[str, ...],
    from_seq: int | None,
    from_start: bool,
    last: int | None,
    consumer: str | None,
    limit: int | None,
    options: dict[str, Any],
    client: ServerConnection,
    as_json: bool,
) -> None:
    """See `HELP`."""
    if from_start and from_seq is not None:
        raise click.UsageError("--from and --from-start: give one of them")
    if last is not None and (from_start or from_seq is not None):
        raise click.UsageError("-n begins with the last records: leave --from and --from-start out")
    if consumer is not None and (last is not None or from_start or from_seq is not None):
        raise click.UsageError("--consumer is a start: leave --from, --from-start and -n out")
    if last and options.get("consistency") == "strong":
        raise click.UsageError("-n reads records that may not be synced yet: leave --strong out")
    if from_start:
        from_seq = 0
    start: dict[str, Any] = {"tail": True} if from_seq is None else {"from_seq": from_seq}
    if consumer is not None:
        start = {"consumer": consumer}
    asked: dict[str, dict[str, Any]] = dict.fromkeys(topics, start)
    printer = _Printer(limit, as_json=as_json, names=len(asked) > 1)
    with stopped_by_reader():
        if last:
            query: dict[str, Any] = {name: options[name] for name in _QUERY if name in options}
            for topic in asked:
                records, after = last_records(client, topic, last, query, as_json=as_json)
                asked[topic] = {"from_seq": after}
                printer.show_records(topic, records)
                if printer.left == 0:
                    return
        for frame in WatchFollower(client, asked, options).frames():
            printer.show(frame)
            if printer.left == 0:
                return
        raise Failure("every topic is deleted; nothing is left to follow")


class _Printer:
    """Prints frames for a person or a script; `left` counts down to the limit."""

    def __init__(self, limit: int | None, *, as_json: bool, names: bool) -> None:
        self.left = limit
        self._as_json = as_json
        self._names = names

    def show(self, frame: Frame) -> None:
        """Print the records or the gap of a frame.

        Caught-up frames and heartbeats are not shown.
        """
        match frame.body:
            case RecordsFrame(topic=topic, records=records):
                self.show_records(topic, records)
            case TombstoneFrame() as gap:
                seqs = f"{gap.gap_from}-{gap.gap_to}"
                if gap.gap_to < gap.gap_from:
                    note(f"gap: {gap.topic} starts again at seq 1 ({gap.reason})")
                else:
                    note(f"gap: seqs {seqs} of {gap.topic} are gone ({gap.reason})")
                if self._as_json:
                    write_line(b'{"tombstone":' + frame.payload + b"}")
            case TopicDeletedFrame(topic=topic):
                note(f"{topic} is deleted")
            case Trouble(code=429, error=error):
                note(f"the server slows this stream down: {error}")
            case _:
                pass

    def show_records(self, topic: str, records: list[msgspec.Raw]) -> None:
        """Print records of one topic, up to the limit."""
        if self.left is not None:
            records = records[: self.left]
            self.left -= len(records)
        show_records(records, as_json=self._as_json, topic=topic if self._names else None)
