"""A server that archives and is killed at any moment: its archive stays one complete history."""

from __future__ import annotations

import random
import signal
import threading
from pathlib import Path

import httpx
import pytest

from tests.contract.driver import Api, Server, eventually, good
from topics_server.archive.continuous.history import ArchiveHistory
from topics_server.archive.continuous.places.shared_folder import SharedFolder
from topics_server.archive.continuous.restoring import restore_moment
from topics_server.archive.continuous.verifying import verify_archive
from topics_server.wal.fs import OsFs

FS = OsFs()
KILLS = 4
_ENV = {
    "TOPICS_WAL_SHARDS": "2",
    "TOPICS_SEGMENT_MAX_EVENTS": "50",
    "TOPICS_SEGMENT_MAX_AGE_MS": "200",
    "TOPICS_CHECKPOINT_INTERVAL_MS": "300",
    "TOPICS_WAL_FSYNC_INTERVAL_MS": "20",
    "TOPICS_ARCHIVE_BASE_INTERVAL_MS": "1000",
}
TOPICS = {"a": "fsync", "b": "disk", "c": "memory"}


def write(api: Api, topic: str, stop: threading.Event, stored: dict[str, int]) -> None:
    """Append numbers one after the other, each after the previous one is acknowledged."""
    with httpx.Client(base_url=api.url, timeout=30) as client:
        while not stop.is_set():
            try:
                number = stored[topic]
                body = {"records": [{"data": number}], "idempotency_key": f"{topic}-{number}"}
                if client.post(f"/v0/topics/{topic}", json=body).status_code == 200:
                    stored[topic] = number + 1
            except httpx.HTTPError:
                return


def figure(api: Api, name: str) -> float:
    shown = good(api.http.get("/v0/metrics", headers={"Accept": "application/json"}))
    return float(shown[f"topics_archive_{name}"])


@pytest.mark.crash
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(2))
def test_kills_leave_one_history_without_a_gap(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    folder = tmp_path / "archive"
    folder.mkdir()
    server = Server(tmp_path / "server", {**_ENV, "TOPICS_ARCHIVE_URL": f"file://{folder}"})
    stored = dict.fromkeys(TOPICS, 0)
    api = server.start()
    for topic, durability in TOPICS.items():
        api.put(topic, {"durability": durability})
    try:
        for kill in range(KILLS):
            stop = threading.Event()
            writers = [
                threading.Thread(target=write, args=(api, topic, stop, stored)) for topic in TOPICS
            ]
            for writer in writers:
                writer.start()
            wanted = rng.randrange(1, 3)
            eventually(lambda: figure(api, "parts_total") >= wanted, "parts", within_s=60)  # noqa: B023
            server.signal(signal.SIGKILL)
            stop.set()
            for writer in writers:
                writer.join()
            api = server.start()
            # Within the same boot, everything written before the kill still exists.
            for topic in TOPICS:
                head = api.get_state(topic)["head_seq"]
                assert head >= stored[topic], f"kill {kill}"
                stored[topic] = head
        for topic in TOPICS:
            api.add(topic, "last")

        def is_archived() -> bool:
            return figure(api, "lag_seconds") == 0 and figure(api, "base_timestamp_ms") > 0

        eventually(is_archived, "everything is archived", within_s=60)
        assert (figure(api, "gaps_total"), figure(api, "stopped")) == (0, 0)
        expected = {topic: [each["data"] for each in api.read_all(topic)] for topic in TOPICS}
    finally:
        server.signal(signal.SIGKILL)
    store = SharedFolder.open(FS, str(folder))
    found = verify_archive(store)
    assert (found.problems, found.stretches) == ([], 1)
    restore_moment(FS, store, str(tmp_path / "newest"), lambda moments: moments.newest())
    assert records(tmp_path, "newest") == expected
    history = ArchiveHistory(store)
    ts_ms = history.facts(rng.choice(history.numbers())).ts_ms
    restore_moment(FS, store, str(tmp_path / "then"), lambda moments: moments.at_time(ts_ms))
    for topic, data in records(tmp_path, "then").items():
        assert data == expected[topic][: len(data)], f"{topic} at {ts_ms}"


def records(tmp_path: Path, name: str) -> dict[str, list[object]]:
    """All records of a restored store."""
    server = Server(tmp_path / f"server-{name}", {**_ENV, "TOPICS_DATA_DIR": str(tmp_path / name)})
    api = server.start()
    try:
        names = [each["topic"] for each in good(api.topics())["topics"]]
        return {each: [record["data"] for record in api.read_all(each)] for each in names}
    finally:
        server.stop()
