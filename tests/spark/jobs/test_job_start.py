"""A starting job prints what it waits for. The test has no JVM: a stand-in replaces the session."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spark_jobs.running import job


class Session:
    """The part of a session that `job.run` uses."""

    version = "4.3"
    sparkContext = SimpleNamespace(master="local[2]")

    def __init__(self) -> None:
        self.is_stopped = False

    def stop(self) -> None:
        """Note the stop."""
        self.is_stopped = True


def ran(
    monkeypatch: pytest.MonkeyPatch, folder: Path, said: list[str], *, is_running: bool
) -> Session:
    """Run a job that does nothing; `said` gets its messages and the events between them."""
    session = Session()

    def started(name: str, *, master: str | None) -> Session:
        said.append(f"-- {name} on {master}")
        return session

    def work(_spark: Any, _given: Any) -> None:
        said.append("-- work")

    monkeypatch.setattr(job, "is_running", lambda: is_running)
    monkeypatch.setattr(job, "spark_session", started)
    monkeypatch.setattr(job, "say", said.append)
    given = job.parser_of("sessions", "about").parse_args([str(folder), "--master", "local[2]"])
    assert job.run("sessions", given, work) == 0
    return session


def test_each_wait_is_named_before_it_begins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said: list[str] = []
    session = ran(monkeypatch, tmp_path, said, is_running=False)
    said[2] = re.sub(r"after [0-9.]+ s", "after 0.0 s", said[2])
    assert said == [
        "topics jobs sessions: waiting for Spark to start (a JVM: some seconds)",
        "-- topics sessions on local[2]",
        "Spark 4.3 started after 0.0 s, on local[2]",
        f"computing the result from the sealed segments of {tmp_path}",
        "-- work",
    ]
    assert session.is_stopped


def test_a_session_that_runs_already_is_neither_announced_nor_stopped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said: list[str] = []
    session = ran(monkeypatch, tmp_path, said, is_running=True)
    assert said[0] == "-- topics sessions on local[2]"
    assert len(said) == 3
    assert not session.is_stopped
