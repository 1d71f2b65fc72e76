"""No failure leaves objects that only a full collection would free, because none ever runs.

A frame that an error passed, with a variable that leads to the error, is such garbage; so are two
objects of a connection that refer to each other. A server grew by 9 GB in half an hour from what
its failed checkpoints left.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.contract.driver import ROOT, Server
from tests.crash.garbage.caller import Caller
from tests.crash.garbage.failures import FAILURES, ONE, Failure, good, prepare, refused

_TIMES: Final = 6
# The server has noticed the last hang-up within this time.
_NOTICED_S: Final = 0.25
_COMMAND: Final = (sys.executable, "-m", "tests.crash.garbage.child", "serve")


@contextlib.contextmanager
def _serving(folder: Path, **env: str) -> Iterator[tuple[Server, Caller]]:
    server = Server(folder, {"PYTHONPATH": str(ROOT), **env}, command=_COMMAND)
    server.start()
    port = int((folder / "port").read_text())
    caller = Caller(port, int((folder / "garbage-port").read_text()))
    try:
        yield server, caller
    finally:
        caller.close()
        server.stop()


def _left_by(caller: Caller, work: Failure, first: int) -> dict[str, int]:
    """The kinds of objects of which each failure left at least one."""
    # The first time makes what is kept for later times.
    work(caller, first)
    time.sleep(_NOTICED_S)
    caller.garbage()
    for number in range(first + 1, first + 1 + _TIMES):
        work(caller, number)
    time.sleep(_NOTICED_S)
    return {kind: count for kind, count in caller.garbage().items() if count >= _TIMES}


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Caller]:
    env = {
        "TOPICS_STREAMS_LONG_POLL_MS": "20",
        "TOPICS_STREAMS_SSE_MS": "50",
        "TOPICS_VIEW_AFTER_MS": "20",
    }
    with _serving(tmp_path_factory.mktemp("garbage"), **env) as (_, made):
        prepare(made)
        yield made


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_leaves_nothing_for_the_collector(caller: Caller, name: str) -> None:
    assert _left_by(caller, FAILURES[name], 0) == {}


def _append_and_checkpoint(caller: Caller, number: int) -> None:
    good(caller.post("/v0/topics/log", ONE))
    time.sleep(0.15)


def _append_and_seal(caller: Caller, number: int) -> None:
    good(caller.post("/v0/topics/log", ONE))
    refused(caller.post("/v0/admin/seal", {"topics": ["log"]}), 503)


def _read_what_is_gone(caller: Caller, number: int) -> None:
    path = f"/v0/topics/sealed{number}"
    refused(caller.post(f"{path}/diff", {"from_seq": 0}), 500)
    refused(caller.post(f"{path}/delete", {"match": "t"}), 500)
    refused(caller.call("GET", f"{path}/records/1"), 500)
    refused(caller.call("GET", f"/v1/stream/sealed{number}?offset=-1"), 500)
    caller.hang_up("GET", f"{path}/live?from_seq=0")
    router = f"/v0/routers/r{number}"
    source = {"source": f"sealed{number}", "dest": "dest", "from": "earliest"}
    good(caller.call("PUT", router, source))
    good(caller.call("DELETE", router))


def _back_up(caller: Caller, number: int) -> None:
    good(caller.post("/v0/admin/backup", None))
    for _ in range(1_000):
        state = good(caller.call("GET", "/v0/admin/backup"))
        if state["status"] != "running":
            assert state["status"] == "failed"
            return
        time.sleep(0.01)
    raise AssertionError("the backup does not end")


def test_a_disk_that_fails_leaves_nothing_for_the_collector(tmp_path: Path) -> None:
    backups = tmp_path / "backups"
    backups.mkdir()
    env = {
        "TOPICS_CHECKPOINT_INTERVAL_MS": "100",
        "TOPICS_HOT_RETAIN_SEGMENTS": "0",
        "TOPICS_BACKUP_DIR": str(backups),
    }
    with _serving(tmp_path / "server", **env) as (server, caller):
        good(caller.post("/v0/topics/log", ONE))
        topics = [f"sealed{number}" for number in range(1 + _TIMES)]
        for topic in topics:
            good(caller.post(f"/v0/topics/{topic}", ONE))
        good(caller.post("/v0/admin/seal", {"topics": topics}))
        for file in (server.data_dir / "segments").rglob("*"):
            if file.suffix in {".data", ".idx"}:
                file.unlink()
        backups.rmdir()
        backups.touch()
        found = {"backup": _left_by(caller, _back_up, 0)}
        found["read"] = _left_by(caller, _read_what_is_gone, 0)
        with _not_writable(server.data_dir / "snapshots"):
            found["checkpoint"] = _left_by(caller, _append_and_checkpoint, 0)
        with _not_writable(server.data_dir / "segments"):
            found["seal"] = _left_by(caller, _append_and_seal, 0)
    assert found == {name: {} for name in found}
    assert "checkpoint failed" in server.log.read_text()


@contextlib.contextmanager
def _not_writable(folder: Path) -> Iterator[None]:
    """A file has taken the place of this folder; even root cannot write into it."""
    away = folder.with_name(folder.name + "-away")
    folder.rename(away)
    folder.touch()
    try:
        yield
    finally:
        folder.unlink()
        away.rename(folder)
