"""`topics append`: appends one record."""

from __future__ import annotations

import sys
from typing import Any

import click
import msgspec

from topics_server.cli.connection import Failure, ServerConnection, server_options, topic_path
from topics_server.cli.data.append_lines import Template, append_lines
from topics_server.cli.data.conditions import condition_of, condition_options
from topics_server.cli.data.lines import STANDARD_INPUT
from topics_server.cli.data.producers import append_as
from topics_server.cli.json_input import json_object, json_value
from topics_server.cli.output import format_options, show_object

HELP = """Append one record to TOPIC; with - every line of standard input is one.

\b
topics append orders '{"id":9}' --tag new     one record
topics append orders < order.json             one record, over several lines
my-program | topics append orders -           each line as it arrives

DATA is JSON and is stored unchanged; without DATA the command reads one record from --file or
standard input. A string needs its quotes: topics append TOPIC '"hello"'

With - every run appends its lines as they arrive. Use `topics load` for files: it compares the
topic with the file and continues where an earlier run stopped.

With --producer the command repeats the request after a lost answer, and the record is stored
once. It claims the next epoch, which fences earlier writers with this ID; with --epoch it
continues that epoch at its next seq.

With --if-head, --if-none-match and the other --if options the record is stored only if the
condition holds when the server decides; otherwise nothing is stored, and the command fails.
"""


@click.command("append", help=HELP)
@click.argument("topic")
@click.argument("data", required=False, metavar="[DATA|-]")
@click.option("--file", "-f", metavar="FILE|-", help="Take the data from a file, - = input.")
@click.option("--tag", help="Tag, to delete by later.")
@click.option("--node", help="Name of the writer; reads with this --node leave the record out.")
@click.option("--meta", metavar="JSON", help="Small headers, a JSON object.")
@click.option("--key", help="Idempotency key: a repeated call appends once.")
@click.option(
    "--producer",
    metavar="ID",
    help="Append as this producer: the record is stored once, also after a retry.",
)
@click.option(
    "--epoch",
    type=click.IntRange(min=0),
    help="Epoch of the producer to continue; default: claim the next one.",
)
@click.option(
    "--seq",
    type=click.IntRange(min=0),
    help="Seq within the epoch; a seq that was used already is a repeat.",
)
@click.option("--create/--no-create", default=None, help="Whether to create a missing topic.")
@condition_options
@format_options
@server_options
def command(
    topic: str,
    data: str | None,
    file: str | None,
    tag: str | None,
    node: str | None,
    meta: str | None,
    key: str | None,
    producer: str | None,
    epoch: int | None,
    seq: int | None,
    create: bool | None,
    client: ServerConnection,
    as_json: bool,
    **asked: Any,
) -> None:
    """See `HELP`."""
    condition = condition_of(**asked)
    headers = None if meta is None else bytes(json_object(meta, "--meta"))
    if data == STANDARD_INPUT:
        if file is not None or key is not None or producer is not None:
            raise click.UsageError(
                "- appends one record a line: leave --file, --key and --producer out"
            )
        if condition is not None:
            raise click.UsageError("- appends many records: leave the --if options out")
        if epoch is not None or seq is not None:
            raise click.UsageError("--epoch and --seq need --producer")
        template = Template(_text(tag), _text(node), headers, create)
        done = append_lines(client, topic, template)
        show_object(msgspec.json.encode(done), as_json=as_json)
        return
    call = None if data is None else f"topics append {topic}"
    record = b'{"data":' + bytes(json_value(_data(data, file), call=call))
    if headers is not None:
        record += b',"meta":' + headers
    for name, value in (("tag", tag), ("node", node)):
        if value is not None:
            record += f',"{name}":'.encode() + msgspec.json.encode(value)
    body = b'{"records":[' + record + b"}]"
    if key is not None:
        body += b',"idempotency_key":' + msgspec.json.encode(key)
    if create is not None:
        body += b',"create":' + msgspec.json.encode(create)
    if condition is not None:
        body += b',"if":' + condition
    body += b"}"
    if producer is not None:
        answer = append_as(client, topic, body, producer, epoch, seq)
    elif epoch is not None or seq is not None:
        raise click.UsageError("--epoch and --seq need --producer")
    else:
        answer = client.call("POST", topic_path(topic), body, repeatable=key is not None)
    show_object(answer, as_json=as_json)


def _text(value: str | None) -> bytes | None:
    return None if value is None else msgspec.json.encode(value)


def _data(data: str | None, file: str | None) -> bytes:
    if data is not None and file is not None:
        raise click.UsageError("DATA and --file: give one of them")
    if data is not None:
        return data.encode(errors="surrogateescape")
    if file is None and sys.stdin.isatty():
        raise click.UsageError("no DATA: give it as an argument, with --file or on standard input")
    try:
        if file is None or file == "-":
            return sys.stdin.buffer.read()
        with open(file, "rb") as opened:
            return opened.read()
    except OSError as error:
        raise Failure(f"{file}: {error.strerror}") from None
