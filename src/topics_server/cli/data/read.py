"""`topics read`: prints records from a position, and follows."""

from __future__ import annotations

from typing import Any

import click

from topics_server.cli.connection import ServerConnection, server_options
from topics_server.cli.last import last_records
from topics_server.cli.output import format_options
from topics_server.cli.paging import pages, show_gap, show_records
from topics_server.cli.record_filters import filter_options


@click.command("read")
@click.argument("topic")
@click.option(
    "--from",
    "from_seq",
    type=click.IntRange(min=0),
    metavar="SEQ",
    help="Records after this seq; default: from the first one.",
)
@click.option(
    "--last", type=click.IntRange(min=1), metavar="N", help="Begin with the last N records."
)
@click.option(
    "--since",
    metavar="TIME",
    help="Records committed at TIME or later: ms since 1970, RFC 3339, or a duration before now.",
)
@filter_options
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Stop after N records.")
@click.option("--follow", "-f", is_flag=True, help="Continue with new records as they arrive.")
@click.option("--node", multiple=True, help="Leave out what this node wrote; may be repeated.")
@click.option("--tags/--no-tags", default=False, help="Show tags.")
@format_options
@server_options
def command(
    topic: str,
    from_seq: int | None,
    last: int | None,
    since: str | None,
    passing: Any,
    limit: int | None,
    follow: bool,
    node: tuple[str, ...],
    tags: bool,
    client: ServerConnection,
    as_json: bool,
) -> None:
    """Print the records of TOPIC."""
    query: dict[str, Any] = {"include_tags": tags}
    if node:
        query["node"] = list(node)
    if passing is not None:
        query["filter"] = passing
    starts = {"--from": from_seq, "--since": since, "--last": last}
    given = [option for option, value in starts.items() if value is not None]
    if len(given) > 1:
        raise click.UsageError(f"{given[1]} and {given[0]}: give one of them")
    left = limit
    if last is not None:
        records, from_seq = last_records(client, topic, last, query, as_json=as_json)
        records = records if left is None else records[:left]
        show_records(records, as_json=as_json)
        left = None if left is None else left - len(records)
        if not follow or left == 0:
            return
    reading = pages(client, topic, from_seq or 0, query, follow=follow, limit=left, since=since)
    for page in reading:
        if bytes(page.tombstone) != b"null":
            show_gap(page.tombstone, as_json=as_json)
        records = page.records if left is None else page.records[:left]
        show_records(records, as_json=as_json)
        if left is not None:
            left -= len(records)
            if left <= 0:
                return
