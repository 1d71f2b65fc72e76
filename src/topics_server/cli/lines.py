"""Reading a file of lines in bounded memory: plain or gzip, a file or standard input.

Owns where batches end. That depends on the file and the two sizes only, never on where reading
began, so a load that goes on later sends the same batches under the same idempotency keys. Blank
lines are skipped and not counted; lines count from 1.
"""

from __future__ import annotations

import gzip
import io
import stat
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from topics_server.cli.client import Failure
from topics_server.limits import FRAME_BYTES_MAX, MIB

STANDARD_INPUT: Final = "-"
_BLOCK_BYTES: Final = MIB
_GZIP_MAGIC: Final = b"\x1f\x8b"
_BOM: Final = b"\xef\xbb\xbf"
_HEAD_BYTES: Final = max(len(_GZIP_MAGIC), len(_BOM))


class Batch(msgspec.Struct, gc=False):
    """Consecutive lines without their line ends; `position`: input bytes read so far."""

    first_line: int
    lines: list[bytes]
    position: int

    @property
    def last_line(self) -> int:
        """Number of the batch's last line."""
        return self.first_line + len(self.lines) - 1


class LineFile:
    """A file that can be read from its start as often as wanted, or standard input, once."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.is_rewindable = path != STANDARD_INPUT
        self.total_bytes: int | None = None
        if self.is_rewindable:
            try:
                found = Path(path).stat()
            except OSError as error:
                raise Failure(f"{path}: {error.strerror}") from None
            # A pipe or a device is read once, like standard input.
            self.is_rewindable = stat.S_ISREG(found.st_mode)
            self.total_bytes = found.st_size if self.is_rewindable else None

    def batches(self, max_records: int, max_bytes: int) -> Iterator[Batch]:
        """All lines, at most `max_records` and (beyond one line) `max_bytes` a batch."""
        assert max_records > 0
        assert max_bytes > 0
        try:
            with self._open() as raw:
                yield from _batches(raw, _inflated(raw), max_records, max_bytes)
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise Failure(f"{self.path}: the gzip data are damaged: {error}") from None
        except OSError as error:
            raise Failure(f"{self.path}: {error.strerror or error}") from None

    def _open(self) -> _Counted:
        if self.path == STANDARD_INPUT:
            return _Counted(sys.stdin.buffer, owned=False)
        return _Counted(open(self.path, "rb"), owned=True)


class _Counted(io.RawIOBase):
    """A stream that knows how many bytes were taken from it and gives back those peeked at."""

    def __init__(self, stream: BinaryIO, *, owned: bool) -> None:
        self._stream = stream
        self._owned = owned
        self.head = stream.read(_HEAD_BYTES)
        self._unread = self.head
        self.position = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        """What was peeked at first, then the stream."""
        if size < 0:
            data, self._unread = self._unread + self._stream.read(), b""
        elif size <= len(self._unread):
            data, self._unread = self._unread[:size], self._unread[size:]
        else:
            # read1: what a pipe holds now is enough, waiting for a full block is not needed.
            read1 = getattr(self._stream, "read1", self._stream.read)
            data, self._unread = self._unread + read1(size - len(self._unread)), b""
        self.position += len(data)
        return data

    def close(self) -> None:
        if self._owned:
            self._stream.close()
        super().close()


def _inflated(raw: _Counted) -> BinaryIO | _Counted:
    if not raw.head.startswith(_GZIP_MAGIC):
        return raw
    return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]


def _blocks(stream: BinaryIO | _Counted) -> Iterator[bytes]:
    while block := stream.read(_BLOCK_BYTES):
        yield block


def _lines(stream: BinaryIO | _Counted) -> Iterator[list[bytes]]:
    """Lists of whole lines, as they become complete."""
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


def _batches(
    raw: _Counted, stream: BinaryIO | _Counted, max_records: int, max_bytes: int
) -> Iterator[Batch]:
    first_line = 1
    batch: list[bytes] = []
    size = 0
    for lines in _lines(stream):
        for line in lines:
            if not line or line.isspace():
                continue
            if batch and (size + len(line) > max_bytes or len(batch) == max_records):
                yield Batch(first_line, batch, raw.position)
                first_line += len(batch)
                batch, size = [], 0
            batch.append(line)
            size += len(line)
    if batch:
        yield Batch(first_line, batch, raw.position)
