"""The helper process that checks and decodes large appends.

Decoding holds the interpreter's lock for the whole body, and 60 MB take up to a second.
`DecoderProcess` keeps one child (`python -m topics_server.engine.background.append_decoder`),
started at first use; the calling thread only moves bytes through pipes and assembles the columns.
The child ends when its standard input ends, so a killed server leaves no child behind. A child that
dies or does not answer in time is replaced, and the new child gets the same request. If that fails
too, the append is refused; it is never decoded in the server. The answer consists of columns whose
payloads are already blocks of the log, so the caller copies nothing. Frames, little-endian:

    request:  body bytes u64 | grammar u32 | the five bounds of `AppendLimits`, u32 each | body
    response: length u64 | msgpack: `_Columns` or `_Refusal` | after `_Columns`, the payloads

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

from topics_server.runtime.helper_process import (
    end_helper,
    killed_after,
    read_exactly,
    start_helper,
)
from topics_server.values.appends import (
    AppendLimits,
    DecodedAppend,
    Delay,
    check_limits,
    decode_append,
    of_columns,
)
from topics_server.values.blocks import Payloads, ends_in_blocks
from topics_server.values.errors import Code, TopicsError
from topics_server.values.limits import FRAME_BYTES_MAX
from topics_server.values.model import SentCondition
from topics_server.values.record_codecs import MESSAGES_GRAMMAR, decode_messages

_REQUEST: Final = struct.Struct("<Q6I")
_LENGTH: Final = struct.Struct("<Q")
_NICENESS: Final = 10
# Long enough for the largest body on a busy machine.
_ANSWER_WAIT_S: Final = 120.0

assert FRAME_BYTES_MAX < 2**32, "offsets are u32"


class _Columns(msgspec.Struct, array_like=True, tag=True):
    """An append's records without their payloads, and the other fields of its call.

    `ends`: for each block the column `Block.ends`; its last value is the length of the payloads.
    `nodes` is empty if `batch_node` is the only node.
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
    condition: bytes | None = None
    idempotency: bytes | None = None


class _Refusal(msgspec.Struct, array_like=True, tag=True):
    """The reason why a body is refused."""

    code: Code
    message: str
    detail: dict[str, object]


class DecoderError(Exception):
    """No child process answers."""


_encode: Final = msgspec.msgpack.Encoder().encode
_encode_json: Final = msgspec.json.Encoder().encode
_ANSWER: Final[msgspec.msgpack.Decoder[_Columns | _Refusal]] = msgspec.msgpack.Decoder(
    _Columns | _Refusal
)


# -- the server's side -----------------------------------------------------------------------


class DecoderProcess:
    """Decodes in one child process; for one thread at a time."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self.started_count = 0

    @property
    def child_pid(self) -> int | None:
        """Process id of the child, if there is one."""
        return self._child.pid if self._child else None

    def decode(self, body: bytes, grammar: int, limits: AppendLimits) -> DecodedAppend:
        """*Blocking.* Decode a body's records, within the limits, with payloads in blocks.

        Raises `TopicsError` for a refused body, `DecoderError` if two children fail.
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
        # Also kills a child that stops in the middle of the body or of its answer.
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
    """Read the payloads of the next block; the interpreter's lock is released meanwhile."""
    ends = array("I")
    ends.frombytes(encoded)
    return Payloads(ends, read_exactly(pipe, ends[-1]), bytes(len(ends) // 2))


def _assembled(columns: _Columns, parts: list[Payloads], grammar: int) -> DecodedAppend:
    datas: list[bytes] = []
    metas: list[bytes] = []
    for payloads in parts:
        # Views support every operation that is applied to the data of a decoded append.
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
        condition=columns.condition,
        idempotency=columns.idempotency,
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


def _sent_if(decoded: DecodedAppend) -> bytes | None:
    sent = decoded.condition
    return _encode_json(sent) if isinstance(sent, SentCondition) else sent


def _answer(body: bytes, grammar: int, limits: AppendLimits) -> Iterator[bytes]:
    """The pieces of a response; at most one block is in memory at a time."""
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
            condition=_sent_if(decoded),
            idempotency=decoded.idempotency,
        )
    )
    yield _LENGTH.pack(len(columns)) + columns
    yield from (
        decoded.datas
        if metas is None
        else chain.from_iterable(zip(decoded.datas, metas, strict=True))
    )


def serve(requests: BinaryIO, responses: BinaryIO) -> None:
    """The child's loop: one response per request, until the requests end."""
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
        # Free the body while the child waits for the next request.
        del body, piece


def main() -> None:
    """Run as the child: with lower priority than the server, ignoring the terminal's interrupt."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_NICENESS)
    try:
        serve(sys.stdin.buffer, sys.stdout.buffer)
    except BrokenPipeError:
        # The server is gone; exit without flushing into its closed pipe.
        os._exit(0)


if __name__ == "__main__":
    main()
