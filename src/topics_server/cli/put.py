"""`topics put`: create a topic or replace its configuration (§1.1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import click
import msgspec

from topics_server.cli.client import Client, server_options, topic_path
from topics_server.cli.output import format_options, show_object

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
AMOUNT: Final = click.IntRange(min=0)


def _option(name: str, kind: click.ParamType[Any] | str, text: str) -> Decorator:
    if kind == "switch":
        return click.option(f"--{name}/--no-{name}", default=None, help=text)
    return click.option(f"--{name}", type=kind, default=None, help=text)


OPTIONS: Final[tuple[Decorator, ...]] = (
    _option("type", click.Choice(["log", "queue"]), "Kind of the topic; cannot change later."),
    _option(
        "durability",
        click.Choice(["ephemeral", "memory", "disk", "fsync"]),
        "When an append is acknowledged.  [default: disk]",
    ),
    _option("ttl-ms", AMOUNT, "Records expire after this; 0 = never."),
    _option("cap-records", AMOUNT, "Keep at most so many records; 0 = all."),
    _option("cap-bytes", AMOUNT, "Keep at most so many bytes; 0 = all."),
    _option("discard", click.Choice(["old", "reject"]), "What a full topic does.  [default: old]"),
    _option("priority", click.INT, "Fixed delivery priority, -1000 to 1000."),
    _option("auto-priority", "switch", "Derive the priority from how recently it was read."),
    _option("auto-create", "switch", "A write may create this topic."),
    _option("idempotency-window-ms", AMOUNT, "How long keys are remembered.  [default: 120000]"),
    _option("dedupe-node", "switch", "Readers do not see their own node's records."),
    _option("lease-ms", AMOUNT, "Queue: how long a claimed job is invisible."),
    _option("claim-jitter-ms", AMOUNT, "Queue: window in which claims share jobs."),
    _option("max-deliveries", AMOUNT, "Queue: deliveries before a job is dead; 0 = no limit."),
    _option("dead-letter", click.STRING, "Queue: topic that dead jobs move to."),
    _option("leases-durable", "switch", "Queue: leases survive a crash."),
)


def _all_options(verb: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(OPTIONS):
        verb = option(verb)
    return verb


@click.command("put")
@click.argument("topic")
@_all_options
@format_options
@server_options
def command(topic: str, client: Client, as_json: bool, **config: Any) -> None:
    """Create TOPIC, or replace its configuration.

    What is left out takes its default, also when the topic exists; only the type stays.
    """
    given = {name: value for name, value in config.items() if value is not None}
    body = msgspec.json.encode(given)
    show_object(client.call("PUT", topic_path(topic), body, repeatable=True), as_json=as_json)
