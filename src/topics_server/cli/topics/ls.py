"""`topics ls`: lists topics (§1.3)."""

from __future__ import annotations

from functools import partial
from typing import Final

import click
import msgspec

from topics_server.cli.connection import ServerConnection, server_options, topic_path
from topics_server.cli.details import TopicDetails, age, fetched, jobs
from topics_server.cli.listing import rows_of, show_rows
from topics_server.cli.output import format_options
from topics_server.runtime.clock import now_ms
from topics_server.values.texts.amounts import size_text

COLUMNS: Final = ("topic", "type", "records", "size", "written", "durability", "about")
NUMBERS: Final = ("records", "size", "written")


class _Row(msgspec.Struct):
    topic: str
    count: int
    bytes: int


@click.command("ls")
@click.option("--prefix", default="", help="Only names that start with this.")
@format_options
@server_options
def command(prefix: str, client: ServerConnection, as_json: bool) -> None:
    """List topics.

    JSON output has the server's own rows. A table also has type, age of the last write and jobs of
    queues, for the first 1,000 topics.
    """
    show_rows(
        rows_of(client, "/v0/topics", "topics", {"prefix": prefix}),
        _Row,
        partial(_cells, client),
        COLUMNS,
        numbers=NUMBERS,
        limit_note="types and ages are those",
        as_json=as_json,
    )


def _cells(client: ServerConnection, row: _Row, has_details: bool) -> list[str] | None:
    """One line of the table; `None` for a topic that was removed since it was listed."""
    if not has_details:
        return [row.topic, "", f"{row.count:,}", size_text(row.bytes), "", "", ""]
    topic = fetched(client, topic_path(row.topic, "?touch=false"), TopicDetails)
    if topic is None:
        return None
    kind = topic.type if topic.stream is None else "stream"
    return [
        topic.topic,
        kind,
        f"{topic.count:,}",
        size_text(topic.bytes),
        age(topic.last_write_ts, now_ms()),
        str(topic.config.get("durability", "")),
        jobs(topic.queue) if topic.stream is None else topic.stream.path,
    ]
