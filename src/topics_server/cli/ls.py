"""`topics ls`: every topic, page by page (§1.3)."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlencode

import click
import msgspec

from topics_server.cli.client import Client, server_options
from topics_server.cli.output import format_options, show_rows

COLUMNS = ("topic", "count", "bytes", "earliest_seq", "head_seq", "durable")
PAGE_SIZE = 1000


class _Page(msgspec.Struct):
    topics: list[msgspec.Raw]
    next_cursor: str | None = None


@click.command("ls")
@click.option("--prefix", default="", help="Only names that start with this.")
@format_options
@server_options
def command(prefix: str, client: Client, as_json: bool) -> None:
    """List topics."""
    show_rows(_topics(client, prefix), COLUMNS, COLUMNS[1:5], as_json=as_json)


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
