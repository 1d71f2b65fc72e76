"""How long syncs take on a disk, and which times are too short for any device.

A program cannot see whether a synced byte is on the medium: only a power cut shows that. But it can
see a time that is too short for any medium. Then a cache answered which may lose its content, and
the verdict says so. Called by `torture`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from topics_server.runtime.clock import monotonic_ms, random_bytes
from topics_server.values.limits import KIB, MIB
from topics_server.wal.fs import Fs

SMALL_BYTES: Final = 4 * KIB
LARGE_BYTES: Final = 16 * MIB
# The small writes stop at this number, or after this time.
SMALL_COUNT: Final = 1_000
SMALL_FOR_MS: Final = 3_000.0
# The fastest drives with a cache that survives a power cut need about this long over the bus.
NO_DEVICE_MS: Final = 0.02
# Half a turn of a disk with 15,000 turns a minute, the fastest disks that were made.
NO_SPINNING_DISK_MS: Final = 2.0
# More bytes a second than a drive on sixteen lanes of its bus accepts.
NO_DEVICE_BYTES_PER_S: Final = 60 * 10**9
_VOLATILE: Final = frozenset({"tmpfs", "ramfs"})
_VIRTUAL: Final = ("/virtio", "/vbd", "/vmbus", "/xen")


class SyncTimes(msgspec.Struct, frozen=True):
    """Times of syncs after writes of 4 KiB, and of one sync after 16 MiB, in ms."""

    count: int
    median_ms: float
    p99_ms: float
    max_ms: float
    per_second: int
    large_ms: float


class Device(msgspec.Struct, frozen=True):
    """The system's data about the disk of a folder; empty or None: unknown."""

    file_system: str = ""
    is_rotational: bool | None = None
    is_virtual: bool = False


def measured(fs: Fs, path: str) -> SyncTimes:
    """Write and sync a file at `path`, and remove it. Raises `StorageError`."""
    took_ms: list[float] = []
    block = random_bytes(SMALL_BYTES)
    large = random_bytes(LARGE_BYTES)
    file = fs.open(path, create=True)
    try:
        began_ms = monotonic_ms()
        while len(took_ms) < SMALL_COUNT and monotonic_ms() - began_ms < SMALL_FOR_MS:
            file.pwrite(block, len(took_ms) * SMALL_BYTES)
            took_ms.append(_sync_ms(file.sync))
        file.pwrite(large, SMALL_COUNT * SMALL_BYTES)
        large_ms = _sync_ms(file.sync)
    finally:
        file.close()
        fs.unlink(path)
    return times_of(took_ms, large_ms)


def _sync_ms(sync: Callable[[], None]) -> float:
    began_ms = monotonic_ms()
    sync()
    return monotonic_ms() - began_ms


def times_of(took_ms: Sequence[float], large_ms: float) -> SyncTimes:
    """The distribution of these times."""
    assert took_ms, "at least one sync was made"
    ordered = sorted(took_ms)
    whole_s = max(sum(ordered), 1e-6) / 1000
    return SyncTimes(
        count=len(ordered),
        median_ms=round(ordered[len(ordered) // 2], 4),
        p99_ms=round(ordered[len(ordered) * 99 // 100], 4),
        max_ms=round(ordered[-1], 4),
        per_second=round(len(ordered) / whole_s),
        large_ms=round(large_ms, 4),
    )


def suspicions_of(times: SyncTimes, device: Device) -> list[str]:
    """Reasons to doubt that syncs reach the medium of this disk; empty: no doubt."""
    found: list[str] = []
    if device.file_system in _VOLATILE:
        found.append(
            f"the folder is in memory ({device.file_system}): everything is lost when the machine "
            "goes down"
        )
    elif times.median_ms < NO_DEVICE_MS:
        found.append(
            f"a sync takes {times.median_ms * 1000:.0f} µs ({times.per_second:,} a second), faster "
            "than any device: a cache answers that may lose synced data in a power cut"
        )
    elif device.is_rotational and not device.is_virtual and times.median_ms < NO_SPINNING_DISK_MS:
        found.append(
            f"a sync takes {times.median_ms:.2f} ms, and the device says that it spins: its write "
            "cache answers, and may lose synced data in a power cut"
        )
    if times.large_ms > 0 and LARGE_BYTES / times.large_ms * 1000 > NO_DEVICE_BYTES_PER_S:
        rate = LARGE_BYTES / times.large_ms / 10**6
        found.append(
            f"a sync of {LARGE_BYTES // MIB} MiB takes {times.large_ms:.2f} ms, which is "
            f"{rate:,.0f} GB/s: the bytes cannot have left memory"
        )
    return found


def device_of(folder: Path, mounts: Path, devices: Path) -> Device:
    """The disk under a folder, by `/proc/self/mountinfo` and `/sys/dev/block` of Linux."""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return Device()
    found, length = ("", ""), -1
    for line in lines:
        fields, _, more = line.partition(" - ")
        parts, kinds = fields.split(), more.split()
        if len(parts) < 5 or not kinds:
            continue
        at = Path(parts[4].replace("\\040", " "))
        if folder.resolve().is_relative_to(at) and len(parts[4]) >= length:
            found, length = (parts[2], kinds[0]), len(parts[4])
    number, kind = found
    device = devices / number
    try:
        where = str(device.resolve(strict=True)) if number else ""
    except OSError:
        return Device(kind)
    # A partition has no folder `queue`: its disk is the parent folder.
    for queue in (Path(where) / "queue", Path(where).parent / "queue") if where else ():
        try:
            is_rotational = (queue / "rotational").read_text().strip() == "1"
        except OSError:
            continue
        is_virtual = any(word in where for word in _VIRTUAL)
        return Device(kind, is_rotational, is_virtual)
    return Device(kind)
