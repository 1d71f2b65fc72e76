"""Must-show 1: Spark's rows are a diff's, per column, for random logs and beside a server."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from spark_jobs.listing import SegmentGone, list_segments
from spark_jobs.query import Query
from tests.contract.driver import Api, Server, eventually, good
from tests.spark.logs import COLUMNS, Row, digests, fade, make_log, read_rows, seal_all
from tests.spark.test_reader import AS_IS, read, rows_of


def by_topic(rows: list[dict[str, Any]]) -> dict[str, list[Row]]:
    """Rows by the topic they are of."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["topic"], []).append({name: row[name] for name in COLUMNS})
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_rows_are_those_of_a_diff_for_random_logs(
    spark: Any, server: Server, request: pytest.FixtureRequest
) -> None:
    """Deletes, caps, routers, queues, new incarnations, both folders: a hash a column and topic."""
    seeds = int(request.config.getoption("--spark-seeds", default=50))
    cold = server.directory / "cold"
    server.env = {
        **server.env,
        "TOPICS_SEGMENT_MAX_EVENTS": "16",
        "TOPICS_COLD_DIR": str(cold),
        "TOPICS_HOT_RETAIN_SEGMENTS": "1",
    }
    api = server.start()
    topics = [name for seed in range(seeds) for name in make_log(api, seed)]
    eventually(lambda: _lag(api, seeds) == 0, "routers have copied everything", within_s=60)
    seal_all(api)
    for seed in range(seeds):
        fade(api, seed)  # and what is sealed of it is looked at, and moved to the cold folder
    seal_all(api)
    truth = {name: read_rows(api, name) for name in topics if _exists(api, name)}
    seal_all(api)
    assert sum(len(rows) for rows in truth.values()) > 20 * seeds
    eventually(lambda: any(cold.rglob("*.data")), "some segments are cold", 30)
    left = [[row["seq"] for row in truth[f"s{seed}.fading"]] for seed in range(seeds)]
    if seeds >= 20:
        assert any(not seqs for seqs in left), "time took all of some topics"
        assert sum(bool(seqs) and seqs[0] > 1 for seqs in left) > seeds // 5, "and a part of others"

    columns = ", ".join(f"{name} {kind}" for name, kind in AS_IS)
    frame = (
        spark.read.format("topics")
        .option("coldDir", str(cold))
        .schema(columns)
        .load(str(server.data_dir))
    )
    found = by_topic([row.asDict() for row in frame.collect()])
    direct = by_topic(read(server.data_dir, cold_dir=str(cold)))
    for name, rows in truth.items():
        assert digests(direct.get(name, [])) == digests(rows), f"the reader's {name}"
        assert digests(found.get(name, [])) == digests(rows), f"Spark's {name}"
    assert found.keys() == {name for name, rows in truth.items() if rows}


def _exists(api: Api, name: str) -> bool:
    return api.state(name).status_code == 200


def _lag(api: Api, seeds: int) -> int:
    routers = (good(api.http.get(f"/v0/routers/s{seed}.r")) for seed in range(seeds))
    return sum(int(router["lag"]) for router in routers)


@pytest.mark.slow
def test_every_read_beside_a_server_at_work_is_one_state(server: Server) -> None:
    """Appends go on, the oldest are deleted, segments are sealed, moved and dropped meanwhile.

    The writer notes what it had done before and after each call. A read must show all that was
    sealed at its listing and not deleted by then, nothing that was deleted before it, and each
    record once, whole.
    """
    cold = server.directory / "cold"
    server.env = {
        **server.env,
        "TOPICS_SEGMENT_MAX_EVENTS": "50",
        "TOPICS_COLD_DIR": str(cold),
        "TOPICS_HOT_RETAIN_SEGMENTS": "2",
    }
    api = server.start()
    good(api.put("a", {}))
    state = {"deleting": 0, "head": 0}
    stop = threading.Event()

    def write() -> None:
        for n in range(100_000):
            if stop.is_set():
                return
            head = api.add("a", *range(20 * n, 20 * n + 20))["last_seq"]
            state["head"] = head
            if n % 5 == 4:
                state["deleting"] = head - 300
                good(api.delete("a", before_seq=max(1, head - 300)))

    writer = threading.Thread(target=write)
    writer.start()
    asked = replace(Query(), columns=AS_IS)
    reads = dropped = 0
    try:
        eventually(lambda: state["head"] > 600, "the writer is under way", 30)
        while reads < 60 or state["head"] < 3000:
            listing = list_segments(str(server.data_dir), asked, cold_dir=str(cold))
            listed = [(s.entry.first_seq, s.entry.last_seq) for s in listing.segments]
            try:
                rows = rows_of(listing, asked)
            except SegmentGone:
                dropped += 1
                continue
            reads += 1
            after = state["deleting"]
            seqs = [row["seq"] for row in rows]
            assert seqs == sorted(set(seqs))
            assert all(row["data"] == str(row["seq"] - 1) for row in rows)
            sealed = {seq for first, last in listed for seq in range(first, last + 1)}
            missing = sealed - set(seqs)
            assert set(seqs) <= sealed
            assert all(seq < after for seq in missing), "missing is what was deleted"
    finally:
        stop.set()
        writer.join()
    assert dropped < reads
