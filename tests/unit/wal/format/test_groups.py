"""Groups and file headers: golden bytes, and the verdict on every flipped byte."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
import xxhash

from topics_server.values.entries import HeadReserved
from topics_server.values.errors import StartRefused
from topics_server.wal.format import groups
from topics_server.wal.format.frames import Opening, encode_entry, encode_opening
from topics_server.wal.format.groups import (
    FILE_HEADER_BYTES,
    GROUP_HEADER_BYTES,
    GROUP_MAGIC,
    Ending,
    FileHeader,
    RawGroup,
    Scan,
    decode_file_header,
    encode_file_header,
    encode_group,
    find_group,
    group_length,
    raw_group,
    scan,
)

VECTORS: Final = Path(__file__).parents[3] / "vectors" / "wal"
FILE_ID: Final = 0x0123_4567_89AB_CDEF
OLD_HEADER: Final = FileHeader(wal_set=2, shard=3, number=41, file_id=FILE_ID, after_lsn=99)
HEADER: Final = OLD_HEADER._replace(predecessor=39, run=7, declared_bytes=4096)


def make_group(position: int, lsns: list[int], *, synced: int = 64, opening: bool = False) -> bytes:
    buffers = [encode_opening(Opening(40, 4096, 99))] if opening else []
    for lsn in lsns:
        buffers += encode_entry(lsn, HeadReserved(7, lsn))
    return b"".join(
        encode_group(
            buffers,
            sum(map(len, buffers)),
            len(lsns) + opening,
            file_id=FILE_ID,
            position=position,
            synced_bytes=synced,
        )
    )


FIRST: Final = make_group(64, [100, 101], opening=True)
SECOND: Final = make_group(64 + len(FIRST), [102])
MARK: Final = make_group(64 + len(FIRST) + len(SECOND), [], synced=64 + len(FIRST) + len(SECOND))
FILE: Final = encode_file_header(HEADER) + FIRST + SECOND + MARK + bytes(256)


def test_golden_file() -> None:
    """A header, two groups, a mark and untouched space, byte for byte."""
    data = (VECTORS / "file-v2.wal").read_bytes()
    assert data == FILE
    assert decode_file_header(data[:FILE_HEADER_BYTES]) == HEADER
    result = scan(data[64:], 64, FILE_ID, len(data))
    assert result.ending is Ending.ZEROS
    assert result.position == len(data) - 256
    first, second, mark = result.groups
    assert first.opening == Opening(40, 4096, 99)
    assert [lsn for lsn, _ in first.entries + second.entries] == [100, 101, 102]
    assert mark.entries == []
    assert mark.synced_bytes == mark.position == second.end


@pytest.mark.parametrize("count", [0, 1, 2, 7, 200])
def test_a_group_in_one_buffer_has_the_same_bytes(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lsns = list(range(100, 100 + count))
    made = make_group(64, lsns)
    is_small = len(made) <= groups._COPIED_BYTES_MAX
    assert is_small == (count < 100), "the numbers of frames are for both kinds"
    monkeypatch.setattr(groups, "_COPIED_BYTES_MAX", 0 if is_small else len(made))
    assert make_group(64, lsns) == made


@pytest.mark.parametrize(
    ("from_lsn", "decoded", "passed"),
    [
        (0, [[100, 101], [102], []], [None, None, None]),
        (102, [[100, 101], [102], []], [None, None, None]),
        (103, [[100, 101], [], []], [None, (102, 102), None]),
    ],
)
def test_groups_that_nobody_wants_are_verified_and_not_decoded(
    from_lsn: int, decoded: list[list[int]], passed: list[tuple[int, int] | None]
) -> None:
    """A group with an opening is decoded, and a group without entries has none to skip."""
    result = scan(FILE[64:], 64, FILE_ID, len(FILE), from_lsn)
    assert [[lsn for lsn, _ in group.entries] for group in result.groups] == decoded
    assert [group.passed for group in result.groups] == passed
    assert result.groups[0].opening == Opening(40, 4096, 99)
    again = scan(FILE[64:], 64, FILE_ID, len(FILE))
    assert [group.end for group in result.groups] == [group.end for group in again.groups]


def test_a_group_with_one_wanted_entry_is_decoded_whole() -> None:
    data = make_group(64, [100, 101, 102])
    for from_lsn, passed in ((101, None), (102, None), (103, (100, 102))):
        (group,) = scan(data + bytes(64), 64, FILE_ID, 4096, from_lsn).groups
        assert group.passed == passed
        assert [lsn for lsn, _ in group.entries] == ([] if passed else [100, 101, 102])


def test_a_flipped_byte_in_a_group_that_nobody_wants_is_found() -> None:
    for at in range(64 + len(FIRST), 64 + len(FIRST) + len(SECOND)):
        damaged = bytearray(FILE)
        damaged[at] ^= 1
        result = scan(bytes(damaged[64:]), 64, FILE_ID, len(FILE), 1_000)
        assert (result.ending, result.position) == (Ending.FAILED, 64 + len(FIRST))


def raw_scan(data: bytes, start: int) -> tuple[list[int], Scan]:
    """The lsns of the raw groups, and how they end."""
    lsns: list[int] = []
    position = start
    while isinstance(
        group := raw_group(data, position - 64, position, FILE_ID, len(FILE)), RawGroup
    ):
        lsns += [frame.lsn for frame in group.frames]
        position = group.end
    return lsns, group


@pytest.mark.parametrize("is_small", [True, False])
def test_raw_groups_get_the_verdict_of_a_scan(
    is_small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That holds whichever byte is wrong, and wherever the bytes end."""
    if not is_small:
        monkeypatch.setattr(groups, "_COPIED_BYTES_MAX", 0)
    wrong = [FILE]
    for at in range(64, len(FILE)):
        damaged = bytearray(FILE)
        damaged[at] ^= 1
        wrong.append(bytes(damaged))
    cases = [each[64:] for each in wrong] + [FILE[64:end] for end in range(64, len(FILE))]
    for data in cases:
        expected = scan(data, 64, FILE_ID, len(FILE))
        lsns, ended = raw_scan(data, 64)
        assert lsns == [lsn for group in expected.groups for lsn, _ in group.entries]
        assert ended == expected._replace(groups=[])


def test_a_file_of_version_1_is_read() -> None:
    data = (VECTORS / "file.wal").read_bytes()
    assert decode_file_header(data[:FILE_HEADER_BYTES]) == OLD_HEADER
    assert data[64:] == FILE[64:]


def test_a_first_file_has_no_predecessor() -> None:
    header = HEADER._replace(predecessor=0)
    assert decode_file_header(encode_file_header(header)) == header


@pytest.mark.parametrize("offset", range(FILE_HEADER_BYTES))
def test_any_flipped_byte_of_a_file_header_fails_it(offset: int) -> None:
    data = bytearray(FILE[:FILE_HEADER_BYTES])
    data[offset] ^= 0x10
    assert decode_file_header(bytes(data)) is None


def test_a_newer_file_version_is_refused() -> None:
    data = bytearray(FILE[:FILE_HEADER_BYTES])
    data[8] = 3
    data[56:64] = xxhash.xxh3_64_intdigest(bytes(data[:56])).to_bytes(8, "little")
    with pytest.raises(StartRefused, match="version 3"):
        decode_file_header(bytes(data))


def test_another_magic_is_no_journal_file() -> None:
    data = bytearray(FILE[:FILE_HEADER_BYTES])
    data[1:7] = b"puzzle"
    data[56:64] = xxhash.xxh3_64_intdigest(bytes(data[:56])).to_bytes(8, "little")
    assert decode_file_header(bytes(data)) is None


def test_a_short_header_is_none() -> None:
    assert decode_file_header(FILE[:63]) is None


@pytest.mark.parametrize("offset", range(64, 64 + len(FIRST)))
@pytest.mark.parametrize("flip", [0x01, 0x80])
def test_any_flipped_byte_of_a_group_fails_it_where_it_begins(offset: int, flip: int) -> None:
    data = bytearray(FILE)
    data[offset] ^= flip
    result = scan(bytes(data[64:]), 64, FILE_ID, len(data))
    assert result.ending in (Ending.FAILED, Ending.MORE)
    assert result.position == 64
    assert not result.groups


@pytest.mark.parametrize("offset", range(64 + len(FIRST), 64 + len(FIRST) + len(SECOND)))
def test_groups_before_the_flipped_byte_are_found(offset: int) -> None:
    data = bytearray(FILE)
    data[offset] ^= 0x40
    result = scan(bytes(data[64:]), 64, FILE_ID, len(data))
    assert result.ending is not Ending.ZEROS
    assert [group.position for group in result.groups] == [64]


def test_a_group_counts_in_its_file_and_place_only() -> None:
    assert scan(FIRST, 64, FILE_ID, 4096).groups
    assert not scan(FIRST, 64, FILE_ID + 1, 4096).groups
    assert not scan(FIRST, 72, FILE_ID, 4096).groups


def test_a_length_beyond_the_file_is_never_read_by() -> None:
    data = bytearray(FIRST)
    data[4:8] = (2**32 - 8).to_bytes(4, "little")
    assert scan(bytes(data), 64, FILE_ID, 4096).reason == "impossible length"
    data[4:8] = (8192).to_bytes(4, "little")
    assert scan(bytes(data), 64, FILE_ID, 4096).reason == "length beyond the end of the file"


def test_a_scan_says_how_much_more_it_needs() -> None:
    result = scan(FIRST[:20], 64, FILE_ID, 4096)
    assert (result.ending, result.needed_bytes) == (Ending.MORE, GROUP_HEADER_BYTES)
    result = scan(FIRST + SECOND[:40], 64, FILE_ID, 4096)
    assert (result.ending, result.needed_bytes) == (Ending.MORE, len(SECOND))
    assert result.position == 64 + len(FIRST)


def test_a_file_may_end_without_room_for_a_header() -> None:
    result = scan(FIRST + bytes(24), 64, FILE_ID, 64 + len(FIRST) + 24)
    assert result.ending is Ending.ZEROS


def test_a_group_behind_garbage_is_found_at_its_place_only() -> None:
    buffer = b"\x07" * 96 + GROUP_MAGIC + b"\x01" * 60 + FIRST
    assert find_group(buffer, 0, len(buffer), 0, 100_000) == 160
    # Off the 8-byte grid nothing is a group.
    assert find_group(b"\0" + FIRST, 0, len(FIRST) + 1, 0, 100_000) == -1


def test_group_lengths_are_multiples_of_eight() -> None:
    assert [group_length(n) for n in (0, 1, 8, 45)] == [32, 40, 40, 80]
