"""`topics enqueue`: enqueues one job (§2, §10.1)."""

from __future__ import annotations

import sys
import threading
from typing import Final

import click
import msgspec

from topics_server.cli.amounts import DURATION
from topics_server.cli.connection import (
    Client,
    ServerUnreachable,
    server_options,
    topic_path,
    wrong_text,
)
from topics_server.cli.output import format_options, show_object
from topics_server.runtime.clock import random_id

STANDARD_INPUT: Final = "-"
TRIES: Final = 4
PAUSE_S: Final = 0.05


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
    client: Client,
    as_json: bool,
) -> None:
    """Enqueue one job to QUEUE.

    DATA is JSON and is handed to a worker as it is; left out or - it is taken from standard input.
    A string needs its quotes: topics enqueue QUEUE '"hello"'
    """
    if delay_ms is not None and deliver_at_ms is not None:
        raise click.UsageError("--delay and --at: give one of them")
    fields: dict[str, object] = {"tag": tag, "delay_ms": delay_ms, "deliver_at_ms": deliver_at_ms}
    record: dict[str, object] = {"data": _json(_data(data), queue, data)}
    if meta is not None:
        record["meta"] = _object(meta)
    record.update({name: value for name, value in fields.items() if value is not None})
    body = {
        "records": [record],
        "idempotency_key": key or random_id(),
        "create": create,
        "config": {"type": "queue"},
    }
    show_object(_stored(client, queue, msgspec.json.encode(body)), as_json=as_json)


def _stored(client: Client, queue: str, body: bytes) -> bytes:
    """The answer. A try that broke is made again: under its key it is one job all the same."""
    for _ in range(TRIES - 1):
        try:
            return client.call("POST", topic_path(queue), body)
        except ServerUnreachable as error:
            if not error.sent:
                raise
        threading.Event().wait(PAUSE_S)
    return client.call("POST", topic_path(queue), body)


def _data(data: str | None) -> bytes:
    if data is not None and data != STANDARD_INPUT:
        return data.encode(errors="surrogateescape")
    if data is None and sys.stdin.isatty():
        raise click.UsageError("no DATA: give it as an argument or on standard input")
    return sys.stdin.buffer.read()


def _json(text: bytes, queue: str, argument: str | None) -> msgspec.Raw:
    """`text` if it is one JSON value; a usage error that suggests the quotes if not."""
    try:
        text.decode()
        msgspec.json.decode(text, type=msgspec.Raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        message = f"the data is not JSON: {wrong_text(error)}"
        if argument not in {None, STANDARD_INPUT}:
            quoted = msgspec.json.encode(text.decode(errors="replace")).decode()
            if "'" not in quoted:
                message += f"\nFor a string, write:  topics enqueue {queue} '{quoted}'"
        raise click.UsageError(message) from None
    return msgspec.Raw(text.strip())


def _object(meta: str) -> msgspec.Raw:
    try:
        msgspec.json.decode(meta, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise click.UsageError(f"--meta is not a JSON object: {wrong_text(error)}") from None
    return msgspec.Raw(meta.encode())
