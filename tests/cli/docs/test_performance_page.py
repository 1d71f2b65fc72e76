"""The commands of docs/PERFORMANCE.md name existing cases."""

from __future__ import annotations

import re

from benchmarks.cases.registry import CASES
from benchmarks.report import overview
from tests.contract.driver import ROOT

PAGE = (ROOT / "docs" / "PERFORMANCE.md").read_text()


def test_the_page_names_cases_that_there_are() -> None:
    named = re.findall(r"--only ([\w,-]+)", PAGE)
    assert overview.CASES in named
    assert [case for names in named for case in names.split(",") if case not in CASES] == []
