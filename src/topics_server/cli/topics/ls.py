"""`topics ls`: lists topics (§1.3)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final
from urllib.parse import urlencode

import click
import msgspec

from topics_server.amounts import size_text
from topics_server.cli.connection import Client, server_options, topic_path
from topics_server.cli.details import DETAILED_MAX, TopicDetails, age, fetched, jobs
from topics_server.cli.output import format_options, note, show_table, write_line
from topics_server.runtime.clock import now_ms

COLUMNS: Final = ("topic", "type", "records", "size", "written", "durability", "about")
NUMBERS: Final = ("records", "size", "written")
PAGE_SIZE: Final = 1000


class _Row(msgspec.Struct):
    topic: str
    count: int
    bytes: int


class _Page(msgspec.Struct):
    topics: list[msgspec.Raw]
    next_cursor: str | None = None


@click.command("ls")
@click.option("--prefix", default="", help="Only names that start with this.")
@format_options
@server_options
def command(prefix: str, client: Client, as_json: bool) -> None:
    """List topics.

    In JSON the server's own rows. A table also has type, age of the last write and jobs of queues,
    for the first 1,000 topics.
    """
    rows = _topics(client, prefix)
    if as_json:
        for row in rows:
            write_line(bytes(row))
        return
    listed = [msgspec.json.decode(row, type=_Row) for row in rows]
    cells = [_cells(client, row, number) for number, row in enumerate(listed)]
    show_table(COLUMNS, filter(None, cells), numbers=NUMBERS)
    if len(listed) > DETAILED_MAX:
        note(f"types and ages are those of the first {DETAILED_MAX:,} topics; --prefix names fewer")


def _cells(client: Client, row: _Row, number: int) -> list[str] | None:
    """One line of the table; `None` for a topic that was removed since it was listed."""
    if number >= DETAILED_MAX:
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


def _topics(client: Client, prefix: str) -> Iterator[msgspec.Raw]:
    query = {"prefix": prefix, "page_size": str(PAGE_SIZE)}
    while True:
        answer = client.call("GET", f"/v0/topics?{urlencode(query)}", repeatable=True)
        page = msgspec.json.decode(answer, type=_Page)
        yield from page.topics
        if page.next_cursor is None:
            return
        assert page.next_cursor != query.get("cursor"), "a page moves its cursor"
        query["cursor"] = page.next_cursor
