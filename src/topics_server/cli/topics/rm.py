"""`topics rm`: removes a topic with its records (§1.4)."""

from __future__ import annotations

from typing import Final

import click
import msgspec

from topics_server.cli.connection import Failure, ServerConnection, server_options, topic_path
from topics_server.cli.output import confirm, format_options, show_object


class _Answer(msgspec.Struct):
    deleted: bool


_ANSWER: Final = msgspec.json.Decoder(_Answer)


@click.command("rm")
@click.argument("topic")
@click.option("--if-empty", is_flag=True, help="Only if it holds no record.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@format_options
@server_options
def command(topic: str, if_empty: bool, yes: bool, client: ServerConnection, as_json: bool) -> None:
    """Remove TOPIC and all its records for good."""
    confirm(f"Remove topic {topic} and all its records for good?", yes=yes)
    query = "?if_empty=true" if if_empty else ""
    answer = client.call("DELETE", topic_path(topic, query))
    if not _ANSWER.decode(answer).deleted:
        raise Failure(f"topic_not_found: there was no topic {topic!r}")
    show_object(answer, as_json=as_json)
