"""Options of the crash tests: `./run test-crash --cycles 1000 --seeds 10000`, and of watchers:
`--watchers 200 --kills 20`, `--slow-sockets 1000 --load-mb 50`, `--idle-streams 2000`, and of
workers: `--jobs 100000 --workers 16 --kills 50`, and of requests made up from the description:
`--requests 50000`, and of a flood: `--flood 600 --flood-appends 60`, and of uploads: `--uploads 200
--upload-mib 60`, and of full disks: `--disk-mib 1024`, and of views: `--view-kills 200 --view-seeds
2000 --view-queries 100000`, and of conditions: `--decisions 10000 --consumers 1000 --kills 50`.

The defaults are small enough for `.ci/run`. They hold too when this file is loaded late (a run over
all of `tests`), where pytest has parsed its command line already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest

# Option, default and meaning. The type of the default is the option's.
OPTIONS: Final[dict[str, tuple[int | str, str]]] = {
    "cycles": (5, "kill -9 cycles"),
    "seeds": (200, "simulated disks"),
    "first-seed": (1, "the first seed"),
    "watchers": (24, "watchers in a storm"),
    "kills": (2, "kills in a storm"),
    "disk-mib": (32, "of a disk that is filled"),
    "jobs": (1500, "jobs in a chaos of workers"),
    "workers": (4, "worker processes"),
    "slow-sockets": (60, "sockets never read"),
    "load-mb": (5, "MB/s written past them"),
    "requests": (600, "made-up requests"),
    "fuzz": (2000, "requests changed at random"),
    "half-open": (200, "connections never used"),
    "never-reading": (20, "clients that never read"),
    "stream-kills": (2, "of a Spark query"),
    "flood": (128, "connections of a flood"),
    "flood-appends": (10, "honest appends a topic"),
    "misfortunes": (150, "simulated lives"),
    "misfortune-kinds": ("", "kinds for every life (two, by seed)"),
    "damage-cases": (250, "of each end, 0: all"),
    "damage-only": ("", "damage files like this"),
    "damage-kinds": ("", "damage them so: cut,flipped,... (all)"),
    "uploads": (40, "uploads that stall"),
    "upload-mib": (4, "MiB of each of them"),
    "idle-streams": (200, "streams without news"),
    "view-kills": (6, "kills of a server with views"),
    "view-seeds": (40, "simulated lives of views"),
    "view-queries": (640, "queries raced with appends"),
    "decisions": (400, "appends under conditions"),
    "consumers": (60, "consumers that commit"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add all options; `--seed` is another name of `--first-seed`."""
    group = parser.getgroup("crash tests")
    for name, (default, meaning) in OPTIONS.items():
        more = ["--seed"] if name == "first-seed" else []
        text = f"{meaning} ({default})" if isinstance(default, int) else meaning
        group.addoption(f"--{name}", *more, type=type(default), default=default, help=text)


def _given(name: str) -> Callable[..., Any]:
    """Make the fixture of an option."""

    @pytest.fixture(name=name.replace("-", "_"))
    def value(request: pytest.FixtureRequest) -> int:
        return int(request.config.getoption(f"--{name}", default=OPTIONS[name][0]))

    return value


cycles = _given("cycles")
first_seed = _given("first-seed")
watchers = _given("watchers")
kills = _given("kills")
jobs = _given("jobs")
workers = _given("workers")
slow_sockets = _given("slow-sockets")
load_mb = _given("load-mb")
idle_streams = _given("idle-streams")
requests = _given("requests")
view_kills = _given("view-kills")
view_seeds = _given("view-seeds")
view_queries = _given("view-queries")
decisions = _given("decisions")
consumers = _given("consumers")


@pytest.fixture
def seeds(request: pytest.FixtureRequest, first_seed: int) -> range:
    """The seeds of the simulated disks."""
    return range(first_seed, first_seed + int(request.config.getoption("--seeds", default=200)))
