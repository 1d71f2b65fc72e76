"""Settings for every test: asyncio as the only event loop, and Hypothesis without a deadline.

`--hypothesis-profile=ci` makes property tests repeat exactly; the default profile explores.
"""

from __future__ import annotations

import gc
import logging
import signal
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.loops import StrictLoop
from tests.order import FilesTogether, scheduler, weights

settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("default")


# A shell's background job ignores Ctrl-C, and the servers that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--door`: the ASGI server or host application through which the contract tests call the
    store.
    """
    doors = ("connection", "uvicorn", "mounted")
    about = "the way in of the contract tests: our connection, plain uvicorn, or mounted in a host"
    parser.addoption("--door", choices=doors, default="connection", help=about)
    about = "random loads that are archived and restored to a moment (12)"
    parser.addoption("--archive-seeds", type=int, default=12, help=about)
    about = "archivers that are killed at some call (16)"
    parser.addoption("--archive-crash-seeds", type=int, default=16, help=about)
    about = "pairs of servers with one archive (4)"
    parser.addoption("--archive-rounds", type=int, default=4, help=about)
    about = "random loads whose segments are damaged and mended from the archive (12)"
    parser.addoption("--mend-seeds", type=int, default=12, help=about)
    parser.addoption("--read-seeds", type=int, default=20, help="random logs that are read (20)")


def _is_not_of_the_machine(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Executing ")


# The machine causes the slow turns that asyncio's debug mode reports, so tests of logs do not see
# these reports.
logging.getLogger("asyncio").addFilter(_is_not_of_the_machine)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the long files first and the unit tests last, so that all cores are busy to the end.

    Every process of a parallel run sorts alike. The tests of a file stay together, in their order.
    """
    long = weights(items)
    unit = Path(__file__).parent / "unit"
    items.sort(key=lambda item: (-long[item.path], item.path.is_relative_to(unit)))


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over the collected tests.

    They live to the end, and a collection that examined them would take a third of a second.
    Hypothesis searches for what refers to its random numbers, among objects that are not frozen, at
    its first run: so the first run comes before.
    """
    _first_run()
    gc.freeze()


@settings(max_examples=1, database=None)
@given(st.none())
def _first_run(nothing: None) -> None:
    assert nothing is None


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> FilesTogether | None:
    """See `tests.order.scheduler`."""
    return scheduler(config, log)


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    """Tests marked `anyio` run on asyncio, the only supported loop, in debug mode.

    Debug mode refuses calls into the loop from another thread, which could corrupt state.
    """
    return "asyncio", {"debug": True, "loop_factory": StrictLoop}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Make reports that a worker process can send: the log of a test may contain lone
    surrogates.
    """
    report = yield
    report.sections = [
        (name, text.encode("utf-8", "replace").decode()) for name, text in report.sections
    ]
    return report
