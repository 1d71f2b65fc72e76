"""Sealed segments made without a server, for benchmarks of what reads them.

The bytes are the server's own: its packer, its segments, its manifest. Records are JSON of about
200 bytes with a tag among 5,000 and a node among 50, ten milliseconds apart.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from topics_server.blocks import Block, make_block
from topics_server.handoff import SegmentPlan, TopicFacts
from topics_server.model import TopicConfig
from topics_server.wal.directory import Directory
from topics_server.wal.fs import OsFs
from topics_server.wal.packer import InlinePacker
from topics_server.wal.segments import SealedSegments

TAGS: Final = 5_000
START_MS: Final = 1_767_225_600_000
STEP_MS: Final = 10
_BLOCK: Final = 256


def blocks(first_seq: int, count: int, pads: list[bytes]) -> Iterator[Block]:
    """Records of consecutive seqs, a block at a time."""
    for begin in range(first_seq, first_seq + count, _BLOCK):
        seqs = range(begin, min(begin + _BLOCK, first_seq + count))
        datas = [
            b'{"user":"user-%d","kind":"k%d","amount":%d,"pad":"%b"}'
            % (s * 7919 % TAGS, s % 7, s % 1000, pads[s * 31 % len(pads)])
            for s in seqs
        ]
        times = array("q", [START_MS + STEP_MS * s for s in seqs])
        tags = [f"user-{s * 7919 % TAGS}" for s in seqs]
        nodes = [f"node-{s % 50}" for s in seqs]
        yield make_block(begin, times, datas, None, tags, nodes)


def make_sealed(folder: Path, records: int, per_segment: int, topic: str = "events") -> Path:
    """A data directory with one topic of so many records; made once, found again."""
    done = folder / f"made-{records}-{per_segment}"
    data_dir = folder / f"sealed-{records}-{per_segment}"
    if done.exists():
        return data_dir
    chance = random.Random(7)
    pads = [chance.randbytes(67).hex().encode() for _ in range(9973)]
    fs = OsFs()
    data_dir.mkdir(parents=True)
    directory = Directory.open(fs, str(data_dir), boot_id="benchmark", mode=0o700)
    directory.begin()
    segments = SealedSegments(fs, str(data_dir), None, InlinePacker())
    facts = TopicFacts(1, topic, 1, TopicConfig(), records, 0, [])
    for number, first in enumerate(range(1, records + 1, per_segment), 1):
        count = min(per_segment, records + 1 - first)
        plan = SegmentPlan(1, number, list(blocks(first, count, pads)), bytes(count))
        segments.put(plan, facts)
    segments.close()
    directory.close()
    done.touch()
    return data_dir
