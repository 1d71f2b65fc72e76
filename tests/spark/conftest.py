"""Fixtures of the analytics tests: directories of a real server, and one Spark session for all.

Without pyarrow the whole folder is skipped; without PySpark or a Java the tests that start Spark
are. Each message says what to install. `.ci/run` installs all three, so that it skips nothing.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.contract.driver import Server
from tests.spark import class_archive

HAS_ARROW: Final = importlib.util.find_spec("pyarrow") is not None
HAS_SPARK: Final = HAS_ARROW and importlib.util.find_spec("pyspark") is not None
# The data are small: compiling a plan costs more than interpreting it.
QUICK: Final = {
    "spark.sql.shuffle.partitions": "1",
    "spark.driver.memory": "1g",
    "spark.sql.codegen.wholeStage": "false",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}
for _variable in class_archive.OPTIONS:
    os.environ.setdefault(_variable, class_archive.QUICK)
INSTALL: Final = "./run spark-setup installs it"


class _Skipped(pytest.Module):
    """A module that cannot be imported here."""

    def collect(self) -> list[pytest.Item | pytest.Collector]:
        raise pytest.skip.Exception(f"pyarrow is not installed; {INSTALL}", allow_module_level=True)


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    """Without pyarrow every module of this folder is skipped with the reason."""
    if HAS_ARROW or not module_path.is_relative_to(Path(__file__).parent):
        return None
    module: pytest.Module = _Skipped.from_parent(parent, path=module_path)
    return module


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options for the sizes of the tests."""
    group = parser.getgroup("analytics tests")
    group.addoption("--spark-seeds", type=int, default=12, help="random logs compared (12)")
    group.addoption("--iceberg-kills", type=int, default=3, help="killed runs to Iceberg (3)")
    group.addoption("--pipeline-kills", action="store_true", help="behind each step, everywhere")


@pytest.fixture(scope="session")
def making() -> Iterator[None]:
    """Make the archive of classes beside the tests; its processes end before the tests do."""
    process = class_archive.start_making()
    yield
    if process is not None:
        try:
            process.wait(240)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(autouse=True)
def _archived_classes() -> None:
    """Each Java that a test starts maps the archive as soon as there is one."""
    class_archive.use()


@pytest.fixture(scope="session")
def spark(making: None) -> Iterator[Any]:
    """One session of two cores for all tests: starting one takes seconds."""
    if not HAS_SPARK:
        pytest.skip(f"PySpark is not installed; {INSTALL}")
    from spark_jobs.session import NO_JAVA, find_java, spark_session

    if find_java() is None:
        pytest.skip(NO_JAVA)
    class_archive.use()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        session = spark_session(
            "topics tests",
            master="local[2]",
            config=QUICK,
        )
        yield session
        session.stop()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server for this test alone, not started; it is stopped after the test."""
    made = Server(tmp_path / "server", {"TOPICS_WAL_SHARDS": "1"})
    yield made
    if made.process is not None:
        made.stop()
