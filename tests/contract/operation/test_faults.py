"""§0.6, §8.2 and settled rules: not ready, shutting down, and a shard with a failed sync.

Each test has a server of its own whose syncs can be made to fail or to stall from outside
(`tests/contract/faults`).
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.contract.conftest import NewServer
from tests.contract.driver import ROOT, Api, Json, Server, eventually, good, refused

FAULTS = str(ROOT / "tests" / "contract" / "faults")
pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="other systems do not sync by os.fdatasync"
)


def _faulty(own: NewServer, fault: Path, **env: str) -> Server:
    return own(PYTHONPATH=FAULTS, CONTRACT_SYNC_FAULT=str(fault), TOPICS_WAL_SHARDS="1", **env)


def test_a_failed_sync_makes_its_shard_read_only_until_a_restart(
    own: NewServer, topic: str, tmp_path: Path
) -> None:
    """Settled rules of the contract [S-33, S-78, 8.3-09]"""
    fault = tmp_path / "fault"
    server = _faulty(own, fault)
    api = server.start()
    api.put(topic, {"durability": "fsync"})
    api.put("soft", {"durability": "disk"})
    api.add(topic, "before")
    api.add("soft", "before")

    fault.write_text("fail")
    lost = api.append(topic, [{"data": "unknown"}])
    refused(lost, 503, "storage_read_only")
    assert int(lost.headers["retry-after"]) > 0
    fault.unlink()

    for name in (topic, "soft"):
        refused(api.append(name, [{"data": 1}]), 503, "storage_read_only")
        refused(api.delete(name, before_seq=2), 503, "storage_read_only")
        assert [r["data"] for r in api.read_all(name)] == ["before"]
        assert api.get_state(name)["head_seq"] == 1
    refused(api.put("new-topic"), 503, "storage_read_only")
    ready = api.http.get("/v0/ready")
    assert ready.status_code == 200
    assert ready.json()["status"] == "degraded"
    assert any(word in ready.text for word in ("read_only", "shard"))
    metrics = api.http.get("/v0/metrics").text.splitlines()
    assert any(x.startswith("topics_wal_read_only") and x.endswith((" 1", " 1.0")) for x in metrics)

    api = server.crash()
    assert good(api.http.get("/v0/ready"))["status"] == "ready"
    datas = [r["data"] for r in api.read_all(topic)]
    assert datas in (["before"], ["before", "unknown"]), "the outcome of that sync was unknown"
    assert api.add(topic, "after")["first_seq"] == len(datas) + 1
    assert [r["data"] for r in api.read_all("soft")] == ["before"]


def test_a_degraded_server_may_be_taken_out_of_rotation(
    own: NewServer, topic: str, tmp_path: Path
) -> None:
    """Settled rules of the contract [S-78]"""
    fault = tmp_path / "fault"
    api = _faulty(own, fault, TOPICS_READY_DEGRADED="503").start()
    api.put(topic, {"durability": "fsync"})
    assert api.http.get("/v0/ready").status_code == 200
    fault.write_text("fail")
    refused(api.append(topic, [{"data": 1}]), 503, "storage_read_only")
    fault.unlink()
    assert api.http.get("/v0/ready").status_code == 503
    assert api.http.get("/v0/health").status_code == 200


def test_fsync_waits_for_the_sync_and_other_classes_do_not(
    own: NewServer, topic: str, tmp_path: Path
) -> None:
    """§2, §0.10: each class waits for what it promises. [2-25, 0.10-20, 0.9-04, 0.9-03]"""
    fault = tmp_path / "fault"
    api = _faulty(own, fault).start()
    for durability in ("ephemeral", "memory", "disk", "fsync"):
        api.put(durability, {"durability": durability})
        api.add(durability, "warm")
    fault.write_text("1.5")
    for durability in ("ephemeral", "memory", "disk"):
        assert good(api.append(durability, [{"data": 1}]))["performance"]["fsync_ms"] == 0
    started = time.monotonic()
    body = good(api.append("fsync", [{"data": 1}]))
    fault.unlink()
    assert time.monotonic() - started >= 1.4
    assert body["performance"]["fsync_ms"] >= 1000


def test_an_unsynced_record_of_class_fsync_is_not_visible(
    own: NewServer, topic: str, tmp_path: Path
) -> None:
    """§2: readers get nothing that could still be lost. [2-25, 0.10-20]"""
    fault = tmp_path / "fault"
    api = _faulty(own, fault).start()
    api.put(topic, {"durability": "fsync"})
    fault.write_text("1.5")
    client = Api(api.url)
    answers: list[Json] = []
    thread = threading.Thread(target=lambda: answers.append(client.add(topic, "late")))
    thread.start()
    time.sleep(0.5)
    assert api.read(topic)["records"] == []
    assert api.get_state(topic)["head_seq"] == 0
    thread.join(30)
    fault.unlink()
    client.close()
    assert answers[0]["seqs"] == [1]
    assert [r["data"] for r in api.read_all(topic)] == ["late"]


def _poll(url: str, seen: dict[str, list[httpx.Response]], until: Callable[[], bool]) -> None:
    with httpx.Client(base_url=url, timeout=30, trust_env=False) as client:
        for _ in range(2_000):
            for path in ("/v0/ready", "/v0/health", "/v0/metrics", "/v0/topics"):
                try:
                    seen.setdefault(path, []).append(client.get(path))
                except httpx.TransportError:
                    break
            if until():
                return
            time.sleep(0.01)


def test_a_replaying_server_answers_probes_and_refuses_the_rest(
    own: NewServer, tmp_path: Path
) -> None:
    """Contract §0.6, §8 [0.6-13, 8.2-02, 8.3-12, 8.1-01]"""
    fault = tmp_path / "fault"
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    server = _faulty(own, fault, TOPICS_PORT=str(port))
    api = server.start()
    for number in range(50):
        api.add(f"t{number}", *range(50))
    server.signal(signal.SIGKILL)
    # From now on the syncs of recovery take long.
    fault.write_text("0.5")
    server.process = server.spawn()
    seen: dict[str, list[httpx.Response]] = {}

    def ready() -> bool:
        return any(r.status_code == 200 for r in seen.get("/v0/ready", []))

    _poll(f"http://127.0.0.1:{port}", seen, ready)
    fault.unlink()
    assert ready()

    early = [r for r in seen["/v0/ready"] if r.status_code == 503]
    assert early, "no probe was answered during the replay"
    for answer in early:
        progress = refused(answer, 503, "not_ready")["replay_progress"]
        assert 0 <= progress <= 1
        assert int(answer.headers["retry-after"]) > 0
    turned_away = [r for r in seen["/v0/topics"] if r.status_code != 200]
    assert turned_away
    for answer in turned_away:
        refused(answer, 503, "not_ready")
        assert int(answer.headers["retry-after"]) > 0
    assert {r.status_code for r in seen["/v0/health"]} == {200}
    assert {r.status_code for r in seen["/v0/metrics"]} == {200}
    assert "\ntopics_ready 0" in seen["/v0/metrics"][0].text


def test_a_draining_server_answers_shutting_down_on_open_connections(own: NewServer) -> None:
    """Contract §0.6, §8.2 [0.6-14, 8.2-03]"""
    told: dict[str, int] = {}
    # A server closes idle connections at once, so a request must come in between: try it often.
    for _ in range(40):
        server = own()
        url = server.start().url
        stopping = threading.Event()

        def hammer(
            path: str, url: str = url, server: Server = server, go: threading.Event = stopping
        ) -> None:
            with httpx.Client(base_url=url, timeout=10, trust_env=False) as client:
                for _ in range(20_000):
                    try:
                        answer = client.get(path)
                    except httpx.TransportError:
                        return
                    if answer.status_code == 200:
                        continue
                    assert go.is_set()
                    refused(answer, 503, "shutting_down")
                    assert int(answer.headers["retry-after"]) > 0
                    told[path] = told.get(path, 0) + 1

        threads = [
            threading.Thread(target=hammer, args=(path,)) for path in ("/v0/ready", "/v0/topics")
        ]
        for thread in threads:
            thread.start()
        time.sleep(0.1)
        stopping.set()
        server.stop()
        for thread in threads:
            thread.join(20)
        if len(told) == 2:
            return
    raise AssertionError(f"forty servers stopped without telling anybody: {told}")


DEFAULTS = {
    "TOPICS_HOST": "127.0.0.1",
    "TOPICS_PORT": "4000",
    "TOPICS_DATA_DIR": "topics-data",
    "TOPICS_SEGMENT_MAX_EVENTS": "65536",
    "TOPICS_SEGMENT_MAX_BYTES": "67108864",
    "TOPICS_SEGMENT_MAX_AGE_MS": "600000",
    "TOPICS_HOT_RETAIN_SEGMENTS": "4",
    "TOPICS_HOT_RETAIN_BYTES": "0",
    "TOPICS_WAL_FSYNC_INTERVAL_MS": "200",
    "TOPICS_MAX_BATCH_RECORDS": "10000",
    "TOPICS_MAX_RECORD_BYTES": "1048576",
    "TOPICS_MAX_BODY_BYTES": "67108864",
    "TOPICS_MAX_META_BYTES": "16384",
    "TOPICS_MAX_TAG_BYTES": "256",
    "TOPICS_MAX_NODE_BYTES": "128",
    "TOPICS_MAX_LIMIT": "1000",
    "TOPICS_MAX_TOPICS": "100000",
    "TOPICS_MAX_TOTAL_BYTES": "0",
    "TOPICS_DATA_DIR_MODE": "0700",
}


def test_the_defaults_are_those_of_the_contract(own: NewServer) -> None:
    """Contract §2, §11, settled rules [S-79, S-09, S-14, 2-22, S-80, S-12]"""
    server = own(TOPICS_PORT="", TOPICS_PORT_FILE="", TOPICS_DATA_DIR="")
    server.directory.mkdir(parents=True)
    shown = subprocess.run(
        [sys.executable, "-m", "topics_server", "config"],
        env=server.environment(),
        cwd=server.directory,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    ).stdout
    lines = shown.splitlines()
    for name, value in DEFAULTS.items():
        short = name.removeprefix("TOPICS_").lower()
        about = [x for x in lines if name in x or f'"{short}"' in x]
        assert about, f"{name} is not shown"
        assert any(value in x.replace("_", "") or value in x for x in about), f"{name}: {about}"


def test_a_slow_disk_does_not_stop_readers(own: NewServer, topic: str, tmp_path: Path) -> None:
    """§2, §3: a slow sync delays only its own append. [2-25, 3-07]"""
    fault = tmp_path / "fault"
    api = _faulty(own, fault).start()
    api.put(topic, {"durability": "fsync"})
    api.add(topic, 1)
    fault.write_text("2")
    client = Api(api.url)
    done: list[float] = []

    def write() -> None:
        client.add(topic, 2)
        done.append(time.monotonic())

    thread = threading.Thread(target=write)
    thread.start()
    time.sleep(0.2)
    for _ in range(50):
        assert len(api.read(topic)["records"]) == 1
    finished = time.monotonic()
    thread.join(30)
    fault.unlink()
    client.close()
    assert finished < done[0], "50 reads were answered while one sync was under way"
    eventually(lambda: len(api.read(topic)["records"]) == 2, "the append is visible")
