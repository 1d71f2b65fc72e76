"""`topics stream`: create, append, read, follow, close, rm of streams.

A JSON stream consists of messages, one on each line. Any other stream consists of bytes, which are
sent and printed unchanged.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Final

import click
import msgspec

from topics_server.cli.amounts import seconds
from topics_server.cli.connection import CallRefused, Failure, ServerConnection, server_options
from topics_server.cli.data.lines import STANDARD_INPUT, LineFile
from topics_server.cli.durable_streams.stream_calls import (
    JSON,
    START,
    StreamClient,
    StreamReadPage,
    is_json,
)
from topics_server.cli.durable_streams.stream_following import Live, StreamFollower
from topics_server.cli.json_input import json_value
from topics_server.cli.output import confirm, format_options, note, one_line, show_object
from topics_server.cli.stopping import stopped_by_reader
from topics_server.values.texts.amounts import SECOND_MS

BATCH_RECORDS: Final = 500
BATCH_BYTES: Final = 256 * 1024


@click.group("stream", context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Create, append to, read, follow, close and remove Durable Streams.

    STREAM is a path below /v1/stream/ of the server, or a whole URL.
    """


@command.command("create")
@click.argument("stream")
@click.option(
    "--content-type", "-t", default=JSON, show_default=True, help="Content type of the stream."
)
@click.option(
    "--ttl",
    "ttl_ms",
    type=seconds(),
    help="Time from its last use to its removal: 90s, 2h; plain: seconds.",
)
@click.option("--expires-at", metavar="TIME", help="Time of its removal; RFC 3339.")
@click.option("--fork", metavar="PATH", help="Begin with the content of this stream of the server.")
@click.option(
    "--fork-offset", metavar="OFFSET", help="Fork up to this offset; default: the whole stream."
)
@click.option("--closed", is_flag=True, help="Create the stream closed.")
@format_options
@server_options
def create(
    stream: str,
    content_type: str,
    ttl_ms: int | None,
    expires_at: str | None,
    fork: str | None,
    fork_offset: str | None,
    closed: bool,
    client: ServerConnection,
    as_json: bool,
) -> None:
    """Create STREAM; if it exists, it must have the same settings."""
    if ttl_ms is not None and expires_at is not None:
        raise click.UsageError("--ttl and --expires-at: give one of them")
    if ttl_ms is not None and ttl_ms % SECOND_MS:
        raise click.UsageError("--ttl is whole seconds")
    if fork_offset is not None and fork is None:
        raise click.UsageError("--fork-offset goes with --fork")
    given = {
        "Stream-TTL": None if ttl_ms is None else str(ttl_ms // SECOND_MS),
        "Stream-Expires-At": expires_at,
        "Stream-Fork-Offset": fork_offset,
        "Stream-Closed": "true" if closed else None,
    }
    headers = {name: value for name, value in given.items() if value is not None}
    with StreamClient(client, stream) as found:
        if fork is not None:
            with StreamClient(client, fork) as source:
                headers["Stream-Forked-From"] = source.path
                # A fork has the content type of its source.
                content_type = source.content_type() if content_type == JSON else content_type
        answer = found.ask("PUT", {"Content-Type": content_type, **headers})
        shown = {
            "stream": found.path,
            "created": answer.status_code == 201,
            "content_type": answer.headers.get("Content-Type", content_type),
            "next_offset": answer.headers.get("Stream-Next-Offset"),
        }
    show_object(msgspec.json.encode(shown), as_json=as_json)


@command.command("append")
@click.argument("stream")
@click.argument("data", nargs=-1)
@click.option("--content-type", "-t", help="Content type of STREAM; default: ask the server.")
@click.option(
    "--producer", metavar="ID", help="Append as this producer: each message once and in order."
)
@click.option(
    "--epoch", type=click.IntRange(min=0), help="Epoch of the producer; default: the next one."
)
@click.option("--close", "closes", is_flag=True, help="Close STREAM after the append.")
@server_options
def append(
    stream: str,
    data: tuple[str, ...],
    content_type: str | None,
    producer: str | None,
    epoch: int | None,
    closes: bool,
    client: ServerConnection,
) -> None:
    """Append DATA to STREAM, or standard input.

    For a JSON stream each DATA, or each line of the input, is one message. For any other stream the
    bytes are appended unchanged, those of the input as they arrive.
    """
    if epoch is not None and producer is None:
        raise click.UsageError("--epoch needs --producer")
    if not data and sys.stdin.isatty():
        raise click.UsageError("no DATA: give it as arguments or on standard input")
    with StreamClient(client, stream) as found:
        content_type = content_type or found.content_type()
        if producer is not None:
            _produce(client, found, data, content_type, producer, epoch)
        else:
            for batch in _bodies(data, content_type):
                _append(found, content_type, batch)
        if closes:
            found.ask("POST", {"Stream-Closed": "true"})


def _produce(
    client: ServerConnection,
    stream: StreamClient,
    data: tuple[str, ...],
    content_type: str,
    producer: str,
    epoch: int | None,
) -> None:
    from topics_server.client import IdempotentProducer, Undelivered

    token = client.token
    holds_json = is_json(content_type)
    try:
        with IdempotentProducer(
            stream.url,
            producer,
            token=token,
            content_type=content_type,
            epoch=epoch,
            seq=None,
        ) as writing:
            for record in _records(data, holds_json=holds_json):
                writing.send(msgspec.Raw(record) if holds_json else record)
    except Undelivered as error:
        raise Failure(str(error)) from None
    except UnicodeEncodeError:
        raise  # `main` reports it, as for all verbs
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _append(stream: StreamClient, content_type: str, batch: list[bytes]) -> None:
    """Append bytes or messages.

    Messages are sent in one request, or in several if the server accepts fewer at a time.
    """
    if not is_json(content_type):
        stream.ask("POST", {"Content-Type": content_type}, b"".join(batch))
        return
    size = len(batch)
    while batch:
        body = b"[" + b",".join(batch[:size]) + b"]"
        try:
            stream.ask("POST", {"Content-Type": content_type}, body)
        except CallRefused as refused:
            if refused.most_records is None or refused.most_records >= size:
                raise
            size = refused.most_records
        else:
            batch = batch[size:]


def _bodies(data: tuple[str, ...], content_type: str) -> Iterator[list[bytes]]:
    """Yield the content of each request: messages, or one piece of bytes."""
    if is_json(content_type):
        yield from _messages(data)
    else:
        yield from ([piece] for piece in _records(data, holds_json=False))


def _records(data: tuple[str, ...], *, holds_json: bool) -> Iterator[bytes]:
    """Yield messages, or pieces of bytes."""
    if holds_json:
        for batch in _messages(data):
            yield from batch
    elif data:
        yield b"".join(word.encode(errors="surrogateescape") for word in data)
    else:
        read1 = getattr(sys.stdin.buffer, "read1", sys.stdin.buffer.read)
        while piece := read1(BATCH_BYTES):
            yield piece


def _messages(data: tuple[str, ...]) -> Iterator[list[bytes]]:
    if data:
        yield [_message(word.encode(errors="surrogateescape")) for word in data]
        return
    for batch in LineFile(STANDARD_INPUT).batches(BATCH_RECORDS, BATCH_BYTES):
        yield [_message(line) for line in batch.lines]


def _message(text: bytes) -> bytes:
    return bytes(json_value(text, "a message"))


def _show(page: StreamReadPage) -> None:
    """Print messages one per line, and bytes unchanged, without delay."""
    if page.is_json:
        if values := page.values():
            click.echo(b"\n".join(one_line(value) for value in values))
    elif page.body:
        sys.stdout.buffer.write(page.body)
        sys.stdout.buffer.flush()


@command.command("read")
@click.argument("stream")
@click.option("--from", "offset", default=START, metavar="OFFSET", help="Default: the beginning.")
@click.option(
    "--offset", "shows_offset", is_flag=True, help="Print the next offset on standard error."
)
@server_options
def read(stream: str, offset: str, shows_offset: bool, client: ServerConnection) -> None:
    """Print the content of STREAM: messages one a line, bytes unchanged."""
    with StreamClient(client, stream) as found, stopped_by_reader():
        is_up_to_date = False
        while not is_up_to_date:
            page = found.read({"offset": offset})
            _show(page)
            is_up_to_date = page.is_up_to_date
            assert is_up_to_date or page.next_offset != offset, "a page moves its offset"
            offset = page.next_offset
        if shows_offset:
            note(f"next offset: {offset}")


@command.command("follow")
@click.argument("stream")
@click.option(
    "--from",
    "offset",
    default=START,
    metavar="OFFSET",
    help="Default: the beginning; now: only new messages.",
)
@click.option(
    "--live",
    type=click.Choice(["auto", "sse", "long-poll"]),
    default="auto",
    show_default=True,
    help="How new messages arrive; auto: events for JSON, long-polling for bytes.",
)
@server_options
def follow(stream: str, offset: str, live: Live, client: ServerConnection) -> None:
    """Print what STREAM holds and what arrives, until it is closed or Ctrl-C.

    The command reconnects after a broken connection; it misses nothing and prints nothing twice.
    """
    with StreamClient(client, stream) as found, stopped_by_reader():
        for page in StreamFollower(found, offset, live).pages():
            _show(page)


@command.command("close")
@click.argument("stream")
@server_options
def close(stream: str, client: ServerConnection) -> None:
    """Close STREAM: it keeps its content and accepts no more appends."""
    with StreamClient(client, stream) as found:
        found.ask("POST", {"Stream-Closed": "true"})


@command.command("rm")
@click.argument("stream")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@server_options
def rm(stream: str, yes: bool, client: ServerConnection) -> None:
    """Remove STREAM and all its content for good."""
    confirm(f"Remove {stream} and everything in it?", yes=yes)
    with StreamClient(client, stream) as found:
        found.ask("DELETE")
