"""`topics info`: a topic's state and configuration (§1.2)."""

from __future__ import annotations

import click

from topics_server.cli.client import Client, server_options, topic_path
from topics_server.cli.output import format_options, show_object


@click.command("info")
@click.argument("topic")
@format_options
@server_options
def command(topic: str, client: Client, as_json: bool) -> None:
    """Show where TOPIC stands: its head, its first record, counts and configuration."""
    # Looking is not reading: the topic's priority stays as it is.
    answer = client.call("GET", topic_path(topic, "?touch=false"), repeatable=True)
    show_object(answer, as_json=as_json)
