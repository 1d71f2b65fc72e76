"""Parts, marks and notes of prunes are encoded and decoded unchanged, and every damaged byte is
noticed.
"""

from __future__ import annotations

import msgspec
import pytest

from topics_server.archive.continuous.format import (
    ArchiveMark,
    KeptBase,
    PartFacts,
    PrunedFacts,
    base_name,
    decode_mark,
    decode_part,
    decode_part_facts,
    decode_pruned,
    encode_part,
    encode_pruned,
    is_part_group,
    parse_base,
    parse_part,
    part_name,
    pruned_name,
)
from topics_server.archive.format import encode_json
from topics_server.values.entries import HeadReserved
from topics_server.values.errors import Corrupt, StartRefused
from topics_server.values.storage_types import KnownPositions
from topics_server.wal.format.frames import encode_entry

ENTRIES = [(lsn, HeadReserved(topic_id=1, ceiling_seq=lsn * 10)) for lsn in (7, 8, 11)]
FRAMES = b"".join(buffer for lsn, entry in ENTRIES for buffer in encode_entry(lsn, entry))
FACTS = PartFacts(
    store_id="1" * 32,
    archive_id="2" * 32,
    number=3,
    previous="4" * 16,
    writer="5" * 8,
    run=6,
    ts_ms=1_700_000_000_000,
    first_lsn=7,
    last_lsn=12,
    frames=3,
    frames_bytes=0,
    body_xxh3="",
    stretch=1,
    base_part=1,
    known=KnownPositions(2, 1, {1: 110}),
    created=[(1, "orders")],
)
PART = encode_part(FACTS, [FRAMES])


def test_a_part_is_what_was_encoded() -> None:
    facts, entries = decode_part(PART, "p")
    assert entries == ENTRIES
    assert facts == msgspec.structs.replace(
        FACTS, frames_bytes=len(FRAMES), body_xxh3=facts.body_xxh3
    )
    assert decode_part_facts(PART + b"more", "p")[0] == facts
    assert not facts.begins_stretch


def test_every_changed_byte_of_a_part_is_noticed() -> None:
    for at in range(len(PART)):
        changed = bytearray(PART)
        changed[at] ^= 0x20
        # Two bytes are always 0 and have no meaning yet.
        if at in (10, 11):
            continue
        with pytest.raises((Corrupt, StartRefused)):
            decode_part(bytes(changed), "p")


def test_every_shorter_part_is_noticed() -> None:
    for end in range(len(PART)):
        with pytest.raises(Corrupt):
            decode_part(PART[:end], "p")
    with pytest.raises(Corrupt):
        decode_part(PART + b"\0", "p")


def test_entries_outside_the_facts_are_noticed() -> None:
    for changes in ({"first_lsn": 8}, {"last_lsn": 10}, {"frames": 2}):
        part = encode_part(msgspec.structs.replace(FACTS, **changes), [FRAMES])
        with pytest.raises(Corrupt):
            decode_part(part, "p")
    twice = encode_part(msgspec.structs.replace(FACTS, frames=6), [FRAMES, FRAMES])
    with pytest.raises(Corrupt, match="do not fit"):
        decode_part(twice, "p")


def test_a_part_without_entries_is_one() -> None:
    part = encode_part(msgspec.structs.replace(FACTS, frames=0, last_lsn=6), [])
    assert decode_part(part, "p")[1] == []


def test_newer_versions_are_told() -> None:
    changed = bytearray(PART)
    changed[8] = 2
    with pytest.raises(StartRefused, match="use a newer one"):
        decode_part(bytes(changed), "p")
    with pytest.raises(StartRefused, match="use a newer one"):
        decode_mark(encode_json(ArchiveMark(2, "", "")), "p")


def test_the_mark_is_checked() -> None:
    mark = ArchiveMark(1, "1" * 32, "2" * 32)
    assert decode_mark(encode_json(mark), "p") == mark
    with pytest.raises(Corrupt):
        decode_mark(encode_json(mark).replace(b"1" * 32, b"3" * 32), "p")


def test_what_a_prune_notes_is_checked() -> None:
    facts = PrunedFacts(1, 9, 4, [KeptBase("a", "b", 2, 1)], KnownPositions(3, 2, {1: 5}))
    content = encode_pruned(facts)
    assert decode_pruned(content, "p") == facts
    for at in range(len(content)):
        changed = bytearray(content)
        changed[at] ^= 0x01
        with pytest.raises(Corrupt):
            decode_pruned(bytes(changed), "p")


def test_names_lead_there_and_back() -> None:
    assert part_name(1) == "parts/00000000/000000000001"
    assert part_name(123_456) == "parts/00000012/000000123456"
    assert parse_part("000000123456") == 123_456
    assert [parse_part(name) for name in ("000000000000", "1", "00000000000a")] == [None] * 3
    assert is_part_group("00000012")
    assert not is_part_group("12")
    assert parse_base(base_name(7, "0123abcd" * 4)) == 7
    assert [parse_base(name) for name in ("7", "000000000007", "x")] == [None] * 3
    assert pruned_name(5) == "pruned/000000000005"
