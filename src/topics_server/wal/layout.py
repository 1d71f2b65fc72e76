"""File and directory names of a data directory, in both directions. Pure.

Paths contain ids, never names of topics. The cold folder mirrors `segments/`.

    LOCK                                    held while a server runs
    FORMAT                                  version, store id, run, boot id, wal sets
    RESTORED                                what a restored store must not use again
    BACKUP_FOLDER                           where the last backup lies
    ARCHIVE_POSITION                        how far the continuous archive is
    ballast                                 random bytes: reserved space for a full disk
    wal/SET-SHARD-NUMBER.wal                journal files: 6, 2 and 10 digits
    wal/SET-SHARD.end                       how far that shard's journal reaches: its end mark
    wal/torn/SET-SHARD-NUMBER.wal.OFFSET    bytes of unfinished writes, kept aside by recovery
    segments/TOPIC/manifest                 TOPIC: the topic id, decimal
    segments/TOPIC/SEGMENT.data, .idx       SEGMENT: the segment id, 10 digits
    quarantine/TOPIC/SEGMENT.idx.NUMBER     a damaged file that was replaced
    snapshots/NUMBER.snap                   20 digits
    set-aside/                              bytes that offline verbs removed; never read again
    views/VIEW/NUMBER.db                    what a view computed; VIEW: its id, decimal

The root of the cold folder has `LOCK`, `STORE` (its owner) and `set-aside/` of its own.

An unfinished file is called `NAME.tmp` until it is renamed; leftovers may be removed.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

LOCK: Final = "LOCK"
FORMAT: Final = "FORMAT"
STORE: Final = "STORE"
RESTORED: Final = "RESTORED"
BACKUP_FOLDER: Final = "BACKUP_FOLDER"
ARCHIVE_POSITION: Final = "ARCHIVE_POSITION"
BALLAST: Final = "ballast"
SET_ASIDE: Final = "set-aside"
WAL: Final = "wal"
TORN: Final = "torn"
SEGMENTS: Final = "segments"
SNAPSHOTS: Final = "snapshots"
QUARANTINE: Final = "quarantine"
VIEWS: Final = "views"
MANIFEST: Final = "manifest"
TEMP_SUFFIX: Final = ".tmp"
DATA_SUFFIX: Final = ".data"
IDX_SUFFIX: Final = ".idx"
SNAPSHOT_SUFFIX: Final = ".snap"

_WAL_FILE: Final = re.compile(r"([0-9]{6})-([0-9]{2})-([0-9]{10})\.wal", re.ASCII)
_END_MARK: Final = re.compile(r"([0-9]{6})-([0-9]{2})\.end", re.ASCII)
_SEGMENT_FILE: Final = re.compile(r"([0-9]{10})\.(data|idx)", re.ASCII)
_QUARANTINED: Final = re.compile(r"([0-9]{10})\.(?:data|idx)\.[1-9][0-9]*", re.ASCII)
_SNAPSHOT_FILE: Final = re.compile(r"([0-9]{20})\.snap", re.ASCII)
_TOPIC_DIR: Final = re.compile(r"[1-9][0-9]{0,19}|0", re.ASCII)


class WalName(NamedTuple):
    """The parts of a journal file's name; sorts by set, shard, number."""

    wal_set: int
    shard: int
    number: int


def join(*parts: str) -> str:
    """Join the parts of a path."""
    return "/".join(parts)


def parent(path: str) -> str:
    """The directory of a path; `.` for a bare name."""
    head, slash, _ = path.rpartition("/")
    return head or ("/" if slash else ".")


def temp(path: str) -> str:
    """The temporary name of an unfinished file, in the same directory."""
    return path + TEMP_SUFFIX


def is_temp(name: str) -> bool:
    """Whether a name is that of an unfinished file."""
    return name.endswith(TEMP_SUFFIX)


def wal_file(name: WalName) -> str:
    """File name of a journal file."""
    assert 0 <= name.wal_set < 10**6
    assert 0 <= name.shard < 100
    assert 0 <= name.number < 10**10
    return f"{name.wal_set:06d}-{name.shard:02d}-{name.number:010d}.wal"


def parse_wal_file(name: str) -> WalName | None:
    """The reverse of `wal_file`; `None` for any other name."""
    found = _WAL_FILE.fullmatch(name)
    return WalName(*map(int, found.groups())) if found else None


def end_mark(wal_set: int, shard: int) -> str:
    """File name of a shard's end mark."""
    assert 0 <= wal_set < 10**6
    assert 0 <= shard < 100
    return f"{wal_set:06d}-{shard:02d}.end"


def parse_end_mark(name: str) -> tuple[int, int] | None:
    """The reverse of `end_mark`: (wal set, shard); `None` for any other name."""
    found = _END_MARK.fullmatch(name)
    return (int(found[1]), int(found[2])) if found else None


def torn_file(name: WalName, offset: int) -> str:
    """File name, in `wal/torn`, of the bytes found at `offset` of a journal file."""
    return f"{wal_file(name)}.{offset}"


def topic_dir(topic_id: int) -> str:
    """Directory name of a topic in `segments/` and in the cold folder."""
    assert topic_id >= 0
    return str(topic_id)


def parse_topic_dir(name: str) -> int | None:
    """The reverse of `topic_dir`; `None` for any other name."""
    return int(name) if _TOPIC_DIR.fullmatch(name) else None


def segment_data(segment_id: int) -> str:
    """File name of a segment's records."""
    assert 0 <= segment_id < 10**10
    return f"{segment_id:010d}{DATA_SUFFIX}"


def segment_idx(segment_id: int) -> str:
    """File name of a segment's columns."""
    assert 0 <= segment_id < 10**10
    return f"{segment_id:010d}{IDX_SUFFIX}"


def parse_segment_file(name: str) -> tuple[int, str] | None:
    """(segment id, `.data` or `.idx`) of a segment's file name; `None` for any other name."""
    found = _SEGMENT_FILE.fullmatch(name)
    return (int(found[1]), f".{found[2]}") if found else None


def quarantined_file(name: str, number: int) -> str:
    """File name, in `quarantine/TOPIC`, of a damaged segment file."""
    assert number > 0
    return f"{name}.{number}"


def parse_quarantined_file(name: str) -> int | None:
    """The segment id of a file in quarantine; `None` for any other name."""
    found = _QUARANTINED.fullmatch(name)
    return int(found[1]) if found else None


def snapshot_file(number: int) -> str:
    """File name of a snapshot; names sort as numbers do."""
    assert 0 <= number < 10**20
    return f"{number:020d}{SNAPSHOT_SUFFIX}"


def parse_snapshot_file(name: str) -> int | None:
    """The reverse of `snapshot_file`; `None` for any other name."""
    found = _SNAPSHOT_FILE.fullmatch(name)
    return int(found[1]) if found else None
