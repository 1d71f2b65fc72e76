"""The helper process that packs segments.

`ProcessPacker` keeps one child (`python -m topics_server.wal.segments.packing_process`), started at
first use; its parent only moves bytes through pipes. The child ends when its standard input ends,
so no child outlives a killed server. If the child cannot be started or dies, the calling thread
packs the run, and the next run tries a new child. Frames, little-endian:

    request:  topic id u64 | segment id u64 | dead bytes u32 | blocks u32 | dead
              | (length u32 | encoded block) a block
    response: data bytes u64 | idx bytes u64 | data | idx
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import subprocess
import threading
from collections.abc import Sequence
from io import BufferedReader, BufferedWriter, FileIO
from typing import BinaryIO, Final, Protocol

from topics_server.runtime.helper_process import (
    BUFFER_BYTES,
    end_helper,
    read_exactly,
    start_helper,
)
from topics_server.values.blocks import Block, decode_block, encode_block
from topics_server.values.limits import MIB
from topics_server.wal.segments.packing import pack

_REQUEST: Final = struct.Struct("<QQII")
_LENGTH: Final = struct.Struct("<I")
_RESPONSE: Final = struct.Struct("<QQ")
# Blocks that are written at once: after each write the thread waits for the interpreter's lock.
_BLOCKS_TOGETHER: Final = 64
_NICENESS: Final = 10
# mallopt(3) of glibc. By default freed memory is returned to the system between two runs, and each
# run of 13 MB must fetch 15,000 of its 20,000 pages again.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_KEPT_BYTES_MAX: Final = 128 * MIB
_KEPT_PIECE_BYTES_MAX: Final = 32 * MIB


class Packer(Protocol):
    """Turns a run into `(.data, .idx)`; may be called from any thread."""

    def pack(
        self, topic_id: int, segment_id: int, blocks: Sequence[Block], dead: bytes
    ) -> tuple[bytes, bytes]:
        """*Blocking.* See `packing.pack`."""
        ...

    def close(self) -> None:
        """Release the child; idempotent."""
        ...


class InlinePacker:
    """Packs in the calling thread, lock held: for tests, and if there is no child."""

    def pack(
        self, topic_id: int, segment_id: int, blocks: Sequence[Block], dead: bytes
    ) -> tuple[bytes, bytes]:
        """See `Packer.pack`."""
        return pack(topic_id, segment_id, blocks, dead)

    def close(self) -> None:
        """Nothing to release."""


class ProcessPacker:
    """Packs in one child process, one run at a time; other threads wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self.packed_inline_count = 0  # runs packed without the child

    @property
    def child_pid(self) -> int | None:
        """Process id of the child, if there is one."""
        return self._child.pid if self._child else None

    def pack(
        self, topic_id: int, segment_id: int, blocks: Sequence[Block], dead: bytes
    ) -> tuple[bytes, bytes]:
        """See `Packer.pack`."""
        with self._lock:
            try:
                return self._ask(topic_id, segment_id, blocks, dead)
            except (OSError, EOFError, ValueError):
                # There is no child, or it died during the run: its pipes are useless, but the run
                # is not lost.
                self._end()
        self.packed_inline_count += 1
        return pack(topic_id, segment_id, blocks, dead)

    def close(self) -> None:
        """End the child; a later `pack` starts another."""
        with self._lock:
            self._end()

    def _ask(
        self, topic_id: int, segment_id: int, blocks: Sequence[Block], dead: bytes
    ) -> tuple[bytes, bytes]:
        child = self._child = self._child or start_helper(
            "topics_server.wal.segments.packing_process"
        )
        assert child.stdin is not None
        assert child.stdout is not None
        pieces = [_REQUEST.pack(topic_id, segment_id, len(dead), len(blocks)), dead]
        for number, block in enumerate(blocks, 1):
            encoded = encode_block(block)
            pieces += (_LENGTH.pack(len(encoded)), encoded)
            # The child decodes these blocks while the next ones are encoded.
            if number % _BLOCKS_TOGETHER == 0:
                child.stdin.write(b"".join(pieces))
                pieces.clear()
        child.stdin.write(b"".join(pieces))
        child.stdin.flush()
        data_bytes, idx_bytes = _RESPONSE.unpack(read_exactly(child.stdout, _RESPONSE.size))
        return read_exactly(child.stdout, data_bytes), read_exactly(child.stdout, idx_bytes)

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            end_helper(child)


def serve(requests: BinaryIO, responses: BinaryIO) -> None:
    """The child's loop: one response per request, until the requests end."""
    while header := requests.read(_REQUEST.size):
        if len(header) < _REQUEST.size:
            return
        topic_id, segment_id, dead_bytes, block_count = _REQUEST.unpack(header)
        try:
            dead = read_exactly(requests, dead_bytes)
            blocks = []
            for _ in range(block_count):
                (length,) = _LENGTH.unpack(read_exactly(requests, _LENGTH.size))
                blocks.append(decode_block(read_exactly(requests, length)))
        except EOFError:
            return  # the server is gone
        data, idx = pack(topic_id, segment_id, blocks, dead)
        for piece in (_RESPONSE.pack(len(data), len(idx)), data, idx):
            responses.write(piece)
        responses.flush()


def keep_memory() -> bool:
    """Keep freed memory for the next run; returns whether the C library supports it."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    wanted = ((_M_MMAP_THRESHOLD, _KEPT_PIECE_BYTES_MAX), (_M_TRIM_THRESHOLD, _KEPT_BYTES_MAX))
    taken = [mallopt(name, value) == 1 for name, value in wanted]
    return all(taken)


def main() -> None:
    """Run as the child: with lower priority than the server, ignoring the terminal's interrupt."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_NICENESS)
    keep_memory()
    try:
        serve(BufferedReader(FileIO(0), BUFFER_BYTES), BufferedWriter(FileIO(1, "w"), BUFFER_BYTES))
    except BrokenPipeError:
        # The server is gone; exit without flushing into its closed pipe.
        os._exit(0)


if __name__ == "__main__":
    main()
