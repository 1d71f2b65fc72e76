"""`topics info`: shows a topic's state and configuration (§1.2)."""

from __future__ import annotations

from typing import Final

import click
import msgspec

from topics_server.cli.connection import ServerConnection, server_options, topic_path
from topics_server.cli.details import TopicDetails, facts, settings
from topics_server.cli.output import format_options, show_table, write_line
from topics_server.runtime.clock import now_ms

_TOPIC_DETAILS: Final = msgspec.json.Decoder(TopicDetails)


@click.command("info")
@click.argument("topic")
@format_options
@server_options
def command(topic: str, client: ServerConnection, as_json: bool) -> None:
    """Show the state of TOPIC: its head, its first record, counts and configuration."""
    # The request must not change the topic's priority.
    answer = client.call("GET", topic_path(topic, "?touch=false"), repeatable=True)
    if as_json:
        write_line(answer)
        return
    found = _TOPIC_DETAILS.decode(answer)
    show_table(("", ""), [*facts(found, now_ms()), ("", ""), *settings(found)])
