"""Options of the crash tests: `./run test-crash --cycles 1000 --seeds 10000`, and of watchers:
`--watchers 200 --kills 20`, `--slow-sockets 1000 --load-mb 50`, `--idle-streams 2000`, and of
workers: `--jobs 100000 --workers 16 --kills 50`, and of requests made up from the description:
`--requests 50000`, and of a flood: `--flood 600 --flood-appends 60`, and of uploads:
`--uploads 200 --upload-mib 60`, and of full disks: `--disk-mib 1024`.

The defaults are small enough for `.ci/run`. They hold too when this file is loaded late (a run over
all of `tests`), where pytest has parsed its command line already.
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """All of them."""
    group = parser.getgroup("crash tests")
    group.addoption("--cycles", type=int, default=5, help="kill -9 cycles (5)")
    group.addoption("--seeds", type=int, default=200, help="simulated disks (200)")
    group.addoption("--first-seed", "--seed", type=int, default=1, help="the first seed (1)")
    group.addoption("--watchers", type=int, default=24, help="watchers in a storm (24)")
    group.addoption("--kills", type=int, default=2, help="kills in a storm (2)")
    group.addoption("--disk-mib", type=int, default=32, help="of a disk that is filled (32)")
    group.addoption("--jobs", type=int, default=1500, help="jobs in a chaos of workers (1500)")
    group.addoption("--workers", type=int, default=4, help="worker processes (4)")
    group.addoption("--slow-sockets", type=int, default=60, help="sockets never read (60)")
    group.addoption("--load-mb", type=int, default=5, help="MB/s written past them (5)")
    group.addoption("--requests", type=int, default=600, help="made-up requests (600)")
    group.addoption("--fuzz", type=int, default=2000, help="requests changed at random (2000)")
    group.addoption("--half-open", type=int, default=200, help="connections never used (200)")
    group.addoption("--never-reading", type=int, default=20, help="clients that never read (20)")
    group.addoption("--stream-kills", type=int, default=2, help="of a Spark query (2)")
    group.addoption("--flood", type=int, default=128, help="connections of a flood (128)")
    group.addoption("--flood-appends", type=int, default=10, help="honest appends a topic (10)")
    group.addoption("--misfortunes", type=int, default=150, help="simulated lives (150)")
    group.addoption("--misfortune-kinds", default="", help="kinds for every life (two, by seed)")
    group.addoption("--damage-cases", type=int, default=250, help="of each end, 0: all (250)")
    group.addoption("--damage-only", default="", help="damage files like this")
    group.addoption("--damage-kinds", default="", help="damage them so: cut,flipped,... (all)")
    group.addoption("--uploads", type=int, default=40, help="uploads that stall (40)")
    group.addoption("--upload-mib", type=int, default=4, help="MiB of each of them (4)")
    group.addoption("--idle-streams", type=int, default=200, help="streams without news (200)")


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


@pytest.fixture
def watchers(request: pytest.FixtureRequest) -> int:
    """How many watchers a storm has."""
    return int(request.config.getoption("--watchers", default=24))


@pytest.fixture
def kills(request: pytest.FixtureRequest) -> int:
    """How often the server is killed under watchers or workers."""
    return int(request.config.getoption("--kills", default=2))


@pytest.fixture
def jobs(request: pytest.FixtureRequest) -> int:
    """How many jobs a chaos of workers has."""
    return int(request.config.getoption("--jobs", default=1500))


@pytest.fixture
def workers(request: pytest.FixtureRequest) -> int:
    """How many processes do them."""
    return int(request.config.getoption("--workers", default=4))


@pytest.fixture
def slow_sockets(request: pytest.FixtureRequest) -> int:
    """How many sockets are never read."""
    return int(request.config.getoption("--slow-sockets", default=60))


@pytest.fixture
def load_mb(request: pytest.FixtureRequest) -> int:
    """How many megabytes a second are written past them."""
    return int(request.config.getoption("--load-mb", default=5))


@pytest.fixture
def idle_streams(request: pytest.FixtureRequest) -> int:
    """How many streams without news are held open."""
    return int(request.config.getoption("--idle-streams", default=200))


@pytest.fixture
def requests(request: pytest.FixtureRequest) -> int:
    """How many made-up requests a server is sent at least."""
    return int(request.config.getoption("--requests", default=600))
