"""`python -m tests.crash.archives.live_restores`: a busy server is archived, killed, and restored.

16 writers, queue workers, a router, a view and a consumer work on a server that archives to a
bucket, of whose requests one in ten fails. The server is killed again and again. Then the archive
is restored to random records and times, and a server on each restored directory must hold the log's
prefix as of the cut, and the queue, consumer and view that belong to it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from unittest import mock

import httpx

from tests.cloud.buckets import Buckets
from tests.contract.driver import Api, Server, eventually, good
from topics_server.archive.continuous.history import ArchiveHistory
from topics_server.archive.continuous.moments import Moments
from topics_server.archive.continuous.places.opening import open_archive
from topics_server.archive.continuous.places.shared_folder import ArchiveStore
from topics_server.archive.continuous.restoring import RestoredMoment, restore_moment
from topics_server.archive.continuous.verifying import verify_archive
from topics_server.wal.fs import OsFs

FS: Final = OsFs()
WRITERS: Final = 16
TOPICS: Final = tuple(f"log-{number}" for number in range(8))
URL: Final = "s3://archives/live"
# An entry that was acknowledged this long before the cut must be in the restore: the cut includes
# every shard.
SLACK_MS: Final = 3_000
ENV: Final = {
    "TOPICS_WAL_SHARDS": "2",
    "TOPICS_SEGMENT_MAX_EVENTS": "200",
    "TOPICS_SEGMENT_MAX_AGE_MS": "1000",
    "TOPICS_CHECKPOINT_INTERVAL_MS": "2000",
    "TOPICS_ARCHIVE_BASE_INTERVAL_MS": "5000",
}
VIEW: Final = {
    "schema": "CREATE TABLE counts (by INTEGER PRIMARY KEY, records INTEGER, sum INTEGER)",
    "apply": "INSERT INTO counts VALUES (:data ->> '$.by', 1, :data ->> '$.n') ON CONFLICT (by) "
    "DO UPDATE SET records = records + 1, sum = sum + excluded.sum",
    "queries": {"all": "SELECT by, records, sum FROM counts ORDER BY by"},
}


def now_ms() -> float:
    """The server's clock, because the server runs on this machine."""
    return time.time() * 1000


@dataclass
class Call:
    """When a call that changed something began, and when it was acknowledged."""

    began_ms: float
    ended_ms: float


@dataclass
class Ledger:
    """The calls of all clients. `jobs`: seqs by their enqueue; `acks`: by their ack.

    `began_ms`: when the clients began to work, on topics that the archive had already.
    """

    began_ms: float = 0
    writes: dict[tuple[str, int, int], Call] = field(default_factory=dict)
    jobs: dict[int, Call] = field(default_factory=dict)
    acks: dict[int, Call] = field(default_factory=dict)
    commits: list[tuple[int, Call]] = field(default_factory=list)


class Clients:
    """Threads that work on a server which is killed meanwhile; each call is repeated."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.url = ""
        self.stop = threading.Event()
        self.errors: list[str] = []
        jobs: list[Callable[[httpx.Client], None]] = [
            *(lambda http, by=by: self._write(http, by) for by in range(WRITERS)),
            self._enqueue,
            self._enqueue,
            *(lambda http, node=node: self._work(http, node) for node in ("a", "b", "c")),
            self._commit,
        ]
        self._threads = [threading.Thread(target=self._run, args=(job,)) for job in jobs]

    def start(self) -> None:
        """Start the threads that call the server."""
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Finish the calls under way."""
        self.stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, job: Callable[[httpx.Client], None]) -> None:
        with httpx.Client(timeout=30) as http:
            try:
                job(http)
            except Exception as error:
                self.errors.append(repr(error))

    def _post(self, http: httpx.Client, path: str, body: object) -> tuple[Any, Call]:
        """The answer to a call that may be repeated, and the call's times, counted from its first
        try.
        """
        began = now_ms()
        while True:
            try:
                answer = http.post(f"{self.url}/v0/{path}", json=body)
            except httpx.TransportError:
                time.sleep(0.05)
                continue
            if answer.status_code in (429, 503):
                time.sleep(0.05)
                continue
            assert answer.status_code < 300, answer.text
            return answer.json(), Call(began, now_ms())

    def _write(self, http: httpx.Client, by: int) -> None:
        topic, chance = TOPICS[by % len(TOPICS)], random.Random(by)
        numbers = itertools.count(1)
        while not self.stop.is_set():
            data = [{"by": by, "n": next(numbers)} for _ in range(chance.choice((1, 1, 3)))]
            key = f"{by}-{data[0]['n']}"
            body = {"records": [{"data": each} for each in data], "idempotency_key": key}
            _, call = self._post(http, f"topics/{topic}", body)
            for each in data:
                self.ledger.writes[topic, by, each["n"]] = call
            time.sleep(chance.random() * 0.02)

    def _enqueue(self, http: httpx.Client) -> None:
        for number in itertools.count():
            if self.stop.is_set():
                return
            key = f"{threading.get_ident()}-{number}"
            body = {"records": [{"data": key}] * 3, "idempotency_key": key}
            answer, call = self._post(http, "topics/jobs", body)
            for seq in answer["seqs"]:
                self.ledger.jobs[seq] = call
            time.sleep(0.03)

    def _work(self, http: httpx.Client, node: str) -> None:
        while not self.stop.is_set():
            body = {"node": node, "max": 2, "lease_ms": 60_000}
            claimed, _ = self._post(http, "topics/jobs/claim", body)
            seqs = [job["$seq"] for job in claimed["claimed"]]
            if not seqs:
                time.sleep(0.05)
                continue
            began = now_ms()
            _, call = self._post(http, "topics/jobs/ack", {"node": node, "seqs": seqs})
            for seq in seqs:
                # If a job was skipped, a try whose answer was lost had acked it.
                self.ledger.acks[seq] = Call(began, call.ended_ms)
            time.sleep(0.01)

    def _commit(self, http: httpx.Client) -> None:
        seq = 0
        while not self.stop.is_set():
            shown = self._head(http)
            if shown > seq:
                seq = shown
                _, call = self._post(http, f"topics/{TOPICS[2]}/consumers/c/commit", {"seq": seq})
                self.ledger.commits.append((seq, call))
            time.sleep(0.1)

    def _head(self, http: httpx.Client) -> int:
        try:
            answer = http.get(f"{self.url}/v0/topics/{TOPICS[2]}")
        except httpx.TransportError:
            return 0
        return int(answer.json()["head_seq"]) if answer.status_code == 200 else 0


def prepare(api: Api) -> None:
    """Make the topics, the queue, the router, the view and the consumer."""
    for topic in (*TOPICS, "copies"):
        good(api.put(topic, {"durability": "fsync"}))
    good(api.put("jobs", {"type": "queue", "durability": "fsync"}))
    good(api.http.put("/v0/routers/r", json={"source": TOPICS[0], "dest": "copies"}))
    good(api.http.put(f"/v0/topics/{TOPICS[1]}/views/v", json=VIEW))
    good(api.http.put(f"/v0/topics/{TOPICS[2]}/consumers/c", json={"from": "earliest"}))


def metric(api: Api, name: str) -> float:
    """The value of the archive's metric of this name."""
    shown = good(api.http.get("/v0/metrics", headers={"Accept": "application/json"}))
    return float(shown[f"topics_archive_{name}"])


def is_archived(api: Api) -> bool:
    """Whether everything acknowledged is in the archive, after a base."""
    return metric(api, "lag_seconds") == 0 and metric(api, "base_timestamp_ms") > 0


def rows_of(api: Api, topic: str) -> list[tuple[int, Any]]:
    """The records of a topic: seq and payload."""
    return [(each["$seq"], each["data"]) for each in api.read_all(topic)]


def run_load(server: Server, kills: int, chance: random.Random) -> tuple[Ledger, dict[str, Any]]:
    """Run all clients while the server is killed; returns the calls, and the logs at the end."""
    api = server.start()
    prepare(api)
    eventually(lambda: is_archived(api), "the topics are archived", within_s=120)
    clients = Clients()
    clients.ledger.began_ms = now_ms()
    clients.url = api.url
    clients.start()
    try:
        for _ in range(kills):
            time.sleep(1 + 3 * chance.random())
            server.signal(signal.SIGKILL)
            api = server.start()
            clients.url = api.url
        time.sleep(4)
    finally:
        clients.end()
    assert not clients.errors, clients.errors
    heads = {topic: api.get_state(topic)["head_seq"] for topic in TOPICS}

    def is_routed() -> bool:
        return bool(len(rows_of(api, "copies")) >= heads[TOPICS[0]])

    eventually(is_routed, "every record is copied", within_s=60)
    eventually(lambda: is_archived(api), "everything is archived", within_s=120)
    assert (metric(api, "gaps_total"), metric(api, "stopped")) == (0, 0)
    logs = {topic: rows_of(api, topic) for topic in (*TOPICS, "copies")}
    server.stop()
    return clients.ledger, logs


def check(api: Api, ledger: Ledger, logs: dict[str, Any], after: float, ts: float) -> int:
    """Compare a restored server with a cut between two times; returns the number of its records."""
    heads: dict[str, int] = {}
    for topic in TOPICS:
        rows = rows_of(api, topic)
        assert rows == logs[topic][: len(rows)], f"{topic} is no prefix"
        heads[topic] = len(rows)
        held = {(topic, data["by"], data["n"]) for _, data in rows}
        for key, call in ledger.writes.items():
            if key[0] == topic:
                assert key in held or call.ended_ms + SLACK_MS > after, f"{key} is lost"
                assert key not in held or call.began_ms <= ts, f"{key} is of a later time"
    _check_queue(api, ledger, after, ts)
    shown = good(api.http.get(f"/v0/topics/{TOPICS[2]}/consumers/c"))["seq"]
    commits = ledger.commits
    least = max((seq for seq, call in commits if call.ended_ms + SLACK_MS <= after), default=0)
    most = max((seq for seq, call in commits if call.began_ms <= ts), default=0)
    assert least <= shown <= most, f"the consumer is at {shown}, not in {least} to {most}"
    _check_view(api, heads[TOPICS[1]], logs)
    _check_router(api, heads[TOPICS[0]], logs)
    for topic in TOPICS:
        seq = api.add(topic, {"by": -1, "n": 0})["seqs"][0]
        assert seq > len(logs[topic]), f"{topic}: seq {seq} is used again"
    return sum(heads.values())


def _check_queue(api: Api, ledger: Ledger, after: float, ts: float) -> None:
    left = {seq for seq, _ in rows_of(api, "jobs")}
    counts = api.get_state("jobs")["queue"]
    assert counts["ready"] + counts["in_flight"] == len(left)
    for seq, call in ledger.jobs.items():
        ack = ledger.acks.get(seq)
        if call.began_ms > ts or (ack is not None and ack.ended_ms + SLACK_MS <= after):
            assert seq not in left, f"job {seq} is back"
        elif call.ended_ms + SLACK_MS <= after and (ack is None or ack.began_ms > ts):
            assert seq in left, f"job {seq} is lost"


def _check_view(api: Api, head: int, logs: dict[str, Any]) -> None:
    expected: dict[int, list[int]] = {}
    for _, data in logs[TOPICS[1]][:head]:
        row = expected.setdefault(data["by"], [data["by"], 0, 0])
        row[1] += 1
        row[2] += data["n"]
    found: list[Any] = []

    def is_built() -> bool:
        shown = api.http.get(f"/v0/topics/{TOPICS[1]}/views/v/query/all")
        found[:] = [shown.json()] if shown.status_code == 200 else []
        return bool(found) and found[0]["processed_sequence"] >= head

    eventually(is_built, "the view is built", within_s=60)
    assert [list(row) for row in found[0]["rows"]] == [expected[by] for by in sorted(expected)]


def _check_router(api: Api, head: int, logs: dict[str, Any]) -> None:
    """Check that copies from before the cut are unchanged and that the router copies the rest."""
    source = [data for _, data in logs[TOPICS[0]][:head]]

    def is_routed() -> bool:
        rows = rows_of(api, "copies")
        old = [row for row in rows if row[0] <= len(logs["copies"])]
        assert old == logs["copies"][: len(old)], "copies is no prefix"
        copied = [data for _, data in rows]
        return all(data in copied for data in source)

    eventually(is_routed, "every record is copied", within_s=60)


def random_find(
    history: ArchiveHistory, ledger: Ledger, logs: dict[str, Any], chance: random.Random
) -> tuple[str, Callable[[Moments], Any]]:
    """A random record or time in the archive, and the option that names it."""
    if chance.random() < 0.5:
        topic = chance.choice(TOPICS)
        seq = chance.randrange(1, len(logs[topic]) + 1)
        return f"{topic}={seq}", lambda moments: moments.at_seq(topic, seq)
    newest_ms = history.facts(history.numbers()[-1]).ts_ms
    ts_ms = chance.randrange(int(ledger.began_ms), newest_ms + 1000)
    return f"time {ts_ms}", lambda moments: moments.at_time(ts_ms)


def restore_one(
    store: ArchiveStore, folder: Path, find: Callable[[Moments], Any]
) -> tuple[RestoredMoment, Server]:
    """A restored directory, and a server for it that archives nothing."""
    made = restore_moment(FS, store, str(folder / "data"), find)
    return made, Server(folder / "server", {**ENV, "TOPICS_DATA_DIR": str(folder / "data")})


def main(arguments: Sequence[str]) -> int:
    """Run one load and many restores; returns 1 if any restore is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--restores", type=int, default=20)
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args(arguments)
    buckets = Buckets(failing=10)
    keys = {
        "AWS_ENDPOINT_URL": buckets.start(),
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "a-key",
        "AWS_SECRET_ACCESS_KEY": "a-secret",
    }
    try:
        with (
            mock.patch.dict(os.environ, keys),
            tempfile.TemporaryDirectory(prefix="topics-restores-") as name,
        ):
            wrong = run(Path(name), asked, buckets)
    finally:
        buckets.stop()
    print(f"{asked.restores} restores, {wrong} wrong")
    return 1 if wrong else 0


def run(folder: Path, asked: argparse.Namespace, buckets: Buckets) -> int:
    """Run one load and all restores; returns the number of wrong ones."""
    chance, wrong = random.Random(asked.seed), 0
    server = Server(folder / "server", {**ENV, "TOPICS_ARCHIVE_URL": URL})
    try:
        ledger, logs = run_load(server, asked.kills, chance)
    finally:
        if server.process is not None:
            server.signal(signal.SIGKILL)
    store = open_archive(FS, URL)
    history = ArchiveHistory(store)
    found = verify_archive(store)
    assert (found.problems, found.stretches) == ([], 1)
    print(
        f"{len(ledger.writes)} records of {WRITERS} writers, {len(ledger.jobs)} jobs, "
        f"{len(ledger.acks)} acks, {len(ledger.commits)} commits, {asked.kills} kills, "
        f"{found.parts} parts, {found.bases} bases, {buckets.failed} failed requests",
        flush=True,
    )
    for number in range(asked.restores):
        named, find = random_find(history, ledger, logs, chance)
        place = folder / f"restored-{number}"
        made, restored = restore_one(store, place, find)
        try:
            # A cut at a record lies within the record's part: after the part before it, and not at
            # the end of its own part.
            is_cut = "=" in named and made.part > 1
            after = history.facts(made.part - 1).ts_ms if is_cut else made.ts
            records = check(restored.start(), ledger, logs, after, made.ts)
            print(f"{number} {named}: lsn {made.lsn}, {records} records, equal", flush=True)
        except AssertionError as error:
            wrong += 1
            print(f"{number} {named}: WRONG at {made}: {error}", flush=True)
        finally:
            restored.stop()
        shutil.rmtree(place)
    store.close()
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
