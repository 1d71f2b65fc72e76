"""A copy of each golden data directory, its expected answers, and its complaints.

The copies are in memory where there is room: the tests judge bytes, and no power fails.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
import pytest

from tests.vectors.stored import VECTORS, Expected, unpack
from topics_server.wal.fs import OsFs
from topics_server.wal.tools.dump import verify

NAMES: Final = sorted(
    (path.name for path in VECTORS.glob("store-v*")), key=lambda name: (len(name), name)
)
_MEMORY: Final = Path("/dev/shm")
_ROOM_WANTED: Final = 4 * 2**30  # more than a server wants free, and than all copies take


def _is_roomy() -> bool:
    return _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > _ROOM_WANTED


def with_some(part: str) -> pytest.MarkDecorator:
    """Run a test with the vectors that have something in this part of their expected answers."""
    named = msgspec.json.decode
    names = [
        name
        for name in NAMES
        if getattr(named((VECTORS / name / "expected.json").read_bytes(), type=Expected), part)
    ]
    assert NAMES[-1] in names, f"the newest vector has no {part}"
    return pytest.mark.parametrize("stored", names, indirect=True)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """An empty folder, in memory where there is room for it."""
    if not _is_roomy():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="topics-golden-", dir=_MEMORY) as made:
        yield Path(made)


@pytest.fixture(params=NAMES)
def stored(request: pytest.FixtureRequest, folder: Path) -> Expected:
    """A copy of one vector in `folder`, and its expected answers."""
    return unpack(VECTORS / request.param, folder)


def problems(folder: Path) -> list[str]:
    """The complaints of `verify`."""
    return verify(OsFs(), str(folder / "data"), str(folder / "cold")).problems


def records(told: list[object]) -> list[object]:
    """The records of a topic's answers, without tombstones."""
    return [item for item in told if isinstance(item, str)]
