"""`cli.torture.sync_times`: which times are suspicious, and what the system says about a disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.storage.fake_disk import FakeDisk
from topics_server.cli.torture import sync_times
from topics_server.cli.torture.sync_times import (
    Device,
    device_of,
    measured,
    suspicions_of,
    times_of,
)

HONEST = times_of([0.3] * 100, 40.0)


def test_the_distribution() -> None:
    times = times_of([float(n) for n in range(1, 101)], 7.0)
    assert (times.count, times.median_ms, times.p99_ms, times.max_ms) == (100, 51.0, 100.0, 100.0)
    assert times.per_second == round(100 / 5.05)


@pytest.mark.parametrize(
    ("took_ms", "large_ms", "device", "words"),
    [
        (0.3, 40.0, Device("ext4", False), ""),
        (0.3, 40.0, Device(), ""),
        (6.0, 200.0, Device("ext4", True), ""),
        (0.3, 40.0, Device("ext4", True, True), ""),
        (0.3, 40.0, Device("ext4", True), "says that it spins"),
        (0.005, 40.0, Device("ext4", False), "faster than any device"),
        (0.005, 40.0, Device("tmpfs"), "is in memory (tmpfs)"),
        (0.3, 0.1, Device("ext4", False), "cannot have left memory"),
    ],
)
def test_times_that_no_device_has_are_suspicious(
    took_ms: float, large_ms: float, device: Device, words: str
) -> None:
    found = suspicions_of(times_of([took_ms] * 50, large_ms), device)
    assert len(found) == (1 if words else 0)
    assert not words or words in found[0]


def test_the_file_of_the_measurement_is_removed() -> None:
    disk = FakeDisk(1)
    disk.make_dir("d")
    times = measured(disk, "d/sync.tmp")
    assert 0 < times.count <= sync_times.SMALL_COUNT
    assert disk.list_dir("d") == []


def linux(tmp_path: Path, where: str, rotational: str) -> Path:
    """A tree like `/sys/dev/block`, with one partition."""
    disk = tmp_path / "devices" / where
    (disk / "sda1").mkdir(parents=True)
    (disk / "queue").mkdir()
    (disk / "queue" / "rotational").write_text(rotational)
    block = tmp_path / "block"
    block.mkdir()
    (block / "8:1").symlink_to(disk / "sda1")
    return block


@pytest.mark.parametrize(
    ("where", "rotational", "device"),
    [
        ("pci0/ata1/sda", "1\n", Device("ext4", True)),
        ("pci0/ata1/sda", "0\n", Device("ext4", False)),
        ("pci0/virtio1/vda", "1\n", Device("ext4", True, True)),
    ],
)
def test_the_disk_below_a_folder(
    tmp_path: Path, where: str, rotational: str, device: Device
) -> None:
    folder = tmp_path / "with space" / "data"
    folder.mkdir(parents=True)
    mounts = tmp_path / "mountinfo"
    at = str(tmp_path / "with space").replace(" ", "\\040")
    mounts.write_text(
        "21 1 0:20 / / rw - overlay overlay rw\n"
        f"22 21 8:1 / {at} rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
        f"23 22 0:44 / {at}/other rw - tmpfs tmpfs rw\n"
        "nonsense\n"
    )
    assert device_of(folder, mounts, linux(tmp_path, where, rotational)) == device
    assert device_of(tmp_path, mounts, tmp_path / "none") == Device("overlay")
    assert device_of(folder, tmp_path / "none", tmp_path) == Device()
