"""The promises of the durability classes over a restart, a crash, sealing, relocation, damage.

Each test has a server of its own. Sections §0.10 and §5, and the settled points on storage.
"""

from __future__ import annotations

import resource
import threading
import time
from pathlib import Path

import pytest

from tests.contract.conftest import NewServer
from tests.contract.driver import Api, Json, Server, eventually, good, refused, seqs_of

TINY = {"TOPICS_SEGMENT_MAX_EVENTS": "50", "TOPICS_SEGMENT_MAX_AGE_MS": "200"}
HOWS = ["clean stop", "kill -9"]


def _again(server: Server, how: str) -> Api:
    return server.restart() if how == "clean stop" else server.crash()


def _segments(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.data")) if folder.is_dir() else []


def _whole(api: Api, topic: str) -> list[Json]:
    return api.read_all(topic, include_tags=True, limit=1000)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("durability", ["disk", "fsync"])
def test_acknowledged_records_survive(
    own: NewServer, topic: str, durability: str, how: str
) -> None:
    """Contract §0.10, settled rules [0.10-19, 0.10-20, 2-25]"""
    server = own()
    api = server.start()
    api.put(topic, {"durability": durability, "ttl_ms": 3_600_000})
    for number in range(40):
        api.add(topic, number, tag=f"t{number % 3}", node="n", meta={"k": [number]})
    before = _whole(api, topic)
    state = api.get_state(topic)
    api = _again(server, how)
    assert _whole(api, topic) == before
    after = api.get_state(topic)
    for key in ("head_seq", "earliest_seq", "next_seq", "count", "bytes", "config"):
        assert after[key] == state[key]
    assert api.add(topic, "next")["first_seq"] > 40
    assert api.read(topic)["tombstone"] is None


@pytest.mark.parametrize("how", HOWS)
def test_a_memory_topic_keeps_its_config_and_reuses_no_seq(
    own: NewServer, topic: str, how: str
) -> None:
    """Contract §0.10, settled rules [0.10-18, S-61]"""
    server = own()
    api = server.start()
    api.put(topic, {"durability": "memory", "cap_records": 1000})
    api.add(topic, 1, 2, 3)
    api = _again(server, how)
    config = api.get_state(topic)["config"]
    assert (config["durability"], config["cap_records"]) == ("memory", 1000)
    assert api.add(topic, 4)["first_seq"] >= 4


@pytest.mark.parametrize("how", HOWS)
def test_an_ephemeral_topic_keeps_config_and_head_and_reports_the_loss(
    own: NewServer, topic: str, how: str
) -> None:
    """Contract §0.10, settled rules [0.10-17, S-38, S-42]"""
    server = own()
    api = server.start()
    api.put(topic, {"durability": "ephemeral", "priority": 9})
    api.add(topic, 1, 2, 3)
    api = _again(server, how)
    state = api.get_state(topic)
    assert (state["config"]["durability"], state["config"]["priority"]) == ("ephemeral", 9)
    assert state["count"] == 0
    assert state["head_seq"] >= 3
    if how == "clean stop":
        assert state["head_seq"] == 3
    page = api.read(topic)
    assert page["records"] == []
    assert page["tombstone"]["reason"] == "restart"
    assert page["tombstone"]["gap_from"] == 1
    assert page["tombstone"]["gap_to"] >= 3
    made = api.add(topic, "new")
    assert made["first_seq"] == state["head_seq"] + 1
    page = api.read(topic)
    assert page["tombstone"]["gap_to"] == state["head_seq"]
    assert [r["data"] for r in page["records"]] == ["new"]


@pytest.mark.parametrize("how", HOWS)
def test_deleted_records_stay_deleted(own: NewServer, topic: str, how: str) -> None:
    """Contract §5 [5-17, 5-18]"""
    server = own()
    api = server.start()
    for number in range(30):
        api.add(topic, number, tag=f"t{number % 3}")
    api.delete(topic, match="t1")
    api.delete(topic, before_seq=10)
    before = _whole(api, topic)
    assert len(before) == 14
    api = _again(server, how)
    assert _whole(api, topic) == before
    assert api.read(topic)["tombstone"] is None
    assert good(api.delete(topic, match="t1"))["deleted"] == 0


@pytest.mark.parametrize("how", HOWS)
def test_deleting_the_newest_records_does_not_free_their_seqs(
    own: NewServer, topic: str, how: str
) -> None:
    """Contract §5 [5-16, 5-17]"""
    server = own()
    api = server.start()
    api.add(topic, *range(10))
    api.delete(topic, before_seq=11)
    api = _again(server, how)
    assert api.get_state(topic)["head_seq"] == 10
    assert api.add(topic, "x")["seqs"] == [11]


@pytest.mark.parametrize("how", HOWS)
def test_deletes_of_sealed_records_stay(own: NewServer, topic: str, how: str) -> None:
    """Contract §5 [5-17, 5-18, S-11]"""
    server = own(**TINY)
    api = server.start()
    for number in range(400):
        api.add(topic, number, tag=f"t{number % 4}")
    eventually(lambda: len(_segments(server.data_dir)) >= 4, "segments appear", within_s=20)
    assert good(api.delete(topic, match="t1"))["deleted"] == 100
    assert good(api.delete(topic, match=["tag", "Glob", "t2*"], before_seq=201))["deleted"] == 50
    assert good(api.delete(topic, before_seq=31))["deleted"] > 0
    before = _whole(api, topic)
    api = _again(server, how)
    assert _whole(api, topic) == before
    api = _again(server, how)
    assert _whole(api, topic) == before
    assert api.read(topic)["tombstone"] is None


def test_sealing_changes_no_answer(own: NewServer, topic: str) -> None:
    """Settled rules of the contract [S-11]"""
    server = own(**TINY)
    api = server.start()
    for number in range(300):
        api.append(topic, [{"data": {"n": number}, "tag": f"t{number % 5}", "meta": {"m": 1}}])
    before = _whole(api, topic)
    state = api.get_state(topic)
    eventually(lambda: len(_segments(server.data_dir)) >= 3, "segments appear", within_s=20)
    assert _whole(api, topic) == before
    assert api.read(topic, from_seq=77, limit=100)["records"][0]["$seq"] == 78
    after = api.get_state(topic)
    for key in ("head_seq", "earliest_seq", "count", "bytes"):
        assert after[key] == state[key]
    assert good(api.delete(topic, match="t3"))["deleted"] == 60
    api = server.restart()
    assert _whole(api, topic) == [r for r in before if r["$tag"] != "t3"]


def test_segments_are_sealed_by_size_as_well(own: NewServer, topic: str) -> None:
    """Settled rules of the contract [S-11]"""
    server = own(TOPICS_SEGMENT_MAX_BYTES="100000")
    api = server.start()
    sealed = 0
    for _ in range(3):
        api.add(topic, *["x" * 10_000] * 20)

        def is_sealed(before: int = sealed) -> bool:
            return len(_segments(server.data_dir)) > before

        eventually(is_sealed, "another segment appears", within_s=20)
        sealed = len(_segments(server.data_dir))
    assert len(_whole(api, topic)) == 60


def test_moving_to_the_cold_folder_changes_no_answer(
    own: NewServer, topic: str, tmp_path: Path
) -> None:
    """Settled rules of the contract [S-12]"""
    cold = tmp_path / "cold"
    server = own(TOPICS_COLD_DIR=str(cold), TOPICS_HOT_RETAIN_SEGMENTS="1", **TINY)
    api = server.start()
    for number in range(400):
        api.add(topic, number, tag=f"t{number % 4}")
    before = _whole(api, topic)
    eventually(lambda: len(_segments(cold)) >= 3, "segments reach the cold folder", within_s=30)
    assert _whole(api, topic) == before
    assert good(api.delete(topic, match="t1"))["deleted"] == 100
    left = [r for r in before if r["$tag"] != "t1"]
    assert _whole(api, topic) == left
    api = server.crash()
    assert _whole(api, topic) == left


@pytest.mark.parametrize("how", HOWS)
def test_evicted_records_never_come_back(own: NewServer, topic: str, how: str) -> None:
    """Settled rules of the contract [S-27, 0.10-37]"""
    server = own(**TINY)
    api = server.start()
    api.put(topic, {"cap_records": 60})
    for number in range(200):
        api.add(topic, number)
    eventually(lambda: bool(api.get_state(topic)["count"] <= 60), "count within the cap")
    earliest = api.get_state(topic)["earliest_seq"]
    api.put(topic, {"cap_records": 0})
    api = _again(server, how)
    page = api.read(topic)
    assert page["earliest_seq"] == earliest
    assert (page["tombstone"]["reason"], page["tombstone"]["gap_from"]) == ("cap", 1)
    assert page["tombstone"]["gap_to"] == earliest - 1
    assert seqs_of(page)[0] == earliest
    assert api.get_state(topic)["head_seq"] == 200


@pytest.mark.parametrize("how", HOWS)
def test_expired_records_never_come_back(own: NewServer, topic: str, how: str) -> None:
    """Settled rules of the contract [S-27]"""
    server = own()
    api = server.start()
    api.put(topic, {"ttl_ms": 200})
    api.add(topic, 1, 2)
    time.sleep(0.4)
    api.put(topic, {"ttl_ms": 0})
    api.add(topic, 3)
    api = _again(server, how)
    page = api.read(topic)
    assert [r["data"] for r in page["records"]] == [3]
    assert (page["tombstone"]["reason"], page["tombstone"]["gap_to"]) == ("ttl", 2)


@pytest.mark.parametrize("how", HOWS)
def test_a_deleted_and_recreated_topic_stays_so(own: NewServer, topic: str, how: str) -> None:
    """Contract §1.4 [1.4-01, 1.4-05, 1.4-06]"""
    server = own()
    api = server.start()
    api.add(topic, *range(10), tag="t")
    api.drop(topic)
    api.add(topic, "new")
    api.put("gone", {})
    api.drop("gone")
    api = _again(server, how)
    assert [r["data"] for r in api.read_all(topic)] == ["new"]
    assert api.read(topic, from_seq=9)["tombstone"]["reason"] == "recreated"
    refused(api.state("gone"), 404, "topic_not_found")


@pytest.mark.parametrize("how", HOWS)
def test_configurations_survive(own: NewServer, topic: str, how: str) -> None:
    """Contract §0.10, §1.1 [1.1-01, 1.1-03]"""
    server = own()
    api = server.start()
    api.put(topic, {"type": "queue", "ttl_ms": 1})
    config = good(api.put(topic, {"lease_ms": 500, "dead_letter": "d", "priority": -3}))["config"]
    api = _again(server, how)
    assert api.get_state(topic)["config"] == config
    refused(api.put(topic, {"type": "log"}), 409, "topic_exists_incompatible")


def test_the_number_of_shards_may_change_between_starts(own: NewServer) -> None:
    """Settled rules of the contract [S-10]"""
    server = own(TOPICS_WAL_SHARDS="1")
    api = server.start()
    expected: dict[str, list[Json]] = {}
    for shards in ("4", "2", "3"):
        for number in range(8):
            api.add(f"t{number}", f"before {shards}", tag="t")
        expected = {f"t{number}": _whole(api, f"t{number}") for number in range(8)}
        server.stop()
        server.env = {"TOPICS_WAL_SHARDS": shards}
        api = server.start()
        for name, records in expected.items():
            assert _whole(api, name) == records
    api = server.crash()
    for name, records in expected.items():
        assert _whole(api, name) == records


def test_names_never_become_paths(own: NewServer, tmp_path: Path) -> None:
    """Contract §12 [12-02]"""
    server = own(**TINY)
    api = server.start()
    names = ["SecretName", "dots..dots", "a:b:c", "con", "x" * 255]
    for name in names:
        for number in range(60):
            api.add(name, number)
    server.restart()
    server.stop()
    paths = [str(path.relative_to(server.data_dir)) for path in server.data_dir.rglob("*")]
    assert paths
    for name in names:
        assert not [path for path in paths if name in path and len(name) > 3]
    outside = {path.name for path in server.directory.iterdir()}
    assert {p for p in outside if not p.startswith("log-")} <= {"data", "port"}


def test_the_data_directory_is_private(own: NewServer) -> None:
    """Contract §12, settled rules [12-06, S-80]"""
    server = own()
    server.start()
    assert server.data_dir.stat().st_mode & 0o777 == 0o700


def test_a_damaged_range_is_reported_and_the_rest_is_served(own: NewServer, topic: str) -> None:
    """Settled rules of the contract [S-75, S-38]"""
    server = own(TOPICS_SEGMENT_MAX_EVENTS="50")
    api = server.start()
    for number in range(200):
        api.add(topic, {"n": number, "pad": "p" * 100})
    eventually(lambda: len(_segments(server.data_dir)) >= 3, "segments appear", within_s=20)
    server.stop()
    files = _segments(server.data_dir)
    content = files[1].read_bytes()
    place = content.index(b"pppp") + 20
    files[1].write_bytes(content[:place] + b"X" + content[place + 1 :])
    api = server.start()
    seen: list[int] = []
    gaps: list[Json] = []
    cursor = 0
    for _ in range(50):
        page = api.read(topic, from_seq=cursor)
        seen += [r["data"]["n"] + 1 for r in page["records"]]
        gaps += [page["tombstone"]] if page["tombstone"] else []
        cursor = page["next_from_seq"]
        if page["caught_up"]:
            break
    assert [gap["reason"] for gap in gaps] == ["damaged"]
    lost = set(range(gaps[0]["gap_from"], gaps[0]["gap_to"] + 1))
    assert 1 <= len(lost) <= 100
    assert sorted(lost | set(seen)) == list(range(1, 201))
    assert not lost & set(seen)
    assert len(seen) == len(set(seen))
    assert api.add(topic, {"n": 200})["first_seq"] == 201


def test_a_nearly_full_disk_takes_deletes_but_no_appends(own: NewServer, topic: str) -> None:
    """Contract §0.6, settled rules [S-76, 0.6-11]"""
    server = own()
    api = server.start()
    api.add(topic, *range(10), tag="t")
    api.add("other", 1)
    server.stop()
    server.env = {"TOPICS_MIN_FREE_BYTES": str(2**62)}
    api = server.start()
    answer = api.append(topic, [{"data": 1}])
    assert refused(answer, 429, "throttled")["limit"] == "min_free_bytes"
    assert int(answer.headers["retry-after"]) >= 0
    assert api.get_state(topic)["head_seq"] == 10
    assert len(_whole(api, topic)) == 10
    assert good(api.delete(topic, before_seq=4))["deleted"] == 3
    assert good(api.delete(topic, match="t"))["deleted"] == 7
    assert good(api.drop("other"))["deleted"] is True
    server.stop()
    server.env = {"TOPICS_MIN_FREE_BYTES": "0"}
    api = server.start()
    assert api.add(topic, "room again")["seqs"] == [11]
    refused(api.state("other"), 404, "topic_not_found")


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="limits of another process: Linux")
def test_a_write_the_disk_refuses_is_429_and_loses_nothing(own: NewServer, topic: str) -> None:
    """A file-size limit acts like a full disk; service resumes without a restart. [S-34,
    2-27]
    """
    server = own(TOPICS_WAL_SHARDS="1")
    api = server.start()
    for number in range(1, 6):
        api.add(topic, number)
    assert server.process is not None
    limits = resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        for _ in range(3):
            answer = api.append(topic, [{"data": "x" * 100_000}] * 5)
            assert refused(answer, 429, "throttled")["limit"] == "disk"
            assert "retry-after" in answer.headers
        assert [r["data"] for r in _whole(api, topic)] == [1, 2, 3, 4, 5]
        assert api.get_state(topic)["head_seq"] == 5
    finally:
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, limits)

    def taken() -> bool:
        answer = api.append(topic, [{"data": 6}])
        return answer.status_code == 200 and answer.json()["seqs"] == [6]

    eventually(taken, "the server takes writes again, at the next seq", within_s=20)
    api = server.crash()
    assert [r["data"] for r in _whole(api, topic)] == [1, 2, 3, 4, 5, 6]


def test_two_servers_do_not_share_a_directory(own: NewServer, topic: str) -> None:
    """The second server refuses to start, with a message that gives the reason. [S-08]"""
    first = own()
    api = first.start()
    api.add(topic, 1)
    second = own(TOPICS_DATA_DIR=str(first.data_dir))
    assert str(first.data_dir) in second.refusal()
    assert api.add(topic, 2)["seqs"] == [2]


def test_a_stop_with_open_long_polls_is_clean(own: NewServer, topic: str) -> None:
    """§0.6, settled rules: requests in flight end, and the exit code is 0. [S-08]"""
    server = own()
    api = server.start()
    api.put(topic)
    client = Api(api.url)
    statuses: list[int] = []

    def wait() -> None:
        statuses.append(client.diff(topic, wait_ms=25_000).status_code)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.3)
    started = time.monotonic()
    server.stop()
    thread.join(30)
    client.close()
    assert statuses
    assert statuses[0] in (200, 503)
    assert time.monotonic() - started < 20
    assert server.start().get_state(topic)["head_seq"] == 0
