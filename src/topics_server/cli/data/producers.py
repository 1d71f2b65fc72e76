"""One append with producer headers, retried until its result is known.

Used by `append`. Asking stores nothing: the seq is one that no producer reaches, so that the
refusal tells what is next. `topics_server.client` has what a program that goes on writing needs.
"""

from __future__ import annotations

import threading
from typing import Final

import click
import msgspec

from topics_server.cli.connection import Answer, Client, Failure, ServerUnreachable
from topics_server.cli.output import note

ID_CHARS_MAX: Final = 256
NUMBER_MAX: Final = 2**53 - 1
TRIES: Final = 10
PAUSE_S: Final = 0.5


def append_as(
    client: Client, path: str, body: bytes, producer: str, epoch: int | None, seq: int | None
) -> bytes:
    """The answer's body, with `producer_epoch` and `producer_seq` added.

    A repeat is `{"repeated":true,…}`; one that is not ours is a `Failure`.
    """
    if not 0 < len(producer) <= ID_CHARS_MAX or not producer.isprintable():
        raise click.UsageError(f"a producer's id has 1 to {ID_CHARS_MAX} printable characters")
    if seq is not None and epoch is None:
        raise click.UsageError("--seq needs --epoch")
    is_named = seq is not None
    if epoch is None or seq is None:
        epoch, seq = _place(client, path, body, producer, epoch)
    answer, is_doubtful = _ask(client, path, body, producer, epoch, seq)
    told = f'"producer_epoch":{epoch},"producer_seq":{seq}}}'.encode()
    if answer.status == 204:
        if not (is_doubtful or is_named):
            raise Failure(
                f"producer_fenced: seq {seq} of epoch {epoch} was used by another process meanwhile"
            )
        return b'{"repeated":true,' + told
    if answer.status >= 300:
        raise answer.refusal
    return answer.body.rstrip().removesuffix(b"}") + b"," + told


def _place(
    client: Client, path: str, body: bytes, producer: str, epoch: int | None
) -> tuple[int, int]:
    """The epoch to write in and its next seq."""
    answer, _ = _ask(client, path, body, producer, epoch or 0, NUMBER_MAX)
    expected = _number(answer, "producer-expected-seq")
    current = _number(answer, "producer-epoch")
    if answer.status == 409 and expected is not None:
        if epoch is not None:
            return epoch, expected
        return (1 if expected else 0), 0
    if answer.status == 403 and current is not None and epoch is None:
        return current + 1, 0
    if answer.status == 400 and epoch is not None:
        return epoch, 0  # later than the server's; if that is not why, the append is told so
    if answer.status < 300:
        raise Failure("bad_answer: the server knows no producers")
    raise answer.refusal


def _ask(
    client: Client, path: str, body: bytes, producer: str, epoch: int, seq: int
) -> tuple[Answer, bool]:
    """An answer that is no failure of the moment; also whether an earlier one was lost."""
    more = {
        "Producer-Id": producer.encode(),
        "Producer-Epoch": b"%d" % epoch,
        "Producer-Seq": b"%d" % seq,
    }
    is_doubtful = False
    for left in reversed(range(TRIES)):
        try:
            answer = client.ask("POST", path, body, more)
        except ServerUnreachable as error:
            # Nobody there at first is told at once, as by every other verb.
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


def _number(answer: Answer, name: str) -> int | None:
    try:
        return msgspec.json.decode(answer.headers.get(name, ""), type=int)
    except msgspec.DecodeError:
        return None
