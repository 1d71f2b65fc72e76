"""`topics consumer`: put, ls, get, commit and rm of consumers, the named cursors of readers."""

from __future__ import annotations

import click
import msgspec

from topics_server.cli.amounts import size
from topics_server.cli.connection import (
    ServerConnection,
    name_in_path,
    server_options,
    topic_path,
)
from topics_server.cli.listing import rows_of, show_rows
from topics_server.cli.output import confirm, format_options, show_object

_SEQ = click.IntRange(min=0)


class _Row(msgspec.Struct):
    consumer: str
    seq: int
    lag: int
    lag_ms: int


@click.group("consumer", context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Make, show, commit and remove consumers: named cursors that the server keeps."""


def _path(topic: str, consumer: str, verb: str = "") -> str:
    return topic_path(topic, f"/consumers/{name_in_path(consumer)}{verb}")


@command.command("put")
@click.argument("topic")
@click.argument("consumer")
@click.option("--from-seq", type=_SEQ, metavar="SEQ", help="Begin behind this seq.")
@click.option("--head", is_flag=True, help="Begin at the head; default: at the earliest record.")
@click.option(
    "--hold-records",
    type=click.IntRange(min=1),
    metavar="COUNT",
    help="Caps wait for the consumer until the topic has so many records.",
)
@click.option("--hold-bytes", type=size(1), help="The same in bytes; give both.")
@click.option("--no-hold", is_flag=True, help="Caps do not wait for the consumer any more.")
@format_options
@server_options
def put(
    topic: str,
    consumer: str,
    from_seq: int | None,
    head: bool,
    hold_records: int | None,
    hold_bytes: int | None,
    no_hold: bool,
    client: ServerConnection,
    as_json: bool,
) -> None:
    """Make a CONSUMER of TOPIC; an existing one keeps its position.

    The options of a hold also change an existing consumer. They need the scope admin.
    """
    if head and from_seq is not None:
        raise click.UsageError("--from-seq and --head: give one of them")
    if (hold_records is None) != (hold_bytes is None):
        raise click.UsageError("--hold-records and --hold-bytes: give both of them")
    if no_hold and hold_records is not None:
        raise click.UsageError("--no-hold and --hold-records: give one of them")
    start: int | str = "earliest" if from_seq is None else from_seq
    asked: dict[str, object] = {"from": "head" if head else start}
    if no_hold:
        asked["hold"] = None
    elif hold_records is not None:
        asked["hold"] = {"max_records": hold_records, "max_bytes": hold_bytes}
    body = msgspec.json.encode(asked)
    show_object(client.call("PUT", _path(topic, consumer), body, repeatable=True), as_json=as_json)


@command.command("get")
@click.argument("topic")
@click.argument("consumer")
@format_options
@server_options
def get(topic: str, consumer: str, client: ServerConnection, as_json: bool) -> None:
    """Show the position of a consumer, and its distance from the head."""
    show_object(client.call("GET", _path(topic, consumer), repeatable=True), as_json=as_json)


@command.command("ls")
@click.argument("topic")
@format_options
@server_options
def ls(topic: str, client: ServerConnection, as_json: bool) -> None:
    """List the consumers of TOPIC."""
    show_rows(
        rows_of(client, topic_path(topic, "/consumers"), "consumers", {}),
        _Row,
        lambda row, _: [row.consumer, str(row.seq), str(row.lag), f"{row.lag_ms / 1000:g} s"],
        ("CONSUMER", "SEQ", "LAG", "OLDEST"),
        numbers=("SEQ", "LAG", "OLDEST"),
        limit_note="",
        as_json=as_json,
    )


@command.command("commit")
@click.argument("topic")
@click.argument("consumer")
@click.argument("seq", type=_SEQ)
@click.option("--rewind", is_flag=True, help="Go back if SEQ is below the consumer's seq.")
@click.option("--if-seq", type=_SEQ, metavar="SEQ", help="Only if the consumer is at this seq.")
@format_options
@server_options
def commit(
    topic: str,
    consumer: str,
    seq: int,
    rewind: bool,
    if_seq: int | None,
    client: ServerConnection,
    as_json: bool,
) -> None:
    """Commit SEQ: every record up to it is finished."""
    body: dict[str, object] = {"seq": seq, "rewind": rewind, "if_seq": if_seq}
    encoded = msgspec.json.encode(body)
    path = _path(topic, consumer, "/commit")
    repeatable = if_seq is None and not rewind
    show_object(client.call("POST", path, encoded, repeatable=repeatable), as_json=as_json)


@command.command("rm")
@click.argument("topic")
@click.argument("consumer")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@format_options
@server_options
def rm(topic: str, consumer: str, yes: bool, client: ServerConnection, as_json: bool) -> None:
    """Forget a consumer and its position."""
    confirm(f"Forget the consumer {consumer} of {topic}?", yes=yes)
    answer = client.call("DELETE", _path(topic, consumer), repeatable=True)
    show_object(answer, as_json=as_json)
