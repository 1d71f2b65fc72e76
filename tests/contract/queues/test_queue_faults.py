"""§10 when the disk is slow, full or broken, and when the server stops meanwhile.

Each test has a server of its own. A limit on the file size acts as a full disk; syncs are made to
stall or fail from outside (`tests/contract/faults`).
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.contract.conftest import NewServer
from tests.contract.driver import ROOT, Json, Server, eventually, refused
from tests.contract.queues.queues import LONG_MS, SHORT_MS, Queue, seqs_of, tokens_of

FAULTS = str(ROOT / "tests" / "contract" / "faults")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="no prlimit, no fdatasync")


def _faulty(own: NewServer, fault: Path) -> Server:
    return own(PYTHONPATH=FAULTS, CONTRACT_SYNC_FAULT=str(fault), TOPICS_WAL_SHARDS="1")


@contextmanager
def _full_disk(server: Server) -> Iterator[None]:
    """While this holds, no file of the server grows beyond 4 KiB."""
    assert server.process is not None
    limits = resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        yield
    finally:
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, limits)


def test_a_job_with_an_ack_in_flight_is_given_to_no_worker(
    own: NewServer, topic: str, tmp_path: Path
) -> None:
    """Contract §10.4, §10.3 [10.4-08, 10.4-05]: the job is not given away even past its deadline; a
    repeated ack waits for the first.
    """
    fault = tmp_path / "fault"
    queue = Queue.made(_faulty(own, fault).start(), topic, durable=True)
    queue.add("job")
    [job] = queue.take("a", lease_ms=SHORT_MS)
    fault.write_text("1.5")
    with ThreadPoolExecutor(2) as pool:
        acks = [pool.submit(queue.ack, "a", [1], lease_ids=tokens_of([job])) for _ in range(2)]
        claims = 0
        while not any(ack.done() for ack in acks):
            assert queue.take("b") == []
            claims += 1
        answers = [ack.result(15) for ack in acks]
    fault.unlink()
    assert claims > 3
    assert any(answer["acked"] == 1 for answer in answers)
    assert all(answer["acked"] + len(answer["skipped"]) == 1 for answer in answers)
    assert max(answer["performance"]["fsync_ms"] for answer in answers) >= 1000
    assert queue.take("b") == []
    assert (queue.counts(), queue.state()["count"]) == ((0, 0, 0), 0)


def test_soft_leases_wait_for_no_disk(own: NewServer, topic: str, tmp_path: Path) -> None:
    """Contract §10.1 [10.1-04]: durable ones do."""
    fault = tmp_path / "fault"
    api = _faulty(own, fault).start()
    soft = Queue.made(api, f"{topic}.soft", lease_ms=LONG_MS)
    durable = Queue.made(api, f"{topic}.durable", leases_durable=True, lease_ms=LONG_MS)
    for queue in (soft, durable):
        queue.add(1, 2)
    fault.write_text("1.5")
    took: list[float] = []
    for queue in (soft, durable):
        began = time.monotonic()
        assert len(queue.take("w")) == 1
        took.append(time.monotonic() - began)
    fault.unlink()
    assert took[0] < 1.3
    assert took[1] >= 1.4


def test_a_full_disk_leases_nothing_durably_and_loses_nothing(own: NewServer, topic: str) -> None:
    """Contract §10.2, §10.8, settled rules [10.2-17, 10.8-06]: a claim gets 429 and leases nothing;
    a stream gets an error and continues.
    """
    server = own(TOPICS_WAL_SHARDS="1")
    api = server.start()
    durable = Queue.made(api, f"{topic}.durable", leases_durable=True, lease_ms=LONG_MS)
    soft = Queue.made(api, f"{topic}.soft", lease_ms=LONG_MS)
    for queue in (durable, soft):
        queue.add(*range(5))
    soft.add("x" * 100_000)
    with _full_disk(server):
        answer = durable.post("claim", {"node": "w", "max": 2})
        assert refused(answer, 429, "throttled")["limit"] == "disk"
        assert int(answer.headers["retry-after"]) > 0
        assert (durable.counts(), durable.held()) == ((5, 0, 0), [])
        assert len(soft.take("w", 2)) == 2
        stream = durable.work("w", max=3)
        event = stream.event()
        assert (event.name, json.loads(event.data)["code"]) == ("error", 429)
    jobs: list[Json] = []
    while len(jobs) < 3:
        event = stream.event()
        if event.name == "job":
            jobs.append(json.loads(event.data))
    assert seqs_of(jobs) == [1, 2, 3]
    assert durable.ack("w", [1, 2, 3], lease_ids=tokens_of(jobs))["acked"] == 3
    stream.close()


def test_a_broken_disk_refuses_acks_and_durable_claims(
    own: NewServer, topic: str, tmp_path: Path
) -> None:
    """Contract §10.2, §10.4, settled rules [10.2-17, 10.4-08]: unacked jobs are there after the
    restart.
    """
    fault = tmp_path / "fault"
    server = _faulty(own, fault)
    api = server.start()
    durable = Queue.made(api, f"{topic}.durable", leases_durable=True, lease_ms=LONG_MS)
    soft = Queue.made(api, f"{topic}.soft", lease_ms=LONG_MS)
    for queue in (durable, soft):
        queue.add(*range(1, 4))
    held = durable.take("w")
    fault.write_text("fail")
    refused(durable.post("claim", {"node": "w"}), 503, "storage_read_only")
    fault.unlink()
    for action in ("ack", "nack", "extend"):
        body = {"node": "w", "seqs": [1], "lease_ms": LONG_MS}
        refused(durable.post(action, body), 503, "storage_read_only")
    refused(durable.post("claim", {"node": "w"}), 503, "storage_read_only")
    # Soft leases need no journal, but their acks do.
    jobs = soft.take("w")
    refused(soft.post("ack", {"node": "w", "seqs": seqs_of(jobs)}), 503, "storage_read_only")
    assert [record["data"] for record in api.read_all(soft.name)] == [1, 2, 3]
    assert soft.nack("w", seqs_of(jobs))["nacked"] == 1

    api = server.crash()
    for queue in (durable, soft):
        queue.api = api
        assert [record["data"] for record in api.read_all(queue.name)] == [1, 2, 3]
    assert durable.ack("w", [1], lease_ids=tokens_of(held))["acked"] == 1
    assert seqs_of(soft.take("x", 9)) == [1, 2, 3]


@pytest.mark.parametrize("jitter_ms", [0, 5000])
def test_a_stopping_server_answers_waiting_claims(
    own: NewServer, topic: str, jitter_ms: int
) -> None:
    """Contract §10.2, §0.6 [10.2-14]: the claims are answered at once, without jobs; the stop is
    clean.
    """
    server = own()
    queue = Queue.made(server.start(), topic, claim_jitter_ms=jitter_ms)
    wait_ms = 0 if jitter_ms else 30_000
    with ThreadPoolExecutor(3) as pool:
        clients = [httpx.Client(base_url=queue.api.url, timeout=60) for _ in range(3)]
        body = {"node": "w", "wait_ms": wait_ms}
        waiting = [pool.submit(c.post, f"{queue.path}/claim", json=body) for c in clients]
        for _ in range(20):
            queue.state()
        assert not any(future.done() for future in waiting)
        began = time.monotonic()
        assert server.process is not None
        server.process.send_signal(signal.SIGTERM)
        answers = [future.result(30) for future in waiting]
        eventually(lambda: server.process is None or server.process.poll() is not None, "it ends")
        assert time.monotonic() - began < 4.5
        for client in clients:
            client.close()
    assert server.process.wait() == 0
    for answer in answers:
        if answer.status_code == 503:
            refused(answer, 503, "shutting_down")
        else:
            assert (answer.status_code, answer.json()["claimed"]) == (200, [])
    server.process = None
    queue.api = server.start()
    assert (queue.held(), queue.counts()) == ([], (0, 0, 0))
