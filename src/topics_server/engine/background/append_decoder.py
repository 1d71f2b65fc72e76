"""The helper process that checks and decodes large appends.

The decoder holds the interpreter's lock for as long as a body takes, and 60 MB take up to a second.
`DecoderProcess` keeps one child (`python -m topics_server.engine.background.append_decoder`),
started at first use; the calling thread only moves bytes through pipes and puts the columns
together. The child ends when its standard input does, so a server that is killed leaves none
behind. A child that dies or says nothing for too long is replaced and asked once more; then the
append is refused, never decoded in the server. What comes back are columns, their payloads block by
block as the log keeps them, so that whoever takes them over copies none. Frames, little-endian:

    request:  body bytes u64 | grammar u32 | the five bounds of `AppendLimits`, u32 each | body
    response: length u64 | msgpack: `_Columns` or `_Refusal` | of `_Columns`, the payloads

Called by `large_appends`, from one thread.
"""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
from array import array
from collections.abc import Iterator
from itertools import chain
from typing import IO, BinaryIO, Final, cast

import msgspec

from topics_server.engine.topic.admission import AppendLimits, check_limits
from topics_server.runtime.helper_process import (
    end_helper,
    killed_after,
    read_exactly,
    start_helper,
)
from topics_server.values.appends import DecodedAppend, Delay, decode_append, of_columns
from topics_server.values.blocks import Payloads, ends_in_blocks
from topics_server.values.errors import Code, TopicsError
from topics_server.values.limits import FRAME_BYTES_MAX
from topics_server.values.record_codecs import MESSAGES_GRAMMAR, decode_messages

_REQUEST: Final = struct.Struct("<Q6I")
_LENGTH: Final = struct.Struct("<Q")
_NICENESS: Final = 10
# For the longest body there may be, on a machine that is busy.
_ANSWER_WAIT_S: Final = 120.0

assert FRAME_BYTES_MAX < 2**32, "offsets are u32"


class _Columns(msgspec.Struct, array_like=True, tag=True):
    """An append's records but for their payloads, and what its call says beside.

    `ends`: for each block the column `Block.ends`; the payloads are as long as its last one.
    `nodes` is empty where no record has one but the batch's.
    """

    ends: list[bytes]
    tags: list[str | None]
    nodes: list[str | None]
    batch_node: str | None
    idempotency_key: str | None
    create: bool | None
    config: bytes | None
    disable_backpressure: bool
    delays: list[Delay]


class _Refusal(msgspec.Struct, array_like=True, tag=True):
    """Why a body is refused."""

    code: Code
    message: str
    detail: dict[str, object]


class DecoderError(Exception):
    """There is no child that would answer."""


_encode: Final = msgspec.msgpack.Encoder().encode
_ANSWER: Final[msgspec.msgpack.Decoder[_Columns | _Refusal]] = msgspec.msgpack.Decoder(
    _Columns | _Refusal
)


# -- the server's side -----------------------------------------------------------------------


class DecoderProcess:
    """Decodes in one child process; not for several threads at once."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self.started_count = 0

    @property
    def child_pid(self) -> int | None:
        """Process id of the child, while there is one."""
        return self._child.pid if self._child else None

    def decode(self, body: bytes, grammar: int, limits: AppendLimits) -> DecodedAppend:
        """*Blocking.* The records of a body, within the limits, with their payloads in blocks.

        Raises `TopicsError` for what is refused, `DecoderError` if two children died of it.
        """
        try:
            answer = self._ask(body, grammar, limits)
        except (OSError, EOFError):
            self.close()
            try:
                answer = self._ask(body, grammar, limits)
            except (OSError, EOFError) as error:
                self.close()
                raise DecoderError(str(error)) from error
        if isinstance(answer, _Refusal):
            raise TopicsError(answer.code, answer.message, answer.detail)
        return answer

    def close(self) -> None:
        """End the child; a later call starts another."""
        child, self._child = self._child, None
        if child is not None:
            end_helper(child)

    def _ask(self, body: bytes, grammar: int, limits: AppendLimits) -> DecodedAppend | _Refusal:
        if self._child is None:
            self._child = start_helper("topics_server.engine.background.append_decoder")
            self.started_count += 1
        child = self._child
        assert child.stdin is not None
        assert child.stdout is not None
        bounds = msgspec.structs.astuple(limits)
        # Also a child that stops in the middle, of the body or of its answer.
        with killed_after(child, _ANSWER_WAIT_S):
            child.stdin.write(_REQUEST.pack(len(body), grammar, *bounds))
            child.stdin.write(body)
            child.stdin.flush()
            (length,) = _LENGTH.unpack(read_exactly(child.stdout, _LENGTH.size))
            answer = _ANSWER.decode(read_exactly(child.stdout, length))
            if isinstance(answer, _Refusal):
                return answer
            parts = [_payloads(child.stdout, ends) for ends in answer.ends]
        return _assembled(answer, parts, grammar)


def _payloads(pipe: IO[bytes], encoded: bytes) -> Payloads:
    """The payloads of the next block. The lock is let go while they come."""
    ends = array("I")
    ends.frombytes(encoded)
    return Payloads(ends, read_exactly(pipe, ends[-1]), bytes(len(ends) // 2))


def _assembled(columns: _Columns, parts: list[Payloads], grammar: int) -> DecodedAppend:
    datas: list[bytes] = []
    metas: list[bytes] = []
    for payloads in parts:
        # Views do all that is asked of the data of a decoded append.
        view, ends = memoryview(payloads.body), payloads.ends
        splits, stops = ends[::2], ends[1::2]
        starts = [0, *stops[:-1]]
        spans = zip(starts, splits, strict=True)
        datas += cast("list[bytes]", [view[start:end] for start, end in spans])
        metas += [
            payloads.body[start:end] if start < end else b""
            for start, end in zip(splits, stops, strict=True)
        ]
    decoded = of_columns(
        datas,
        metas,
        columns.tags,
        columns.nodes or [columns.batch_node] * len(datas),
        delays=tuple(columns.delays),
    )
    return msgspec.structs.replace(
        decoded,
        has_nodes=bool(columns.nodes),
        batch_node=columns.batch_node,
        idempotency_key=columns.idempotency_key,
        create=columns.create,
        config=columns.config,
        disable_backpressure=columns.disable_backpressure,
        form=grammar if grammar == MESSAGES_GRAMMAR else 0,
        payloads=tuple(parts),
    )


# -- the child's side ------------------------------------------------------------------------


def decoded_of(body: bytes, grammar: int, limits: AppendLimits) -> DecodedAppend:
    """The records of a body, within the limits. Raises `TopicsError`."""
    if grammar == MESSAGES_GRAMMAR:
        decoded = decode_messages(body, limits.max_batch_records)
    else:
        decoded = decode_append(body, grammar, limits.max_batch_records)
    check_limits(decoded, limits)
    return decoded


def _answer(body: bytes, grammar: int, limits: AppendLimits) -> Iterator[bytes]:
    """The pieces of a response; no more than one block is put together at a time."""
    try:
        decoded = decoded_of(body, grammar, limits)
    except TopicsError as error:
        refusal = _encode(_Refusal(error.code, error.message, error.detail))
        yield _LENGTH.pack(len(refusal)) + refusal
        return
    metas = decoded.metas if decoded.has_metas else None
    columns = _encode(
        _Columns(
            ends=[ends.tobytes() for ends in ends_in_blocks(decoded.datas, metas)],
            tags=decoded.tags,
            nodes=decoded.nodes if decoded.has_nodes else [],
            batch_node=decoded.batch_node,
            idempotency_key=decoded.idempotency_key,
            create=decoded.create,
            config=decoded.config,
            disable_backpressure=decoded.disable_backpressure,
            delays=list(decoded.delays),
        )
    )
    yield _LENGTH.pack(len(columns)) + columns
    yield from (
        decoded.datas
        if metas is None
        else chain.from_iterable(zip(decoded.datas, metas, strict=True))
    )


def serve(requests: BinaryIO, responses: BinaryIO) -> None:
    """The child's loop: one response a request, until the requests end."""
    while header := requests.read(_REQUEST.size):
        if len(header) < _REQUEST.size:
            return
        length, grammar, *bounds = _REQUEST.unpack(header)
        body = requests.read(length)
        if len(body) != length:
            return  # the server is gone
        for piece in _answer(body, grammar, AppendLimits(*bounds)):
            responses.write(piece)
        responses.flush()
        # Nothing of a body is kept while the child waits for the next.
        del body, piece


def main() -> None:
    """Run as the child: after the server in priority, deaf to the terminal's interrupt."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_NICENESS)
    try:
        serve(sys.stdin.buffer, sys.stdout.buffer)
    except BrokenPipeError:
        # The server is gone; leave without flushing into its closed pipe.
        os._exit(0)


if __name__ == "__main__":
    main()
