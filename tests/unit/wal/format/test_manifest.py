"""Bytes of manifests: a golden vector, one flipped byte gives one verdict, unknown later fields."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import xxhash

from topics_server.values.errors import Corrupt, StartRefused, StorageError
from topics_server.wal.format.manifest import (
    COLD,
    HEADER_BYTES,
    HOT,
    Manifest,
    SegmentEntry,
    decode_manifest,
    encode_manifest,
)

VECTOR = Path(__file__).parents[3] / "vectors" / "segments" / "manifest"
VECTOR_2 = VECTOR.with_name("manifest-v2")


def entry(segment_id: int, first_seq: int, tier: str = HOT) -> SegmentEntry:
    return SegmentEntry(segment_id, tier, first_seq, first_seq + 9, 1, 2, 300, 200, 2**64 - 1)


def manifest(*segments: SegmentEntry) -> Manifest:
    return Manifest(1, "a", 2, {"ttl_ms": 5}, 40, 3, ((4, 6),), 9, segments)


def test_the_golden_manifest_is_decoded_and_encoded_again() -> None:
    encoded = VECTOR.read_bytes()
    found = decode_manifest(encoded)
    assert (found.topic_id, found.name, found.epoch) == (7, "orders.eu:42", 3)
    assert (found.head_seq, found.evict_floor, found.holes) == (1000, 4, ((11, 12),))
    assert (found.config["ttl_ms"], found.config["dead_letter"]) == (1000, "dead")
    (segment,) = found.segments
    assert (segment.segment_id, segment.tier, segment.first_seq) == (5, HOT, 101)
    assert (segment.record_count, found.next_segment_id) == (40, 6)
    # Of version 1: it counts as the first generation, of a store without an id.
    assert (found.generation, found.store_id) == (1, "")
    newer = dataclasses.replace(found, generation=3 << 24, store_id="5" * 32)
    assert encode_manifest(newer) == VECTOR_2.read_bytes()
    assert decode_manifest(VECTOR_2.read_bytes()) == newer


@pytest.mark.parametrize("offset", range(0, len(VECTOR.read_bytes())))
def test_every_flipped_byte_is_refused(offset: int) -> None:
    broken = bytearray(VECTOR.read_bytes())
    broken[offset] ^= 0x04
    with pytest.raises(StorageError):
        decode_manifest(bytes(broken))


@pytest.mark.parametrize("length", [0, HEADER_BYTES - 1, HEADER_BYTES, 200])
def test_a_short_manifest_is_corrupt(length: int) -> None:
    with pytest.raises(Corrupt):
        decode_manifest(VECTOR.read_bytes()[:length])


def test_bytes_behind_the_end_are_corrupt() -> None:
    with pytest.raises(Corrupt):
        decode_manifest(VECTOR.read_bytes() + b"\0")


def test_a_newer_version_refuses_to_start() -> None:
    broken = bytearray(VECTOR.read_bytes())
    broken[8] = 9
    with pytest.raises(StartRefused, match="newer"):
        decode_manifest(bytes(broken))


def test_fields_added_later_are_passed_over() -> None:
    encoded = encode_manifest(manifest(entry(3, 1), entry(4, 11, COLD)))
    fields = json.loads(encoded[HEADER_BYTES:])
    fields["colour"] = "blue"
    fields["segments"][0]["colour"] = "red"
    body = json.dumps(fields).encode()
    header = encoded[:12] + len(body).to_bytes(4, "little") + encoded[16:24]
    checksum = xxhash.xxh3_64_intdigest(header + body).to_bytes(8, "little")
    assert decode_manifest(header + checksum + body) == decode_manifest(encoded)


def test_segments_that_overlap_are_never_listed() -> None:
    with pytest.raises(AssertionError):
        encode_manifest(manifest(entry(3, 1), entry(4, 10)))


def test_a_segment_id_is_below_the_next_one() -> None:
    with pytest.raises(AssertionError):
        encode_manifest(dataclasses.replace(manifest(entry(3, 1)), next_segment_id=3))
