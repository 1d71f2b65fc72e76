"""The order of test files where two processes share them: the longest file first.

`SECONDS` has the longest files known: their seconds in `.ci/run`, or estimates from busier runs.
Only their order counts. Other files count as `_SLOW` if they have a test marked slow.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[1]
SECONDS: Final[dict[str, int]] = {
    "tests/cli/docs/test_docs_blocks.py": 170,
    "tests/crash/kills/test_large_replay.py": 100,
    "tests/browser/test_reference.py": 90,
    "tests/docker/test_image.py": 90,
    "tests/contract/operation/test_stop.py": 70,
    "tests/storage/golden/test_vector_parts.py": 60,
    "tests/storage/golden/test_vector_store.py": 60,
    "tests/contract/operation/test_restart.py": 55,
    "tests/crash/streams/test_stream_conformance.py": 40,
    "tests/examples/test_coordination.py": 35,
    "tests/cli/test_completion.py": 30,
}
_SLOW: Final = 30


def weights(items: list[pytest.Item]) -> dict[Path, int]:
    """How long each file takes, in seconds as far as they are known."""
    found = {item.path: 0 for item in items}
    found |= {item.path: _SLOW for item in items if item.get_closest_marker("slow")}
    known = {ROOT / name: seconds for name, seconds in SECONDS.items()}
    return found | {path: known[path] for path in found if path in known}
