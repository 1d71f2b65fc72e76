"""`kill -9` of a real server and of its view processes, under writers, queries and definitions.

After every kill writers pause, the views catch up, and every row of every view is compared with a
fold of what the topics hold. Called by `test_view_kills`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import httpx

from tests.contract.driver import Api, Json, Server, good
from tests.contract.views.following import COUNTS, Viewing

TOPICS: Final = {
    "kept": {"durability": "fsync"},
    "written": {"durability": "memory"},
    "lost": {"durability": "ephemeral"},
}
_SETTLES_S: Final = 90.0
_PAGE: Final = 5_000


def generation(number: int) -> Json:
    """A definition that writes other rows than every other definition."""
    return {
        "schema": "CREATE TABLE rows (seq INTEGER PRIMARY KEY, tag, data, generation INTEGER)",
        "apply": f"INSERT INTO rows VALUES (:seq, :tag, :data, {number})",
    }


def children_of(pid: int) -> list[int]:
    """The view processes of a server."""
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return [child for child in found if _is_of_views(child)]


def _is_of_views(pid: int) -> bool:
    try:
        return b"topics_server.views" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


class ViewKills:
    """One server over many kills. `checked`: rows that were compared."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.server = Server(
            directory,
            {"TOPICS_CHECKPOINT_INTERVAL_MS": "300", "TOPICS_SEGMENT_MAX_AGE_MS": "500"},
        )
        self.rng = random.Random(f"view kills {seed}")
        self.server_kills = self.process_kills = self.checked = self.answers = self.changes = 0
        self._generation = 0
        self._number = 0
        self._lock = threading.Lock()
        self._may_work = threading.Event()
        self._is_over = threading.Event()
        self._idle = threading.Semaphore(0)
        self._url = ""
        self.problems: list[str] = []

    def run(self, kills: int) -> None:
        """Kill so many times, comparing after each."""
        api = self.server.start()
        self._url = api.url
        for topic, config in TOPICS.items():
            good(api.put(topic, config))
            for view, definition in (("rows", generation(0)), ("counts", COUNTS)):
                Viewing(api, topic).made(view, definition)
        works = (self._append, self._append, self._append, self._query, self._define)
        threads = [threading.Thread(target=self._loop, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        try:
            for _ in range(kills):
                self._cycle(len(threads))
        finally:
            self._is_over.set()
            self._may_work.set()
            for thread in threads:
                thread.join()
            if self.server.process is not None:
                self.server.signal(signal.SIGKILL)

    def _cycle(self, workers: int) -> None:
        self._may_work.set()
        time.sleep(self.rng.choice((0.1, 0.3, 0.6)))
        assert self.server.process is not None
        processes = children_of(self.server.process.pid)
        if processes and self.rng.random() < 0.5:
            for pid in self.rng.sample(processes, self.rng.randint(1, len(processes))):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process_kills += 1
            time.sleep(self.rng.choice((0.0, 0.05, 0.2)))
        else:
            self.server.signal(signal.SIGKILL)
            self.server_kills += 1
            self._url = self.server.start().url
        self._may_work.clear()
        for _ in range(workers):
            assert self._idle.acquire(timeout=_SETTLES_S)
        assert not self.problems, self.problems
        for topic in TOPICS:
            self._compare(self.server.api, topic)

    # -- work under way --------------------------------------------------------------------

    def _loop(self, work: Any) -> None:
        """Work while it is allowed; after each step note that no call is in flight."""
        with httpx.Client(timeout=60, trust_env=False) as http:
            while not self._is_over.is_set():
                self._may_work.wait()
                while self._may_work.is_set() and not self._is_over.is_set():
                    try:
                        work(http)
                    except httpx.TransportError:
                        time.sleep(0.02)  # the server is dead
                    except AssertionError as error:
                        self.problems.append(str(error))
                self._idle.release()
                while not self._may_work.is_set() and not self._is_over.is_set():
                    time.sleep(0.005)

    def _append(self, http: httpx.Client) -> None:
        with self._lock:
            self._number += 10
            numbers = range(self._number, self._number + 10)
        topic = random.choice(tuple(TOPICS))
        records = [{"data": number, "tag": f"t{number % 7}"} for number in numbers]
        http.post(f"{self._url}/v0/topics/{topic}", json={"records": records})
        time.sleep(0.005)

    def _query(self, http: httpx.Client) -> None:
        topic = random.choice(tuple(TOPICS))
        url = f"{self._url}/v0/topics/{topic}"
        sent = http.post(url, json={"records": [{"data": 1, "tag": "own"}]})
        if sent.status_code >= 300:
            return
        seq = sent.json()["last_seq"]
        sql = {"sql": "SELECT count(*) FROM rows WHERE seq = :seq", "params": {"seq": seq}}
        answer = http.post(f"{url}/views/rows/query?after={seq}", json=sql)
        if answer.status_code == 200:
            assert answer.json()["rows"] == [[1]], f"{topic} {seq}: {answer.text}"
            self.answers += 1

    def _define(self, http: httpx.Client) -> None:
        time.sleep(0.15)
        topic = random.choice(tuple(TOPICS))
        self._generation += 1
        url = f"{self._url}/v0/topics/{topic}/views/rows"
        http.put(url, json=generation(self._generation))
        self.changes += 1

    # -- comparing -------------------------------------------------------------------------

    def _compare(self, api: Api, topic: str) -> None:
        """Check that every row of both views equals the fold of the topic."""
        viewing = Viewing(api, topic)
        head = api.get_state(topic)["head_seq"]
        for view in ("rows", "counts"):
            self._until_ready(viewing, view)
        expected = {record["$seq"]: record for record in api.read_all(topic, include_tags=True)}
        shown = good(api.http.get(viewing.url("rows")))["apply"][0]
        number = int(shown.rstrip(")").rsplit(",", 1)[1])
        found: dict[int, list[Any]] = {}
        last = 0
        sql = f"SELECT * FROM rows WHERE seq > :last ORDER BY seq LIMIT {_PAGE}"
        while page := viewing.rows("rows", sql, after=head, last=last):
            found |= {row[0]: row[1:] for row in page}
            last = page[-1][0]
        wanted = {
            seq: [record.get("$tag"), json.dumps(record["data"]), number]
            for seq, record in expected.items()
        }
        assert found == wanted, f"{topic}: {_difference(found, wanted)}"
        counts = Counter(record["$tag"] for record in expected.values())
        rows = viewing.rows("counts", "SELECT tag, count FROM counts", after=head)
        assert dict(rows) == dict(counts), topic
        self.checked += len(found) + len(rows)

    def _until_ready(self, viewing: Viewing, view: str) -> None:
        end = time.monotonic() + _SETTLES_S
        while True:
            answer = viewing.api.http.get(viewing.url(view, "stats"))
            stats = answer.json()
            if answer.status_code == 200 and stats["status"] == "ready" and stats["lag"] == 0:
                return
            assert time.monotonic() < end, stats
            time.sleep(0.02)


def _difference(found: dict[int, list[Any]], wanted: dict[int, list[Any]]) -> str:
    wrong = sorted(seq for seq in found.keys() | wanted.keys() if found.get(seq) != wanted.get(seq))
    few = [(seq, found.get(seq), wanted.get(seq)) for seq in wrong[:3]]
    return f"{len(wrong)} rows differ (seq, found, wanted): {few}"
