"""The machine: its hardware, its current noise, and the speed of its disk without a server.

Called by `Bench` (noise, once a round) and by the cases about `fsync` (the raw disk).
"""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

CALIBRATION_TURNS = 1_000_000
RAW_FILE_BYTES = 16 << 20


def calibration_ms() -> float:
    """The time of a fixed piece of work; its spread over the rounds is the machine's noise."""
    began = time.perf_counter()
    total = 0
    for turn in range(CALIBRATION_TURNS):
        total += turn & 7
    assert total == 3_500_000
    return (time.perf_counter() - began) * 1e3


def raw_sync_ms(folder: Path, size: int, seconds: float) -> list[float]:
    """Latencies in ms of write + fdatasync of `size` bytes, one after the other, into a zero-filled
    file.

    A journal with preallocation cannot be faster on this file system.
    """
    path = folder / "raw-sync.bin"
    payload = b"\x5a" * size
    times: list[float] = []
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        zeros = bytes(1 << 20)
        for at in range(0, RAW_FILE_BYTES, len(zeros)):
            os.pwrite(file, zeros, at)
        os.fsync(file)
        at, end = 0, time.perf_counter() + seconds
        while (began := time.perf_counter()) < end:
            os.pwrite(file, payload, at)
            os.fdatasync(file)
            times.append((time.perf_counter() - began) * 1e3)
            at = at + size if at + 2 * size <= RAW_FILE_BYTES else 0
    finally:
        os.close(file)
        path.unlink()
    return times


def file_system_of(folder: Path) -> str:
    """The type of the file system of `folder` (ext4, tmpfs, …), or `unknown`."""
    best, kind = "", "unknown"
    try:
        mounts = Path("/proc/mounts").read_text().splitlines()
    except OSError:
        return kind
    place = str(folder.resolve())
    for line in mounts:
        _, target, name, *_ = line.split()
        inside = place == target or place.startswith(target.rstrip("/") + "/")
        if inside and len(target) >= len(best):
            best, kind = target, name
    return kind


def processor() -> str:
    """The processor's name, from the kernel."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name") and (name := line.partition(":")[2].strip()):
                return name
    except OSError:
        pass
    return platform.machine()


def describe(folder: Path) -> dict[str, str | int | float]:
    """Facts about the machine that a reader needs to judge the figures."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": processor(),
        "cores": os.cpu_count() or 0,
        "memory_gib": round(memory / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "file_system": file_system_of(folder),
        "load_average_at_start": round(os.getloadavg()[0], 2),
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }
