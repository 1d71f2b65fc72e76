"""The order of test files where several processes share them, and which files stay together.

The longest file comes first. `SECONDS` has the longest files known: their seconds in `./run test`.
Only their order counts. Other files count as `_SLOW` if they have a test marked slow.

The files of `tests/spark` come before all others, and one process runs them all: a Java that has
started, and has compiled Spark's code, serves all of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
from xdist.scheduler import LoadFileScheduling

ROOT: Final = Path(__file__).resolve().parents[1]
SPARK: Final = "tests/spark"
SECONDS: Final[dict[str, int]] = {
    "tests/cli/docs/test_docs_blocks.py": 126,
    "tests/crash/kills/test_large_replay.py": 100,
    "tests/browser/test_reference.py": 83,
    "tests/contract/operation/test_stop.py": 61,
    "tests/storage/golden/test_vector_parts.py": 54,
    "tests/crash/kills/test_small_disks.py": 51,
    "tests/docker/test_image.py": 48,
    "tests/contract/routers/test_router_restart.py": 46,
    "tests/contract/test_described.py": 43,
    "tests/cli/test_streams.py": 41,
    "tests/crash/streams/test_stream_conformance.py": 40,
    "tests/storage/golden/test_vector_store.py": 37,
    "tests/streams/test_conformance.py": 35,
    "tests/contract/views/test_views.py": 33,
    "tests/contract/operation/test_restart.py": 32,
    "tests/cli/test_stream.py": 32,
}
_SLOW: Final = 30
_SPARK: Final = 1000


def weights(items: list[pytest.Item]) -> dict[Path, int]:
    """How long each file takes, in seconds as far as they are known; Spark's files come first."""
    found = {item.path: 0 for item in items}
    found |= {item.path: _SLOW for item in items if item.get_closest_marker("slow")}
    known = {ROOT / name: seconds for name, seconds in SECONDS.items()}
    found |= {path: known[path] for path in found if path in known}
    return found | {path: _SPARK for path in found if path.is_relative_to(ROOT / SPARK)}


class FilesTogether(LoadFileScheduling):  # type: ignore[misc]  # pytest-xdist has no types
    """Gives each process whole files; all files of `tests/spark` go to one process."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return SPARK if file.startswith(f"{SPARK}/") else file


def scheduler(config: pytest.Config, log: object) -> FilesTogether | None:
    """The scheduler of `--dist loadfile`; None: the usual scheduler of another distribution."""
    return FilesTogether(config, log) if config.getvalue("dist") == "loadfile" else None
