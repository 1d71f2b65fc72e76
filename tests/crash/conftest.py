"""Options of the crash tests: `./run test-crash --cycles 1000 --seeds 10000`.

The defaults are small enough for `.ci/run`. They hold too when this file is loaded late (a run over
all of `tests`), where pytest has parsed its command line already.
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--cycles`, `--seeds`, `--first-seed`."""
    group = parser.getgroup("crash tests")
    group.addoption("--cycles", type=int, default=5, help="kill -9 cycles (5)")
    group.addoption("--seeds", type=int, default=200, help="simulated disks (200)")
    group.addoption("--first-seed", type=int, default=1, help="the first seed (1)")


@pytest.fixture
def cycles(request: pytest.FixtureRequest) -> int:
    """How often a real server is killed."""
    return int(request.config.getoption("--cycles", default=5))


@pytest.fixture
def seeds(request: pytest.FixtureRequest) -> range:
    """The seeds of the simulated disks."""
    first = int(request.config.getoption("--first-seed", default=1))
    return range(first, first + int(request.config.getoption("--seeds", default=200)))


@pytest.fixture
def first_seed(request: pytest.FixtureRequest) -> int:
    """The seed everything random of a run with real processes comes from."""
    return int(request.config.getoption("--first-seed", default=1))
