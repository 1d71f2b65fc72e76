"""Chaos of workers: processes that claim jobs and are killed or paused, over a server that is
killed too.

Owns the server, the producer, the worker processes and the phases of a run: start, storm, calm,
verdict. In the calm phase nothing is killed any more, and the workers run until every queue is
empty; then `queue_ledger` judges their files. One seed decides all random choices (what is
enqueued, who is killed when, what a worker does next); only the scheduling of processes is not
repeatable.
"""

from __future__ import annotations

import functools
import http.client
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from tests.contract.driver import ROOT, Server, good
from tests.crash.kills.ledger import Json
from tests.crash.kills.writers import Connection
from tests.crash.queues.queue_ledger import (
    Call,
    Effect,
    End,
    Grant,
    Job,
    Ledger,
    Letter,
    Life,
    Queue,
)
from tests.crash.queues.queue_worker import Plan, read_file, wall_ms
from tests.ports import lasting_port
from topics_server.wal.fs import OsFs
from topics_server.wal.tools.dump import verify

_BREAKS: Final = (OSError, http.client.HTTPException)
ENVIRONMENT: Final = {
    "TOPICS_SEGMENT_MAX_EVENTS": "500",
    "TOPICS_SEGMENT_MAX_AGE_MS": "1000",
    "TOPICS_HOT_RETAIN_SEGMENTS": "1",
    "TOPICS_CHECKPOINT_INTERVAL_MS": "300",
    "TOPICS_WAL_FSYNC_INTERVAL_MS": "50",
    "TOPICS_WAL_SHARDS": "2",
    # A paused worker keeps its stream, and its leases expire.
    "TOPICS_SLOW_CONSUMER_TIMEOUT_MS": "60000",
}
# Topics get their shards in turn at their creation, so a queue's dead letters are on the other
# shard.
TOPICS: Final[dict[str, Json]] = {
    "hard-fsync": {
        "type": "queue",
        "durability": "fsync",
        "leases_durable": True,
        "max_deliveries": 4,
        "dead_letter": "hard-fsync.dead",
    },
    "hard-fsync.dead": {"durability": "disk"},
    "soft-disk": {
        "type": "queue",
        "durability": "disk",
        "max_deliveries": 5,
        "dead_letter": "soft-disk.dead",
    },
    "soft-disk.dead": {"durability": "fsync"},
    "hard-disk": {
        "type": "queue",
        "durability": "disk",
        "leases_durable": True,
        "claim_jitter_ms": 20,
    },
    "soft-fsync": {"type": "queue", "durability": "fsync"},
}
QUEUES: Final = [
    Queue(name, bool(config.get("leases_durable")), config.get("max_deliveries", 0))
    for name, config in TOPICS.items()
    if config.get("type") == "queue"
]
_POISON: Final = 0.05
_DELAYED: Final = 0.05
_CLEAN_STOP: Final = 0.15
_PUSHED: Final = 4  # one worker in so many uses a push stream
_UP_S: Final = (0.4, 2.2)
_CALM_S: Final = 120.0
_AGAIN_S: Final = 0.05


class Wrong(AssertionError):
    """The server broke a rule; the message says which, with the seed."""


class Producer(threading.Thread):
    """Enqueues jobs in batches, each with a key, and repeats each until it has an answer."""

    def __init__(self, port: int, jobs: int, quotas: int, seed: str) -> None:
        super().__init__(name="producer", daemon=True)
        self.jobs: list[Job] = []
        self.unknown = 0
        self.problems: list[str] = []
        self._rng = random.Random(f"{seed}/producer")
        self._connection = Connection(port)
        self._count = jobs
        self._quota = -(-jobs // quotas)
        self._allowed = self._quota
        self._more = threading.Condition()

    def allow(self) -> None:
        """Allow one more share of the jobs: the server has restarted."""
        with self._more:
            self._allowed += self._quota
            self._more.notify()

    def run(self) -> None:
        """Enqueue all jobs, as fast as the restarts of the server allow."""
        batch = 0
        while len(self.jobs) < self._count and not self.problems:
            with self._more:
                self._more.wait_for(lambda: self._allowed > len(self.jobs))
                room = self._allowed - len(self.jobs)
            batch += 1
            count = min(room, self._count - len(self.jobs), self._rng.choice((1, 10, 50, 200)))
            self._enqueue(batch, self._rng.choice(QUEUES), count)
        self._connection.close()

    def _enqueue(self, batch: int, queue: Queue, count: int) -> None:
        rng = self._rng
        records: list[Json] = []
        for index in range(count):
            poison = queue.max_deliveries > 0 and rng.random() < _POISON
            record: Json = {"data": {"id": f"{batch}.{index}", "is_poison": poison}}
            if rng.random() < _DELAYED:
                record["delay_ms"] = rng.choice((100, 1000, 3000))
            records.append(record)
        body = {"records": records, "idempotency_key": f"batch-{batch}"}
        while True:
            try:
                status, answer = self._connection.ask("POST", f"/v0/topics/{queue.name}", body)
            except _BREAKS:
                self.unknown += 1
                self._connection.close()
                time.sleep(_AGAIN_S)
                continue
            if status in (200, 201):
                break
            self._connection.close()
            if status not in (429, 503):
                self.problems.append(f"enqueue: {status} {answer}")
                return
            time.sleep(_AGAIN_S)
        for index, record in enumerate(records):
            seq = answer["first_seq"] + index
            delay_ms = record.get("delay_ms", 0)
            self.jobs.append(Job(record["data"]["id"], queue.name, seq, delay_ms))
        if answer["last_seq"] - answer["first_seq"] + 1 != count:
            self.problems.append(f"{count} jobs were answered {answer}")


@dataclass(slots=True)
class Slot:
    """The place of a worker: its process is killed and replaced under the same name."""

    node: str
    file: Path
    is_pushed: bool
    process: subprocess.Popen[bytes] | None = None
    life: int = 0
    # when each process was killed: life, time
    deaths: list[tuple[int, float]] | None = None


class Crew:
    """Worker processes."""

    def __init__(self, directory: Path, port: int, workers: int, seed: str) -> None:
        self.directory = directory
        self._port = port
        self._seed = seed
        self.kills = 0
        self.pauses = 0
        self.slots = [
            Slot(f"w{n}", directory / f"w{n}.jsonl", n % _PUSHED == _PUSHED - 1, deaths=[])
            for n in range(workers)
        ]

    def begin(self, slot: Slot, queues: list[str], fair_max: int = 0) -> None:
        """Start the slot's process."""
        slot.life += 1
        plan = Plan(
            self._port,
            slot.node,
            slot.life,
            self._seed,
            str(slot.file),
            queues,
            slot.is_pushed,
            fair_max,
        )
        paths = [str(ROOT), str(ROOT / "src")]
        with (self.directory / f"{slot.node}.log").open("ab") as log:
            slot.process = subprocess.Popen(
                [sys.executable, "-m", "tests.crash.queues.queue_worker", plan.text()],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def kill(self, slot: Slot) -> None:
        """`kill -9`; the server releases the leases of its streams from now on."""
        assert slot.process is not None
        assert slot.deaths is not None
        slot.deaths.append((slot.life, wall_ms()))
        slot.process.kill()
        slot.process.wait()
        self.kills += 1

    def pause(self, slot: Slot) -> None:
        """Pause the process until `go_on`."""
        assert slot.process is not None
        slot.process.send_signal(signal.SIGSTOP)
        self.pauses += 1

    @staticmethod
    def go_on(slot: Slot) -> None:
        """End the pause."""
        assert slot.process is not None
        slot.process.send_signal(signal.SIGCONT)

    def end(self) -> list[str]:
        """Let all workers finish; return the jobs that they did not finish."""
        problems = self.broken()
        running = [slot for slot in self.slots if slot.process is not None]
        for slot in running:
            assert slot.process is not None
            slot.process.terminate()
        for slot in running:
            assert slot.process is not None
            if slot.process.wait(30) != 0:
                problems.append(f"worker {slot.node} ended badly, see its log")
            slot.process = None
        return problems

    def broken(self) -> list[str]:
        """Workers that ended by themselves."""
        return [
            f"worker {slot.node} ended by itself, see {self.directory}/{slot.node}.log"
            for slot in self.slots
            if slot.process is not None and slot.process.poll() is not None
        ]

    def tear_down(self) -> None:
        """End all remaining processes."""
        for slot in self.slots:
            if slot.process is not None and slot.process.poll() is None:
                slot.process.kill()
                slot.process.wait()


class Nemesis(threading.Thread):
    """Kills and pauses workers at drawn times until told to stop; then lets all run."""

    def __init__(self, crew: Crew, seed: str) -> None:
        super().__init__(name="nemesis", daemon=True)
        self._crew = crew
        self._rng = random.Random(f"{seed}/workers")
        self._queues = [queue.name for queue in QUEUES]
        self._paused: dict[str, float] = {}
        self.leave = threading.Event()
        self.problems: list[str] = []

    def run(self) -> None:
        """Do one action after the other."""
        rng = self._rng
        slots = self._crew.slots
        while not self.leave.wait(rng.uniform(0.1, 1.2) * 4 / len(slots)):
            self._wake(time.monotonic())
            slot = rng.choice(slots)
            is_kill, pause_s = rng.random() < 0.4, rng.uniform(0.5, 4.5)
            if slot.node in self._paused:
                continue
            self.problems += self._crew.broken()
            if self.problems:
                break
            if is_kill:
                self._crew.kill(slot)
                self._crew.begin(slot, self._queues)
            else:
                self._crew.pause(slot)
                self._paused[slot.node] = time.monotonic() + pause_s
        self._wake(float("inf"))

    def _wake(self, now_s: float) -> None:
        for slot in self._crew.slots:
            if slot.node in self._paused and self._paused[slot.node] <= now_s:
                del self._paused[slot.node]
                self._crew.go_on(slot)


class Chaos:
    """One run: a server that is killed, its workers, and the writers of jobs."""

    def __init__(self, directory: Path, seed: int, jobs: int, workers: int, kills: int) -> None:
        self.directory = directory
        self.story_of = f"--seed {seed} --jobs {jobs} --workers {workers} --kills {kills}"
        self.seed = f"{seed}"
        self.kills = kills
        self.jobs = jobs
        self.workers = workers
        self.server = Server(directory / "server", dict(ENVIRONMENT))
        self.rng = random.Random(f"{seed}/stops")
        self.ledger = Ledger(QUEUES)
        self.crew: Crew | None = None
        self.clean_stops = 0
        self._began_ms = 0.0

    def run(self) -> None:
        """Run all phases; raises `Wrong` with the problem."""
        port = lasting_port()
        self.server.env = {**ENVIRONMENT, "TOPICS_PORT": str(port)}
        self._start()
        for name, config in TOPICS.items():
            good(self.server.api.put(name, {**config, "idempotency_window_ms": 600_000}))
        self.crew = crew = Crew(self.directory, port, self.workers, self.seed)
        names = [queue.name for queue in QUEUES]
        for slot in crew.slots:
            crew.begin(slot, names)
        producer = Producer(port, self.jobs, self.kills + 1, self.seed)
        nemesis = Nemesis(crew, self.seed)
        producer.start()
        nemesis.start()
        self._stops(producer)
        self._join(producer, producer.problems)
        nemesis.leave.set()
        self._join(nemesis, nemesis.problems)
        self._calm()
        self._fail_on(crew.end())
        self._read_ends()
        self._fail_on(self._stop(is_clean=True))
        for job in producer.jobs:
            self.ledger.jobs[job.id] = job
        self._keep()
        self._fail_on(read_notes(self.ledger, crew))
        self._fail_on(self.ledger.check())

    def tear_down(self) -> None:
        """End whatever still runs."""
        if self.crew is not None:
            self.crew.tear_down()
        if self.server.process is not None:
            self.server.signal(signal.SIGKILL)

    def story(self) -> str:
        """One line of figures."""
        assert self.crew is not None
        return (
            f"{self.kills} kills and {self.clean_stops} clean stops of the server, "
            f"{self.crew.kills} kills and {self.crew.pauses} pauses of {self.workers} workers; "
            f"{self._open_moves()} moves to dead letters that a kill cut in two; "
            + ", ".join(f"{what} {count}" for what, count in self.ledger.figures().items())
        )

    def _open_moves(self) -> int:
        """The number of moves that the server's starts had to complete, from its log."""
        logs = sorted(self.server.directory.glob("log-*.txt"))
        found = [re.findall(r"(\d+) moves ended", log.read_text()) for log in logs]
        return sum(int(count) for counts in found for count in counts)

    # -- the server ------------------------------------------------------------------------

    def _start(self) -> None:
        self._began_ms = wall_ms()
        try:
            self.server.start()
        except AssertionError as error:
            self._fail_on([f"did not start: {error}"])

    def _stop(self, *, is_clean: bool) -> list[str]:
        """End this server process, and check its files."""
        process = self.server.process
        assert process is not None
        if process.poll() is not None:
            return [f"the server ended by itself, see {self.server.log}"]
        stopped_ms = wall_ms()
        if is_clean:
            self.server.stop()
        else:
            self.server.signal(signal.SIGKILL)
        self.ledger.lives.append(Life(self._began_ms, stopped_ms, wall_ms(), is_clean))
        report = verify(OsFs(), str(self.server.data_dir), None)
        return [f"verify after stop {len(self.ledger.lives)}: {p}" for p in report.problems]

    def _stops(self, producer: Producer) -> None:
        """Kill and restart; sometimes stop the server cleanly instead."""
        kills = 0
        while kills < self.kills:
            time.sleep(self.rng.uniform(*_UP_S))
            is_clean = self.rng.random() < _CLEAN_STOP
            self._fail_on(self._stop(is_clean=is_clean))
            kills += not is_clean
            self.clean_stops += is_clean
            self._start()
            self._check_moves()
            if not is_clean:
                producer.allow()

    def _check_moves(self) -> None:
        """No job stays both in its queue and among the dead letters; a move takes only a moment."""
        connection = Connection(int((self.server.directory / "port").read_text()))
        try:
            for name, config in TOPICS.items():
                if "dead_letter" not in config:
                    continue
                moved = {
                    record["meta"]["$dead_letter_src_seq"]
                    for record in read_records(connection, config["dead_letter"])
                }
                self._eventually(functools.partial(self._left, connection, name, moved))
        finally:
            connection.close()

    @staticmethod
    def _left(connection: Connection, name: str, moved: set[int]) -> list[str]:
        both = moved.intersection(record["$seq"] for record in read_records(connection, name))
        return [f"{name}: {sorted(both)[:10]} are jobs and dead letters"] if both else []

    # -- the end ---------------------------------------------------------------------------

    def _calm(self) -> None:
        """Wait until all queues are empty."""
        assert self.crew is not None
        until, before = time.monotonic() + _CALM_S, -1
        while True:
            left = {queue.name: self._counts(queue.name) for queue in QUEUES}
            count = sum(each["count"] for each in left.values())
            if not any(any(each.values()) for each in left.values()):
                return
            if count != before:
                until, before = time.monotonic() + _CALM_S, count
            self._fail_on(self.crew.broken())
            if time.monotonic() > until:
                self._fail_on([f"stuck for {_CALM_S} s: {left}"])
            time.sleep(0.2)

    def _counts(self, name: str) -> dict[str, int]:
        state = self.server.api.get_state(name)
        counts = state["queue"]
        names = ("ready", "in_flight", "delayed")
        return {"count": state["count"], **{each: counts[each] for each in names}}

    def _read_ends(self) -> None:
        for queue in QUEUES:
            counts = self._counts(queue.name)
            dead_lettered = self.server.api.get_state(queue.name)["queue"]["dead_lettered"]
            self.ledger.ends.append(End(queue.name, **counts, dead_lettered=dead_lettered))
            dead_letter = TOPICS[queue.name].get("dead_letter")
            if dead_letter is not None:
                for record in self.server.api.read_all(dead_letter, include_meta=True):
                    self.ledger.letters.append(letter_of(record))

    def _keep(self) -> None:
        """Store the other inputs of the verdict beside the workers' files."""
        ledger = self.ledger
        known = {
            "jobs": list(ledger.jobs.values()),
            "lives": ledger.lives,
            "letters": ledger.letters,
            "ends": ledger.ends,
            "deaths": {slot.node: slot.deaths for slot in self.crew.slots} if self.crew else {},
        }
        (self.directory / "run.json").write_bytes(msgspec.json.encode(known))

    # -- problems --------------------------------------------------------------------------

    def _join(self, thread: threading.Thread, problems: list[str]) -> None:
        thread.join(_CALM_S)
        self._fail_on(problems)
        if thread.is_alive():
            self._fail_on([f"the {thread.name} hangs"])

    def _eventually(self, look: Callable[[], list[str]], within_s: float = 10.0) -> None:
        until = time.monotonic() + within_s
        while problems := look():
            if time.monotonic() > until:
                self._fail_on(problems)
            time.sleep(_AGAIN_S)

    def _fail_on(self, problems: list[str]) -> None:
        if problems:
            shown = "\n  ".join(problems[:12])
            raise Wrong(
                f"{self.story_of}, everything kept in {self.directory}; {len(problems)} problems:"
                f"\n  {shown}"
            )


def read_records(connection: Connection, topic: str) -> list[Json]:
    """All records of a topic without their payloads."""
    records: list[Json] = []
    cursor = 0
    while True:
        body = {"from_seq": cursor, "limit": 1000, "include_meta": True, "include_data": False}
        status, page = connection.ask("POST", f"/v0/topics/{topic}/diff", body)
        assert status == 200, f"{topic}: {page}"
        records += page["records"]
        if page["caught_up"]:
            return records
        cursor = page["next_from_seq"]


def letter_of(record: Json) -> Letter:
    """A dead letter from its record."""
    meta = record["meta"]
    return Letter(
        record["data"]["id"],
        meta["$dead_letter_from"],
        meta["$dead_letter_src_seq"],
        meta["$dead_letter_deliveries"],
        record["$ts"],
    )


class _Reader:
    """Reads one worker's file into the ledger."""

    def __init__(self, ledger: Ledger, slot: Slot) -> None:
        self.ledger = ledger
        self.node = slot.node
        self.problems: list[str] = []
        self.opened: dict[str, float] = {}
        self._deaths = dict(slot.deaths or ())
        self._calls: dict[str, Call] = {}

    def read(self, path: Path) -> None:
        """Read all lines, and the effects of the deaths of the process."""
        for line in read_file(path):
            what, *items = line
            act: Callable[..., None] | None = getattr(self, f"_on_{what}", None)
            if act is not None:
                act(*items)
        self.ledger.calls += self._calls.values()
        for stream in self.opened:
            died_ms = self._deaths.get(int(stream.split("/")[1]))
            if died_ms is not None:
                self.ledger.closed.setdefault(stream, died_ms)

    def _on_grants(self, queue: str, stream: str, lease_ms: int, jobs: list[list[Any]]) -> None:
        for job_id, seq, lease_id, deliveries, deadline_ms, ts in jobs:
            self.ledger.grants.append(
                Grant(
                    queue,
                    job_id,
                    seq,
                    lease_id,
                    self.node,
                    deliveries,
                    deadline_ms - lease_ms,
                    deadline_ms,
                    ts,
                    stream,
                )
            )

    def _on_effect(self, *items: Any) -> None:
        self.ledger.effects.append(Effect(*items))

    def _on_call(
        self,
        name: str,
        kind: Any,
        queue: str,
        node: str,
        seqs: list[int],
        lease_ids: list[str] | None,
        value_ms: int,
        sent_ms: float,
    ) -> None:
        self._calls[name] = Call(kind, queue, node, seqs, lease_ids, sent_ms, value_ms)

    def _on_answer(self, name: str, got_ms: float, done: int, skipped: list[int]) -> None:
        call = self._calls[name]
        call.got_ms, call.done, call.skipped = got_ms, done, skipped

    def _on_refused(self, name: str, code: str) -> None:
        del self._calls[name]
        if code not in ("not_ready", "shutting_down"):
            self.problems.append(f"{name} was refused: {code}")

    def _on_open(self, stream: str, at_ms: float) -> None:
        self.opened[stream] = at_ms

    def _on_close(self, stream: str, at_ms: float) -> None:
        self.ledger.closed.setdefault(stream, at_ms)

    def _on_ended(self, stream: str, at_ms: float) -> None:
        if stream in self.ledger.closed:
            return  # ended by the worker itself
        opened_ms = self.opened[stream]
        # A paused worker reads it late; a draining server closes streams before it ends.
        if not any(
            opened_ms <= life.ended_ms and life.stopped_ms <= at_ms + 1
            for life in self.ledger.lives
        ):
            self.problems.append(f"{stream} ended for no reason at {at_ms}")

    def _on_frame(self, stream: str, at_ms: float, event: str, data: str) -> None:
        self.problems.append(f"{stream}: {event} {data} at {at_ms}")

    def _on_problem(self, text: str) -> None:
        self.problems.append(f"{self.node}: {text}")


def read_notes(ledger: Ledger, crew: Crew) -> list[str]:
    """Put the notes of all workers into the ledger; return the problems that workers found."""
    problems: list[str] = []
    for slot in crew.slots:
        reader = _Reader(ledger, slot)
        reader.read(slot.file)
        problems += reader.problems
    return problems
