"""Reads lines of a plain or gzip file in bounded memory.

Decides where batches end. For a file, the ends depend only on the file and the two sizes, never on
where reading began, so a resumed load sends the same batches under the same idempotency keys. For a
pipe or a terminal, a batch also ends when no bytes arrive for `IDLE_S`. Blank lines are skipped and
not counted; line numbers begin at 1.
"""

from __future__ import annotations

import gzip
import io
import select
import stat
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from topics_server.cli.connection import Failure
from topics_server.values.limits import FRAME_BYTES_MAX, MIB

STANDARD_INPUT: Final = "-"
# If no bytes arrive for this long, the lines read so far are sent before the batch is full.
IDLE_S: Final = 0.2
_BLOCK_BYTES: Final = MIB
_GZIP_MAGIC: Final = b"\x1f\x8b"
_BOM: Final = b"\xef\xbb\xbf"
_HEAD_BYTES: Final = max(len(_GZIP_MAGIC), len(_BOM))


class LineBatch(msgspec.Struct, gc=False):
    """Consecutive lines without their line ends; `position`: input bytes read so far."""

    first_line: int
    lines: list[bytes]
    position: int

    @property
    def last_line(self) -> int:
        """Number of the batch's last line."""
        return self.first_line + len(self.lines) - 1


class LineFile:
    """A file that can be read from its start repeatedly, or standard input, which can be read
    once.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.is_rewindable = path != STANDARD_INPUT
        self.total_bytes: int | None = None
        if self.is_rewindable:
            try:
                found = Path(path).stat()
            except OSError as error:
                raise Failure(f"{path}: {error.strerror}") from None
            # A pipe or a device can be read only once, like standard input.
            self.is_rewindable = stat.S_ISREG(found.st_mode)
            self.total_bytes = found.st_size if self.is_rewindable else None

    def batches(self, max_records: int, max_bytes: int) -> Iterator[LineBatch]:
        """Yield all lines, at most `max_records` and (beyond one line) `max_bytes` a batch."""
        assert max_records > 0
        assert max_bytes > 0
        try:
            with self._open() as raw:
                # Only a stream may be slow; the next bytes of a file are always ready.
                is_idle = _never_idle if self.is_rewindable else raw.is_idle
                stream = _inflated(raw)
                yield from _batches(raw.tell_position, stream, max_records, max_bytes, is_idle)
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise Failure(f"{self.path}: the gzip data are damaged: {error}") from None
        except OSError as error:
            raise Failure(f"{self.path}: {error.strerror or error}") from None

    def _open(self) -> _Counted:
        if self.path == STANDARD_INPUT:
            return _Counted(_standard_input(), owned=False)
        return _Counted(open(self.path, "rb"), owned=True)


def _standard_input() -> BinaryIO:
    """Open standard input without a buffer.

    A thread that waits inside a buffered reader holds the reader's lock, and Python aborts if it
    cannot take that lock when the process ends.
    """
    buffered = sys.stdin.buffer
    try:
        return open(buffered.fileno(), "rb", buffering=0, closefd=False)
    except (OSError, ValueError):
        return buffered  # no file descriptor


class _Counted(io.RawIOBase):
    """A stream that counts the bytes taken from it.

    `read` first returns the bytes that were peeked.
    """

    def __init__(self, stream: BinaryIO, *, owned: bool) -> None:
        self._stream = stream
        self._owned = owned
        self.head = _head_of(stream)
        self._unread = self.head
        self.position = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        """Return the peeked bytes first, then bytes of the stream."""
        if size < 0:
            data, self._unread = self._unread + self._stream.read(), b""
        elif self._unread:
            # Read no more: the next byte may arrive much later.
            data, self._unread = self._unread[:size], self._unread[size:]
        else:
            # read1 returns the bytes that a pipe holds now and does not wait for a full block.
            read1 = getattr(self._stream, "read1", self._stream.read)
            data = read1(size)
        self.position += len(data)
        return data

    def tell_position(self) -> int:
        """The number of bytes taken so far."""
        return self.position

    def is_idle(self) -> bool:
        """Whether no bytes arrive for `IDLE_S`. The end of the stream does not count as idle."""
        if self._unread:
            return False
        try:
            ready, _, _ = select.select([self._stream], [], [], IDLE_S)
        except (OSError, ValueError):
            return False  # no descriptor to wait for
        return not ready

    def close(self) -> None:
        if self._owned:
            self._stream.close()
        super().close()


def _head_of(stream: BinaryIO) -> bytes:
    """The first bytes: enough to recognise gzip and a byte order mark, and no more.

    A pipe may hold a line of one byte for a long time; that line must not wait for the next.
    """
    read1 = getattr(stream, "read1", stream.read)
    head = b""
    while len(head) < _HEAD_BYTES and (not head or head[0] in (_GZIP_MAGIC[0], _BOM[0])):
        more = read1(_HEAD_BYTES - len(head))
        if not more:
            break
        head += more
    return head


def _inflated(raw: _Counted) -> BinaryIO | _Counted:
    if not raw.head.startswith(_GZIP_MAGIC):
        return raw
    return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]


def _blocks(stream: BinaryIO | _Counted) -> Iterator[bytes]:
    while block := stream.read(_BLOCK_BYTES):
        yield block


def _lines(stream: BinaryIO | _Counted) -> Iterator[list[bytes]]:
    """Yield lists of whole lines as they become complete."""
    rest: list[bytes] = []
    rest_bytes = 0
    is_start = True
    for block in _blocks(stream):
        if is_start:
            is_start = False
            block = block.removeprefix(_BOM)
        if b"\n" not in block:
            rest.append(block)
            rest_bytes += len(block)
            if rest_bytes > FRAME_BYTES_MAX:
                raise Failure(f"no end of line within {FRAME_BYTES_MAX // MIB} MiB")
            continue
        lines = (b"".join(rest) + block).split(b"\n") if rest else block.split(b"\n")
        last = lines.pop()
        rest, rest_bytes = ([last], len(last)) if last else ([], 0)
        yield lines
    if rest:
        yield [b"".join(rest)]


def _never_idle() -> bool:
    return False


def _batches(
    position: Callable[[], int],
    stream: BinaryIO | _Counted,
    max_records: int,
    max_bytes: int,
    is_idle: Callable[[], bool],
) -> Iterator[LineBatch]:
    first_line = 1
    batch: list[bytes] = []
    size = 0
    for lines in _lines(stream):
        for line in lines:
            if not line or line.isspace():
                continue
            if batch and (size + len(line) > max_bytes or len(batch) == max_records):
                yield LineBatch(first_line, batch, position())
                first_line += len(batch)
                batch, size = [], 0
            batch.append(line)
            size += len(line)
        if batch and is_idle():
            yield LineBatch(first_line, batch, position())
            first_line += len(batch)
            batch, size = [], 0
    if batch:
        yield LineBatch(first_line, batch, position())
