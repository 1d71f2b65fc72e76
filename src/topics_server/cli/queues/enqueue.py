"""`topics enqueue`: enqueues one job (§2, §10.1)."""

from __future__ import annotations

import sys
from typing import Final

import click
import msgspec

from topics_server.cli.amounts import DURATION
from topics_server.cli.connection import (
    ServerConnection,
    server_options,
    topic_path,
)
from topics_server.cli.json_input import json_object, json_value
from topics_server.cli.output import format_options, show_object
from topics_server.cli.retries import is_lost, nothing, tried
from topics_server.runtime.clock import random_id

STANDARD_INPUT: Final = "-"
AGAIN_MS: Final = 2000


@click.command("enqueue")
@click.argument("queue")
@click.argument("data", required=False, metavar="[DATA|-]")
@click.option("--tag", help="Tag, to delete by.")
@click.option("--meta", metavar="JSON", help="Small headers, a JSON object.")
@click.option("--delay", "delay_ms", type=DURATION, help="Delay of the job: 5s, 10m; plain: ms.")
@click.option(
    "--at",
    "deliver_at_ms",
    type=click.IntRange(min=0),
    metavar="MS",
    help="Time of delivery, in ms since 1970.",
)
@click.option("--key", help="Idempotency key: a repeated call enqueues once.")
@click.option(
    "--create/--no-create",
    default=False,
    show_default=True,
    help="Whether to create a missing topic as a queue.",
)
@format_options
@server_options
def command(
    queue: str,
    data: str | None,
    tag: str | None,
    meta: str | None,
    delay_ms: int | None,
    deliver_at_ms: int | None,
    key: str | None,
    create: bool,
    client: ServerConnection,
    as_json: bool,
) -> None:
    """Enqueue one job to QUEUE.

    DATA is JSON; a worker gets it unchanged. Without DATA, or with -, the command reads standard
    input. A string needs its quotes: topics enqueue QUEUE '"hello"'
    """
    if delay_ms is not None and deliver_at_ms is not None:
        raise click.UsageError("--delay and --at: give one of them")
    fields: dict[str, object] = {"tag": tag, "delay_ms": delay_ms, "deliver_at_ms": deliver_at_ms}
    call = None if data in {None, STANDARD_INPUT} else f"topics enqueue {queue}"
    record: dict[str, object] = {"data": json_value(_data(data), call=call)}
    if meta is not None:
        record["meta"] = json_object(meta, "--meta")
    record.update({name: value for name, value in fields.items() if value is not None})
    body = {
        "records": [record],
        "idempotency_key": key or random_id(),
        "create": create,
        "config": {"type": "queue"},
    }
    show_object(_stored(client, queue, msgspec.json.encode(body)), as_json=as_json)


def _stored(client: ServerConnection, queue: str, body: bytes) -> bytes:
    """Return the answer.

    After a broken connection, try again: the idempotency key prevents a second job.
    """

    def attempt() -> bytes:
        return client.call("POST", topic_path(queue), body)

    return tried(attempt, is_lost, AGAIN_MS, nothing)


def _data(data: str | None) -> bytes:
    if data is not None and data != STANDARD_INPUT:
        return data.encode(errors="surrogateescape")
    if data is None and sys.stdin.isatty():
        raise click.UsageError("no DATA: give it as an argument or on standard input")
    return sys.stdin.buffer.read()
