"""The option of races: `./run test-crash --rounds 1000`."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """How many races of each kind the full run has."""
    group = parser.getgroup("crash tests")
    group.addoption("--rounds", type=int, default=1000, help="races of a coordination (1000)")
