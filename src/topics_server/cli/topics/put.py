"""`topics put`: creates a topic or replaces its configuration (§1.1)."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, Final

import click
import msgspec

from topics_server.cli.amounts import DURATION, SIZE, Amount
from topics_server.cli.connection import ServerConnection, server_options, topic_path
from topics_server.cli.output import format_options, note, show_object

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
AMOUNT: Final = click.IntRange(min=0)
# Fields that only queues use.
QUEUE_FIELDS: Final = frozenset(
    {"lease_ms", "claim_jitter_ms", "max_deliveries", "dead_letter", "leases_durable"}
)


def _option(name: str, kind: click.ParamType[Any] | str, text: str) -> Decorator:
    if kind == "switch":
        return click.option(f"--{name}/--no-{name}", default=None, help=text)
    names = [f"--{name}"]
    if isinstance(kind, Amount) and name.endswith("-ms"):
        names.append(f"--{name.removesuffix('-ms')}")
    return click.option(*names, name.replace("-", "_"), type=kind, default=None, help=text)


OPTIONS: Final[tuple[Decorator, ...]] = (
    _option("type", click.Choice(["log", "queue"]), "Kind of the topic; cannot change later."),
    _option(
        "durability",
        click.Choice(["ephemeral", "memory", "disk", "fsync"]),
        "When an append is acknowledged.  [default: disk]",
    ),
    _option("ttl-ms", DURATION, "Records expire after this; 0 = never."),
    _option("cap-records", AMOUNT, "Most records to keep; 0 = all."),
    _option("cap-bytes", SIZE, "Most bytes to keep; 0 = all."),
    _option("discard", click.Choice(["old", "reject"]), "What a full topic does.  [default: old]"),
    _option("priority", click.INT, "Fixed delivery priority, -1000 to 1000."),
    _option("auto-priority", "switch", "Derive the priority from how recently it was read."),
    _option("auto-create", "switch", "A write may create this topic."),
    _option(
        "idempotency-window-ms",
        DURATION,
        "How long idempotency keys are remembered.  [default: 2m]",
    ),
    _option("dedupe-node", "switch", "Readers do not see their own node's records."),
    _option("lease-ms", DURATION, "Queue: how long a claimed job is invisible."),
    _option("claim-jitter-ms", DURATION, "Queue: window in which claims share jobs."),
    _option("max-deliveries", AMOUNT, "Queue: deliveries before a job is dead; 0 = no limit."),
    _option("dead-letter", click.STRING, "Queue: topic that dead jobs move to."),
    _option("leases-durable", "switch", "Queue: leases survive a crash."),
)


class _PutAnswer(msgspec.Struct):
    topic: str
    config: dict[str, Any]
    ignored: list[str] = []


_PUT_ANSWER: Final = msgspec.json.Decoder(_PutAnswer)


def config_options(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Add an option for each field of a configuration; None if the option is not given."""
    for option in reversed(OPTIONS):
        verb = option(verb)
    return verb


@click.command("put")
@click.argument("topic")
@config_options
@format_options
@server_options
def command(topic: str, client: ServerConnection, as_json: bool, **config: Any) -> None:
    """Create TOPIC, or replace its configuration.

    Options that you leave out take their defaults, also when the topic exists; only the type stays.
    """
    given = {name: value for name, value in config.items() if value is not None}
    body = msgspec.json.encode(given)
    answer = client.call("PUT", topic_path(topic), body, repeatable=True)
    show_object(answer, as_json=as_json)
    tell_config(answer, given)


def tell_config(answer: bytes, given: Mapping[str, Any]) -> None:
    """Report on standard error the fields that the server ignored or limited, or that a log does
    not use.
    """
    outcome = _PUT_ANSWER.decode(answer)
    for name in outcome.ignored:
        close = difflib.get_close_matches(name, outcome.config, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        note(f"the server does not know {name!r} and ignored it{hint}")
    for name, value in given.items():
        held = outcome.config.get(name)
        if type(value) is int and type(held) is int and value != held:
            note(f"{name} is {held}, the limit: {value} is beyond it")
    idle = sorted(name for name in QUEUE_FIELDS & given.keys() if given[name] is not None)
    if idle and outcome.config.get("type") == "log":
        note(
            f"{outcome.topic} is a log, on which {', '.join(idle)} has no effect; "
            "a queue is made with --type queue"
        )
