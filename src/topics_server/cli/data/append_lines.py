"""`topics append TOPIC -`: appends every line of standard input as it arrives.

Lines that have arrived together are sent in one request. Its idempotency key makes it safe to
repeat the request after a broken connection. Unlike `load`, this verb does not compare lines with
the topic: each run appends all its lines.
"""

from __future__ import annotations

from typing import Final

import msgspec

from topics_server.cli.connection import (
    CallRefused,
    Failure,
    ServerConnection,
    ServerUnreachable,
    topic_path,
)
from topics_server.cli.data.cutting import BadLine, Cut, Cutter, Shape
from topics_server.cli.data.lines import STANDARD_INPUT, LineBatch, LineFile
from topics_server.cli.output import note
from topics_server.cli.retries import is_lost, nothing, tried
from topics_server.runtime.clock import random_id
from topics_server.values.limits import MIB

BATCH_RECORDS: Final = 500
BATCH_BYTES: Final = MIB
AGAIN_MS: Final = 2000


class Template(msgspec.Struct, frozen=True):
    """The fields that every record gets, as JSON text, and whether to create a missing topic."""

    tag: bytes | None
    node: bytes | None
    meta: bytes | None
    create: bool | None


class LinesSummary(msgspec.Struct):
    """The result of an append; the seqs are 0 if nothing was appended."""

    topic: str
    lines: int = 0
    first_seq: int = 0
    last_seq: int = 0


class _Stored(msgspec.Struct):
    first_seq: int
    last_seq: int


_STORED: Final = msgspec.json.Decoder(_Stored)


def append_lines(client: ServerConnection, topic: str, template: Template) -> LinesSummary:
    """Append every line that is not blank.

    Raises `Failure`, whose message says which lines are appended.
    """
    cutter = Cutter(Shape())
    done = LinesSummary(topic)
    path = topic_path(topic, "?return_seqs=false")
    try:
        for batch in LineFile(STANDARD_INPUT).batches(BATCH_RECORDS, BATCH_BYTES):
            _append(client, path, batch, cutter, template, done)
    except BadLine as error:
        raise Failure(f"{error}; {_so_far(done)}") from None
    except CallRefused as error:
        raise Failure(f"{error.message}; {_so_far(done)}") from None
    except KeyboardInterrupt:
        note(_so_far(done))
        raise
    return done


def _append(
    client: ServerConnection,
    path: str,
    batch: LineBatch,
    cutter: Cutter,
    template: Template,
    done: LinesSummary,
) -> None:
    """Append one batch; if a line is bad, append the lines before it."""
    bad: BadLine | None = None
    lines = batch.lines
    try:
        cuts = cutter.cut(lines, batch.first_line)
    except BadLine as error:
        bad = error
        cuts = cutter.cut(lines[: error.line - batch.first_line], batch.first_line)
    _send_all(client, path, cuts, template, batch, done)
    if bad is not None:
        raise bad


def _send_all(
    client: ServerConnection,
    path: str,
    cuts: list[Cut],
    template: Template,
    batch: LineBatch,
    done: LinesSummary,
) -> None:
    """Send all records in one request, or in several if the server accepts fewer records."""
    size = len(cuts)
    while cuts:
        try:
            stored = _send(client, path, _body(cuts[:size], template), batch, done)
        except CallRefused as refused:
            if refused.most_records is None or refused.most_records >= size:
                raise
            size = refused.most_records
            continue
        done.lines += len(cuts[:size])
        done.first_seq = done.first_seq or stored.first_seq
        done.last_seq = stored.last_seq
        cuts = cuts[size:]


def _body(cuts: list[Cut], template: Template) -> bytes:
    records = [Cut(cut.data, template.tag, template.node, template.meta).render() for cut in cuts]
    head: dict[str, object] = {"idempotency_key": random_id()}
    if template.create is not None:
        head["create"] = template.create
    return msgspec.json.encode(head)[:-1] + b',"records":[' + b",".join(records) + b"]}"


def _send(
    client: ServerConnection, path: str, body: bytes, batch: LineBatch, done: LinesSummary
) -> _Stored:
    def attempt() -> _Stored:
        return _STORED.decode(client.call("POST", path, body))

    try:
        return tried(attempt, is_lost, AGAIN_MS, nothing)
    except ServerUnreachable as error:
        doubt = f"; lines {batch.first_line} to {batch.last_line} may be" if error.sent else ""
        message = f"{error.message}; {_so_far(done)}{doubt}"
        raise ServerUnreachable(message, sent=error.sent) from None


def _so_far(done: LinesSummary) -> str:
    return f"{done.lines} lines were appended" if done.lines else "nothing was appended"
