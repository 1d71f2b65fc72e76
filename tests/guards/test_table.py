"""The table of guards matches the source and its page; `./run guards` proves that its tests
fail.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from tests.guards.check import PAGE, ROOT, cells
from tests.guards.table import GUARDS

SOURCE: Final = ROOT / "src" / "topics_server"


def test_each_text_is_once_in_its_file() -> None:
    """If a line was rewritten, its guard must name the new text, or the guard is no longer
    checked.
    """
    counts = {
        f"{guard.file}: {guard.old}": (SOURCE / guard.file).read_text("utf-8").count(guard.old)
        for guard in GUARDS
    }
    assert {text: count for text, count in counts.items() if count != 1} == {}
    assert all(guard.old != guard.new for guard in GUARDS)


def test_each_guard_has_tests_and_a_rule_of_its_own() -> None:
    names = {name for guard in GUARDS for name in guard.tests.split()}
    assert [name for name in sorted(names) if not (ROOT / "tests" / name).is_file()] == []
    assert all(guard.tests for guard in GUARDS)
    assert len({guard.rule for guard in GUARDS}) == len(GUARDS) >= 60


def test_the_page_has_a_row_for_each_guard_and_its_tests_exist() -> None:
    """`./run guards --write` writes the page."""
    rows = re.findall(r"^\| (.+) \| `(\S+)` \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert [found for found, _ in rows] == [cells(guard) for guard in GUARDS]
    missing = [test for _, test in rows if not _exists(test)]
    assert missing == []


def _exists(test: str) -> bool:
    name, _, function = test.partition("::")
    path: Path = ROOT / "tests" / name
    return path.is_file() and f"def {function}(" in path.read_text("utf-8")
