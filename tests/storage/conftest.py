"""Fixtures of the storage tests: a fake disk for each test; a failing test prints its seed."""

from __future__ import annotations

import pytest

from tests.storage.fake_disk import FakeDisk


@pytest.fixture
def disk() -> FakeDisk:
    """An empty disk with a directory `data`, synced."""
    disk = FakeDisk(1)
    disk.make_dir("data")
    disk.sync_dir(".")
    return disk
