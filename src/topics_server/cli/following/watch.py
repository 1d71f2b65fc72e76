"""`topics watch`: prints the frames of a watch stream (§7).

Each frame is one line: `{"event":…,"id":…,"data":…}`, with `data` as the server sent it. The frames
are those of `watch_stream`: after a disconnect the stream resumes from the last printed id, or from
the server's cursor.
"""

from __future__ import annotations

from typing import Any

import click
import msgspec

from topics_server.cli.amounts import SIZE
from topics_server.cli.connection import Failure, ServerConnection, server_options
from topics_server.cli.following.watch_stream import (
    CaughtUpFrame,
    Frame,
    TopicDeletedFrame,
    WatchFollower,
    watch_options,
)
from topics_server.cli.output import write_line
from topics_server.cli.stopping import stopped_by_reader
from topics_server.values.limits import SEQ_MAX


@click.command("watch")
@click.argument("topics", metavar="TOPIC[=FROM]...", nargs=-1, required=True)
@click.option("--until-caught-up", is_flag=True, help="Stop when every topic is at its head.")
@click.option(
    "--data/--no-data", "data", default=True, help="Whether to print the data of records."
)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Records of one frame.")
@click.option("--max-batch-bytes", type=SIZE, help="Bytes of one frame: 64KB, 1MiB.")
@watch_options
@server_options
def command(
    topics: tuple[str, ...],
    until_caught_up: bool,
    data: bool,
    limit: int | None,
    max_batch_bytes: int | None,
    options: dict[str, Any],
    client: ServerConnection,
) -> None:
    """Print the frames of a watch of TOPICs, each as one line of JSON, until Ctrl-C.

    FROM is the seq to begin after, or the word tail for new records only. Without FROM the watch
    begins at the first record.
    """
    asked: dict[str, dict[str, Any]] = {}
    for word in topics:
        name, start = _start_of(word)
        if name in asked:
            raise click.UsageError(f"{name} is named twice")
        asked[name] = start
    options["include_data"] = data
    if limit is not None:
        options["limit"] = limit
    if max_batch_bytes is not None:
        options["max_batch_bytes"] = max_batch_bytes
    behind, deleted = set(asked), set[str]()
    with stopped_by_reader():
        for frame in WatchFollower(client, asked, options).frames():
            write_line(_line(frame))
            match frame.body:
                case CaughtUpFrame(topic=topic):
                    behind.discard(topic)
                case TopicDeletedFrame(topic=topic):
                    behind.discard(topic)
                    deleted.add(topic)
                case _:
                    pass
            if until_caught_up and not behind and len(deleted) < len(asked):
                return
        raise Failure("every topic is deleted; nothing is left to watch")


def _start_of(word: str) -> tuple[str, dict[str, Any]]:
    """Parse `jobs`, `jobs=17` or `jobs=tail`; a topic's name contains no `=`."""
    name, given, start = word.partition("=")
    if not given:
        return name, {"from_seq": 0}
    if start == "tail":
        return name, {"tail": True}
    if not (start.isascii() and start.isdigit()) or int(start) > SEQ_MAX:
        raise click.UsageError(f"{word!r}: write a seq or the word tail after =")
    return name, {"from_seq": int(start)}


def _line(frame: Frame) -> bytes:
    head = msgspec.json.encode({"event": frame.event, "id": frame.id})
    return head[:-1] + b',"data":' + frame.payload + b"}"
