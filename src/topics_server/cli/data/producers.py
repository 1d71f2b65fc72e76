"""One append with producer headers, retried until its result is known.

Used by `append`. The request for the producer's position stores nothing: it has a seq that no
producer reaches, and the server's refusal contains the next seq. Headers and verdicts are those of
the producers of `topics_server.client`, which programs with many appends should use.
"""

from __future__ import annotations

import threading
from typing import Final, NamedTuple

import click

from topics_server.cli.connection import (
    Answer,
    Failure,
    ServerConnection,
    ServerUnreachable,
    topic_path,
)
from topics_server.cli.output import note
from topics_server.client.errors import BadAnswer
from topics_server.client.producing.targets import (
    JSON,
    NUMBER_MAX,
    PRODUCER_CHARS_MAX,
    Accepted,
    Beaten,
    Repeated,
    StampGap,
    Target,
)

TRIES: Final = 10
PAUSE_S: Final = 0.5


class _Request(NamedTuple):
    """The parts of a request that are the same in every try: all but epoch and seq."""

    client: ServerConnection
    target: Target
    body: bytes
    producer: str


def append_as(
    client: ServerConnection,
    topic: str,
    body: bytes,
    producer: str,
    epoch: int | None,
    seq: int | None,
) -> bytes:
    """Append and return the answer's body with `producer_epoch` and `producer_seq` added.

    A repeat gives `{"repeated":true,…}`; if another process wrote it, raise `Failure`.
    """
    if not 0 < len(producer) <= PRODUCER_CHARS_MAX or not producer.isprintable():
        raise click.UsageError(
            f"a producer's id must have 1 to {PRODUCER_CHARS_MAX} printable characters"
        )
    if seq is not None and epoch is None:
        raise click.UsageError("--seq needs --epoch")
    is_named = seq is not None
    target = Target(url=client.url, path=topic_path(topic), content_type=JSON, is_topic=True)
    request = _Request(client, target, body, producer)
    if epoch is None or seq is None:
        epoch, seq = _place(request, epoch)
    answer, is_doubtful = _ask(request, epoch, seq)
    stamp = f'"producer_epoch":{epoch},"producer_seq":{seq}}}'.encode()
    if answer.status == 204:
        if not (is_doubtful or is_named):
            raise Failure(
                f"producer_fenced: seq {seq} of epoch {epoch} was used by another process meanwhile"
            )
        return b'{"repeated":true,' + stamp
    if answer.status >= 300:
        raise answer.refusal
    return answer.body.rstrip().removesuffix(b"}") + b"," + stamp


def _place(request: _Request, epoch: int | None) -> tuple[int, int]:
    """The epoch to write in, and the next seq in it."""
    answer, _ = _ask(request, epoch or 0, NUMBER_MAX)
    match request.target.verdict(answer.status, answer.headers, answer.body):
        case StampGap(expected=expected):
            if epoch is not None:
                return epoch, expected
            return (1 if expected else 0), 0
        case Beaten(epoch=current) if epoch is None:
            return current + 1, 0
        case Accepted() | Repeated() | BadAnswer():
            raise Failure("bad_answer: the server does not support producers")
        case _:
            pass
    if answer.status == 400 and epoch is not None:
        # later than the server's epoch; if there is another reason, the append's answer reports it
        return epoch, 0
    raise answer.refusal


def _ask(request: _Request, epoch: int, seq: int) -> tuple[Answer, bool]:
    """The first answer that is not a temporary failure, and whether an earlier answer was lost."""
    more = {
        name.decode(): value for name, value in request.target.headers(request.producer, epoch, seq)
    }
    is_doubtful = False
    for left in reversed(range(TRIES)):
        try:
            answer = request.client.ask("POST", request.target.path, request.body, more)
        except ServerUnreachable as error:
            # If no server answers the first try, fail at once, like every other verb.
            if not left or not (error.sent or is_doubtful):
                raise
            is_doubtful = True
            note(f"{error.message}; trying again")
        else:
            if not left or (answer.status < 500 and answer.status != 429):
                return answer, is_doubtful
            is_doubtful = is_doubtful or answer.status >= 500
        threading.Event().wait(PAUSE_S)
    raise AssertionError("the last try returns or raises")
