"""The option of races: `./run test-crash --rounds 1000`."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """The number of races of each kind in the full run."""
    group = parser.getgroup("crash tests")
    group.addoption("--rounds", type=int, default=200, help="races of a coordination (200)")
