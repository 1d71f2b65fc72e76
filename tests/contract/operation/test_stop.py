"""SIGTERM during a recovery and during a checkpoint: real processes, and their data afterwards.

The test prints the duration of each stop; its high limit only proves that the server ends by
itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.contract.conftest import NewServer
from tests.contract.driver import ROOT, Api, Json, Server, eventually, good
from tests.contract.queues.queues import LONG_MS, Queue, seqs_of

FAULTS: Final = str(ROOT / "tests" / "contract" / "faults")
BATCH: Final = 5_000
BATCHES: Final = 30
ENDS_WITHIN_S: Final = 60.0
pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="other systems do not sync by os.fdatasync"
)


@contextlib.contextmanager
def sigterm(server: Server, what: str) -> Iterator[None]:
    """Send SIGTERM and wait for the end, which must be clean."""
    assert server.process is not None
    assert server.process.poll() is None
    yield
    process = server.process
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code = process.wait(ENDS_WITHIN_S)
    print(f"\nSIGTERM {what}: ended after {time.monotonic() - began:.3f} s")
    assert code == 0, server.log.read_text()
    server.process = None


def filled(api: Api) -> Json:
    """Fill a store; none of this content may be missing afterwards."""
    for number in range(BATCHES):
        rows = [{"data": number * BATCH + row, "tag": f"t{row % 3}"} for row in range(BATCH)]
        good(api.append("events", rows))
    good(api.put("strict", {"durability": "fsync"}))
    api.add("strict", *range(100))
    good(api.delete("strict", match="none"))
    queue = Queue.made(api, "jobs", leases_durable=True, lease_ms=LONG_MS, durability="fsync")
    queue.add(*range(10))
    queue.ack("w", seqs_of(queue.take("w", 3)))
    queue.take("w", 2)
    good(api.http.put("/v0/routers/r", json={"source": "strict", "dest": "copies"}))
    return held(api)


def held(api: Api) -> Json:
    """The facts of a store: heads, records, leases."""
    pages = api.read_all("events", limit=1000)
    leases = good(api.http.get("/v0/topics/jobs/leases"))["leases"]
    return {
        "events": [(page["$seq"], page["data"]) for page in pages],
        "strict": [record["data"] for record in api.read_all("strict")],
        "jobs": [record["data"] for record in api.read_all("jobs")],
        "leases": [(lease["seq"], lease["lease_id"]) for lease in leases],
        "router": good(api.http.get("/v0/routers/r"))["source"],
    }


def faulty(own: NewServer, fault: Path, **env: str) -> Server:
    """A server whose syncs take as long as the file `fault` says."""
    given = {"PYTHONPATH": FAULTS, "CONTRACT_SYNC_FAULT": str(fault), "TOPICS_WAL_SHARDS": "2"}
    # The test decides when the server seals or captures.
    still = {"TOPICS_CHECKPOINT_INTERVAL_MS": "3600000", "TOPICS_SEGMENT_MAX_EVENTS": "1048576"}
    return own(**{**given, **still, **env})


def progress_of(server: Server, client: httpx.Client) -> float | None:
    """The progress of the server's recovery, 1 when it is ready; None if the answer has no
    progress.
    """
    try:
        port = (server.directory / "port").read_text().strip()
        answer = client.get(f"http://127.0.0.1:{port}/v0/ready")
    except (OSError, ValueError, httpx.HTTPError):
        return None
    if answer.status_code == 200:
        return 1.0
    detail: Any = answer.json().get("error", {}).get("detail", {})
    found = detail.get("replay_progress")
    return float(found) if isinstance(found, int | float) else None


def wait_for_recovery(server: Server, *, is_replaying: bool) -> float:
    """Wait until the server is in the middle of its recovery; returns the progress of its replay.
    On a busy machine the replay may be over before the test sees it: then the server starts once
    more.
    """
    began = time.monotonic()
    with httpx.Client(trust_env=False, timeout=20) as client:
        while True:
            progress = progress_of(server, client)
            if progress is not None and (0 < progress < 1 if is_replaying else is_late(began)):
                return progress
            if progress == 1.0 and is_replaying and "ready on" in server.log.read_text():
                server.signal(signal.SIGKILL)
                server.process = server.spawn()
            assert time.monotonic() - began < ENDS_WITHIN_S, server.log.read_text()


def is_late(began: float) -> bool:
    """Whether the server waits for its first syncs: no step before them takes a second."""
    return time.monotonic() - began > 1


@pytest.mark.parametrize("when", ["replaying", "syncing"])
def test_sigterm_in_the_middle_of_a_recovery_loses_nothing(
    own: NewServer, tmp_path: Path, when: str
) -> None:
    """The test stops the server three times in a row, because an interrupted recovery may leave
    files for the next one.
    """
    fault = tmp_path / "fault"
    server = faulty(own, fault)
    expected = filled(server.start())
    server.signal(signal.SIGKILL)
    if when == "syncing":
        fault.write_text("2")
    for _ in range(3):
        server.process = server.spawn()
        with sigterm(server, f"while {when}"):
            progress = wait_for_recovery(server, is_replaying=when == "replaying")
            print(f"\nat {progress:.3f} of the replay")
        assert "ready on" not in server.log.read_text()
    fault.unlink(missing_ok=True)
    api = server.start()
    assert held(api) == expected
    assert api.add("events", "next")["seqs"] == [BATCH * BATCHES + 1]
    server.stop()


def test_sigterm_in_the_middle_of_a_checkpoint_loses_nothing(
    own: NewServer, tmp_path: Path
) -> None:
    fault = tmp_path / "fault"
    # The checkpoint begins after the store was filled, and its snapshot takes long to finish.
    server = faulty(own, fault)
    expected = filled(server.start())
    server.signal(signal.SIGKILL)
    server.env = {**server.env, "TOPICS_CHECKPOINT_INTERVAL_MS": "1000"}
    api = server.start()
    last = BATCH * BATCHES
    fault.write_text("0.4")
    with sigterm(server, "in a checkpoint"):

        def is_unfinished() -> bool:
            nonlocal last
            last += 1
            assert api.add("events", last)["seqs"] == [last]
            return any((server.data_dir / "snapshots").glob("*.tmp"))

        eventually(is_unfinished, "a snapshot is being written", 60)
        before = sorted(os.listdir(server.data_dir / "snapshots"))
        print(f"\nwith {before}")
    fault.unlink()
    # No other checkpoint begins: its file would be there while it is written.
    server.env = {**server.env, "TOPICS_CHECKPOINT_INTERVAL_MS": "3600000"}
    api = server.start()
    now = held(api)
    added = [(seq, seq) for seq in range(BATCH * BATCHES + 1, last + 1)]
    assert now == {**expected, "events": [*expected["events"], *added]}
    assert not list((server.data_dir / "snapshots").glob("*.tmp"))
    server.stop()
