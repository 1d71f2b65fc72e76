"""Makes sealed segments without a server, for benchmarks of their readers.

The server's own packer and manifest code make the bytes. Records are JSON of about 200 bytes with a
tag among 5,000 and a node among 50, ten milliseconds apart.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import msgspec

from topics_server.values.blocks import Block, make_block
from topics_server.values.model import TopicConfig
from topics_server.wal import layout
from topics_server.wal.directory import Directory
from topics_server.wal.format.manifest import HOT, Manifest, SegmentEntry, encode_manifest
from topics_server.wal.format.segment import decode_index
from topics_server.wal.fs import OsFs
from topics_server.wal.segments.packing import pack

TAGS: Final = 5_000
START_MS: Final = 1_767_225_600_000
STEP_MS: Final = 10
_BLOCK: Final = 256


@cache
def pads() -> list[bytes]:
    """The pads of payloads: hexadecimal digits, which compress to about half."""
    chance = random.Random(7)
    return [chance.randbytes(67).hex().encode() for _ in range(9973)]


def payload(seq: int) -> bytes:
    """A record's payload of about 200 bytes of JSON."""
    return b'{"user":"user-%d","kind":"k%d","amount":%d,"pad":"%b"}' % (
        seq * 7919 % TAGS,
        seq % 7,
        seq % 1000,
        pads()[seq * 31 % len(pads())],
    )


def blocks(first_seq: int, count: int) -> Iterator[Block]:
    """Yield records of consecutive seqs, a block at a time."""
    for begin in range(first_seq, first_seq + count, _BLOCK):
        seqs = range(begin, min(begin + _BLOCK, first_seq + count))
        datas = [payload(seq) for seq in seqs]
        times = array("q", [START_MS + STEP_MS * s for s in seqs])
        tags = [f"user-{s * 7919 % TAGS}" for s in seqs]
        nodes = [f"node-{s % 50}" for s in seqs]
        yield make_block(begin, times, datas, None, tags, nodes)


def make_sealed(folder: Path, records: int, per_segment: int, topic: str = "events") -> Path:
    """A data directory with one topic of `records` records, which is made once and then reused."""
    done = folder / f"made-{records}-{per_segment}"
    data_dir = folder / f"sealed-{records}-{per_segment}"
    if done.exists():
        return data_dir
    fs = OsFs()
    data_dir.mkdir(parents=True)
    directory = Directory.open(fs, str(data_dir), boot_id="benchmark", mode=0o700)
    directory.begin()
    directory.close()
    target = data_dir / layout.SEGMENTS / layout.topic_dir(1)
    target.mkdir(parents=True)
    entries = []
    for number, first in enumerate(range(1, records + 1, per_segment), 1):
        count = min(per_segment, records + 1 - first)
        data, idx = pack(1, number, list(blocks(first, count)), bytes(count))
        (target / layout.segment_data(number)).write_bytes(data)
        (target / layout.segment_idx(number)).write_bytes(idx)
        columns = decode_index(idx, verify=False)
        times = int(columns.rows["ts"][0]), int(columns.rows["ts"][-1])
        ends = first, first + count - 1
        sizes = len(data), len(idx), columns.data_checksum
        entries.append(SegmentEntry(number, HOT, *ends, *times, *sizes))
    listed = tuple(entries)
    config = msgspec.to_builtins(TopicConfig())
    manifest = Manifest(1, topic, 1, config, records, 0, (), len(listed) + 1, listed)
    # Sync once and not after every segment, so that ten thousand segments take seconds.
    (target / layout.MANIFEST).write_bytes(encode_manifest(manifest))
    done.touch()
    return data_dir
