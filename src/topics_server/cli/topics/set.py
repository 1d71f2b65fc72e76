"""`topics set`: changes single fields of a topic's configuration."""

from __future__ import annotations

from typing import Any, Final

import click
import msgspec

from topics_server.cli.connection import ServerConnection, server_options, topic_path
from topics_server.cli.output import format_options, note, show_object
from topics_server.cli.topics.put import config_options, tell_config


class _Changed(msgspec.Struct):
    changed: dict[str, Any]


_CHANGED: Final = msgspec.json.Decoder(_Changed)


@click.command("set")
@click.argument("topic")
@config_options
@click.option(
    "--default",
    "defaults",
    multiple=True,
    metavar="FIELD",
    help="Give this field its default, for example ttl_ms; may be repeated.",
)
@format_options
@server_options
def command(
    topic: str, defaults: tuple[str, ...], client: ServerConnection, as_json: bool, **config: Any
) -> None:
    """Change the named fields of TOPIC's configuration; all others stay as they are."""
    patch: dict[str, Any] = {name: value for name, value in config.items() if value is not None}
    patch |= dict.fromkeys((name.replace("-", "_") for name in defaults), None)
    if not patch:
        raise click.UsageError("name at least one field to change")
    answer = client.call("PATCH", topic_path(topic), msgspec.json.encode(patch), repeatable=True)
    show_object(answer, as_json=as_json)
    tell_config(answer, patch)
    if _CHANGED.decode(answer).changed == {}:
        note("nothing changed")
