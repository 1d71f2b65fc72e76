"""`topics delete`: deletes records by tag, tag prefix or position (§5)."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from topics_server.cli.connection import ServerConnection, server_options, topic_path
from topics_server.cli.output import confirm, format_options, show_object


@click.command("delete")
@click.argument("topic")
@click.option("--before", type=click.IntRange(min=0), metavar="SEQ", help="Records below this seq.")
@click.option("--tag", metavar="TAG", help="Records with exactly this tag.")
@click.option("--tag-prefix", metavar="PREFIX", help="Records whose tag starts with this.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@format_options
@server_options
def command(
    topic: str,
    before: int | None,
    tag: str | None,
    tag_prefix: str | None,
    yes: bool,
    client: ServerConnection,
    as_json: bool,
) -> None:
    """Delete records of TOPIC for good.

    With --before and a tag, both must hold. Only records that exist now are deleted.
    """
    if tag is not None and tag_prefix is not None:
        raise click.UsageError("--tag and --tag-prefix: give one of them")
    if before is None and tag is None and tag_prefix is None:
        raise click.UsageError("name the records: --before, --tag or --tag-prefix")
    if tag_prefix is not None and "*" in tag_prefix:
        raise click.UsageError("--tag-prefix is taken literally and cannot contain *")
    body: dict[str, Any] = {}
    what: list[str] = []
    if before is not None:
        body["before_seq"] = before
        what.append(f"below seq {before}")
    if tag is not None:
        body["match"] = ["tag", "Eq", tag]
        what.append(f"with tag {tag!r}")
    if tag_prefix is not None:
        body["match"] = ["tag", "Glob", tag_prefix + "*"]
        what.append(f"with a tag that starts with {tag_prefix!r}")
    confirm(f"Delete the records of {topic} {' and '.join(what)} for good?", yes=yes)
    path = topic_path(topic, "/delete")
    show_object(client.call("POST", path, msgspec.json.encode(body)), as_json=as_json)
