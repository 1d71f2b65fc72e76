"""A server that archives into a bucket, and restores from it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.cloud.signing import KEY, SECRET
from tests.contract.conftest import NewServer
from tests.contract.driver import Api, eventually, good
from topics_server.archive.continuous.places.cloud import open_cloud
from topics_server.archive.continuous.places.retrying import RetryingStore
from topics_server.archive.object_store import read_whole

KEYS = (SECRET, KEY)


def figure(api: Api, name: str) -> float:
    shown = good(api.http.get("/v0/metrics", headers={"Accept": "application/json"}))
    return float(shown[f"topics_archive_{name}"])


def archived(api: Api) -> None:
    def is_done() -> bool:
        return figure(api, "lag_seconds") == 0 and figure(api, "base_timestamp_ms") > 0

    eventually(is_done, "everything is archived", within_s=60)


def topics(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "topics_server", *words],
        env={**os.environ, **environment},
        capture_output=True,
        check=False,
    )


def lines(ran: subprocess.CompletedProcess[bytes]) -> list[Any]:
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_bucket_is_an_archive(
    own: NewServer, environment: dict[str, str], tmp_path: Path
) -> None:
    url = f"s3://archives/{tmp_path.name}"
    server = own(
        TOPICS_ARCHIVE_URL=url,
        TOPICS_SEGMENT_MAX_EVENTS="10",
        TOPICS_ARCHIVE_BASE_INTERVAL_MS="1000",
        **environment,
    )
    api = server.start()
    api.put("t", {"durability": "fsync"})
    api.add("t", *range(25))
    archived(api)
    api.add("t", *range(25, 30))
    archived(api)
    # The server is killed in the middle: the lock of a base may stay, and the restarted server
    # takes it as its own.
    server.signal(signal.SIGKILL)
    api = server.start()
    api.add("t", *range(30, 40))
    eventually(lambda: figure(api, "bases_total") >= 1, "another base", within_s=60)
    archived(api)
    assert figure(api, "stopped") == 0
    server.stop()
    (found,) = lines(topics(environment, "archive", "verify", url, "--json"))
    assert (found["problems"], found["stretches"]) == ([], 1)
    assert len(lines(topics(environment, "archive", "ls", url, "--json"))) >= 2
    lines(topics(environment, "restore", url, str(tmp_path / "seq"), "--to-seq", "t=27", "--json"))
    (pruned,) = lines(
        topics(environment, "archive", "prune", url, "--keep", "1", "--yes", "--json")
    )
    assert pruned["removed"]
    (found,) = lines(topics(environment, "archive", "verify", url, "--json"))
    assert found["problems"] == []
    lines(topics(environment, "restore", url, str(tmp_path / "newest"), "--json"))
    for name, count in (("seq", 30), ("newest", 40)):
        other = own(TOPICS_DATA_DIR=str(tmp_path / name)).start()
        assert [each["data"] for each in other.read_all("t")] == list(range(count))
    told = server.log.read_text()
    assert not any(key in told for key in KEYS)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_second_server_leaves_the_bucket_alone(
    own: NewServer, environment: dict[str, str], tmp_path: Path
) -> None:
    url = f"s3://archives/{tmp_path.name}"
    first = own(TOPICS_ARCHIVE_URL=url, **environment)
    api = first.start()
    api.add("t", 1)
    archived(api)
    second = own(TOPICS_ARCHIVE_URL=url, **environment)
    other = second.start()
    eventually(lambda: figure(other, "stopped") == 1, "it stops", within_s=60)
    api.add("t", 2)
    archived(api)
    assert figure(api, "stopped") == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_store_that_is_away_is_waited_for(own: NewServer, tmp_path: Path) -> None:
    away = {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": KEYS[1],
        "AWS_SECRET_ACCESS_KEY": KEYS[0],
    }
    server = own(TOPICS_ARCHIVE_URL="s3://archives/away", **away)
    api = server.start()
    api.add("t", 1)
    assert [each["data"] for each in api.read_all("t")] == [1]
    eventually(lambda: figure(api, "errors_total") >= 1, "it is noticed", within_s=60)
    server.stop()
    told = server.log.read_text()
    assert not any(key in told for key in KEYS)


def test_of_two_puts_under_one_name_the_first_counts(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store checks the condition itself; the client does not look before the put."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    store = RetryingStore(open_cloud(f"s3://archives/{tmp_path.name}", "", 0))
    won = []

    def put(writer: int) -> None:
        for number in range(10):
            if store.put_if_absent(f"parts/{number}", [b"%d" % writer]):
                won.append((number, writer))

    threads = [threading.Thread(target=put, args=(writer,)) for writer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(number for number, _ in won) == list(range(10))
    for number, writer in won:
        assert read_whole(store, f"parts/{number}") == b"%d" % writer
