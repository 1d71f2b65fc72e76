"""A worker process of the queue chaos: claims, executes, acks; may be killed at any moment.

`python -m tests.crash.queues.queue_worker PLAN` with a `Plan` as JSON. The worker notes every
action as a line of JSON in its own file, before the action can have consequences: an effect before
its ack, a call before it is sent. So a killed worker leaves no action without a line; at most an
answer is unread. Jobs come by claims, or over a push stream that a thread reads. The module imports
only what such a process needs. `read_file` reads the file back.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import queue
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from tests.crash.kills.ledger import Json
from tests.crash.kills.writers import Connection

_BREAKS: Final = (OSError, http.client.HTTPException)
_AGAIN_S: Final = 0.05
_BATCHES: Final = (1, 1, 4, 16, 64)
_WAITS_MS: Final = (0, 200, 1000)
# The lease time is short enough to expire under a paused worker, and long enough to survive a
# restart.
LEASES_MS: Final = (800, 1500, 8000)
_OVERSLEPT_MS: Final = 1500
_OVERSLEEP: Final = 0.004
_NACK: Final = 0.03
_EXTEND: Final = 0.03
_FORGET: Final = 0.003
_DOUBLE_ACK: Final = 0.03
# How often a worker uses an older lease of a job that it holds by a newer one: only the fence
# distinguishes the two.
_STALE: Final = 0.7
_WITHOUT_FENCE: Final = 0.25
_RETRY: Final = 0.7
_TAIL_BYTES: Final = 65_536


def wall_ms() -> float:
    """The server's wall clock, in fractions of a ms."""
    return time.time_ns() / 1_000_000


@dataclass(slots=True, frozen=True)
class Plan:
    """The instructions for a worker."""

    port: int
    node: str
    life: int
    seed: str
    file: str
    queues: list[str]
    is_pushed: bool = False
    # For the tests of fairness: claim this many jobs, ack them at once, and do nothing else.
    fair_max: int = 0

    def text(self) -> str:
        """The plan as a command-line argument."""
        return json.dumps(asdict(self))


class Notes:
    """The worker's file."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def add(self, *items: object) -> None:
        """Add one line in one write, so that only the last line can be incomplete."""
        os.write(self._fd, json.dumps(items, separators=(",", ":")).encode() + b"\n")


def read_file(path: Path, tail_bytes: int | None = None) -> Iterator[list[Any]]:
    """The lines of a worker's file without a line that a kill cut."""
    if not path.exists():
        return
    raw = path.read_bytes()
    lines = raw.split(b"\n") if tail_bytes is None else raw[-tail_bytes:].split(b"\n")[1:]
    for line in lines:
        with contextlib.suppress(json.JSONDecodeError):
            found = json.loads(line)
            if isinstance(found, list):
                yield found


@dataclass(slots=True, frozen=True)
class Held:
    """A job that the worker holds."""

    queue: str
    seq: int
    lease_id: str
    deliveries: int
    lease_ms: int
    data: Json


class Stream:
    """A push stream: a thread notes its jobs and passes them on until the stream ends."""

    def __init__(self, plan: Plan, notes: Notes, name: str, topic: str, rng: random.Random) -> None:
        self.name = name
        self.topic = topic
        self.lease_ms = rng.choice(LEASES_MS)
        self.arrived: queue.SimpleQueue[Held] = queue.SimpleQueue()
        self.is_over = threading.Event()
        self._plan = plan
        self._notes = notes
        self._http = http.client.HTTPConnection("127.0.0.1", plan.port, timeout=60)
        depth = rng.choice((1, 8, 32))
        notes.add("open", name, wall_ms())
        path = f"/v0/topics/{topic}/work?node={plan.node}&max={depth}&lease_ms={self.lease_ms}"
        self._http.request("GET", path, headers={"Accept": "text/event-stream"})
        self._response = self._http.getresponse()
        if self._response.status != 200:
            answer = json.loads(self._response.read())
            self._http.close()
            if self._response.status != 503:
                notes.add("problem", f"{path}: {self._response.status} {answer}")
            raise ConnectionRefusedError(f"{answer}")
        assert self._http.sock is not None
        self._sock: socket.socket = self._http.sock
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close it; the server releases the unfinished jobs."""
        self._notes.add("close", self.name, wall_ms())
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(30)
        assert not self._thread.is_alive(), "the stream's thread hangs"
        self._http.close()

    def _read(self) -> None:
        event = b""
        try:
            while line := self._response.readline():
                if line.startswith(b"event: "):
                    event = line[7:].strip()
                elif line.startswith(b"data: ") and event == b"job":
                    self._took(json.loads(line[6:]))
                elif line.startswith(b"data: "):
                    self._notes.add("frame", self.name, wall_ms(), event.decode(), line.decode())
        except (*_BREAKS, ValueError):
            pass
        finally:
            self._notes.add("ended", self.name, wall_ms())
            self.is_over.set()

    def _took(self, job: Json) -> None:
        note_grants(self._notes, self.topic, self.name, self.lease_ms, [job])
        self.arrived.put(held(self.topic, self.lease_ms, job))


def held(topic: str, lease_ms: int, job: Json) -> Held:
    """A received job."""
    return Held(topic, job["$seq"], job["lease_id"], job["deliveries"], lease_ms, job["data"])


def note_grants(notes: Notes, topic: str, stream: str, lease_ms: int, jobs: list[Json]) -> None:
    """Note received jobs."""
    found = [
        [j["data"]["id"], j["$seq"], j["lease_id"], j["deliveries"], j["deadline"], j["$ts"]]
        for j in jobs
    ]
    notes.add("grants", topic, stream, lease_ms, found)


def newest(jobs: list[Held]) -> list[Held]:
    """Each job once, by its newest lease, because the answer does not distinguish two entries of
    one seq.
    """
    return list({job.seq: job for job in jobs}.values())


class Worker:
    """One worker of queues, which is a process of its own."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._rng = random.Random(f"{plan.seed}/{plan.node}/{plan.life}")
        self._connection = Connection(plan.port)
        self._numbers = itertools.count(1)
        self._tail = list(read_file(Path(plan.file), _TAIL_BYTES))
        self._notes = Notes(plan.file)
        self._is_stopping = False
        self._leases: dict[tuple[str, int], Held] = {}

    def stop(self) -> None:
        """Stop after the current jobs are done."""
        self._is_stopping = True

    def run(self) -> None:
        """Work until stopped."""
        plan = self._plan
        self._notes.add("begin", plan.node, plan.life, wall_ms())
        if plan.fair_max:
            while not self._is_stopping:
                self._be_fair()
            return
        self._ack_for_predecessor()
        while not self._is_stopping:
            topic = self._rng.choice(plan.queues)
            if plan.is_pushed:
                self._work_on_stream(topic)
            else:
                self._claim(topic)

    # -- asking ----------------------------------------------------------------------------

    def _name(self) -> str:
        return f"{self._plan.node}/{self._plan.life}/{next(self._numbers)}"

    def _ask(self, topic: str, verb: str, body: Json) -> Json | None:
        """The answer, or None if no answer came or the server cannot answer now."""
        try:
            status, answer = self._connection.ask("POST", f"/v0/topics/{topic}/{verb}", body)
        except _BREAKS:
            self._connection.close()
            time.sleep(_AGAIN_S)
            return None
        if status == 503:
            self._connection.close()
            time.sleep(_AGAIN_S)
            return answer
        if status != 200:
            self._notes.add("problem", f"{verb} {topic} {body}: {status} {answer}")
        return answer

    def _call(
        self, kind: str, topic: str, seqs: list[int], leases: list[str] | None, value_ms: int = 0
    ) -> bool:
        """Send one ack, nack or extend; return whether it got an answer."""
        body: Json = {"node": self._plan.node, "seqs": seqs}
        if leases is not None:
            body["lease_ids"] = leases
        if kind != "ack":
            body["delay_ms" if kind == "nack" else "lease_ms"] = value_ms
        name = self._name()
        node = self._plan.node
        self._notes.add("call", name, kind, topic, node, seqs, leases, value_ms, wall_ms())
        answer = self._ask(topic, kind, body)
        if answer is None:
            return False
        if "error" in answer:
            self._notes.add("refused", name, answer["error"]["code"])
            return False
        done = answer[{"ack": "acked", "nack": "nacked", "extend": "extended"}[kind]]
        self._notes.add("answer", name, wall_ms(), done, answer["skipped"])
        return True

    # -- jobs ------------------------------------------------------------------------------

    def _claim(self, topic: str) -> None:
        rng = self._rng
        lease_ms, wait_ms = rng.choice(LEASES_MS), rng.choice(_WAITS_MS)
        jobs = self._claimed(topic, rng.choice(_BATCHES), lease_ms, wait_ms)
        if not jobs and not wait_ms:
            time.sleep(_AGAIN_S)
        self._work(topic, jobs)

    def _claimed(self, topic: str, most: int, lease_ms: int, wait_ms: int) -> list[Held]:
        body = {"node": self._plan.node, "max": most, "lease_ms": lease_ms, "wait_ms": wait_ms}
        answer = self._ask(topic, "claim", body)
        if answer is None or "error" in answer:
            return []
        jobs: list[Json] = answer["claimed"]
        if jobs:
            note_grants(self._notes, topic, "", lease_ms, jobs)
        return [held(topic, lease_ms, job) for job in jobs]

    def _work_on_stream(self, topic: str) -> None:
        rng = self._rng
        try:
            stream = Stream(self._plan, self._notes, self._name(), topic, rng)
        except _BREAKS:
            time.sleep(_AGAIN_S)
            return
        until = time.monotonic() + rng.choice((0.3, 1.5, 6.0)) * rng.random()
        last: list[Held] = []
        while time.monotonic() < until and not self._is_stopping and not stream.is_over.is_set():
            jobs: list[Held] = []
            with contextlib.suppress(queue.Empty):
                jobs.append(stream.arrived.get(timeout=0.1))
                while len(jobs) < 64:
                    jobs.append(stream.arrived.get_nowait())
            last = jobs or last
            self._work(topic, jobs)
        stream.close()
        if last and rng.random() < 0.3:
            # It may be released, claimed by another worker, or completed by now.
            self._effects(last)
            self._ack(topic, last)

    def _work(self, topic: str, jobs: list[Held]) -> None:
        """Execute jobs in order and ack them in groups; sometimes nack or drop one."""
        rng = self._rng
        done: list[Held] = []
        group = rng.choice((1, 4, 64))
        for index, job in enumerate(jobs):
            before = self._leases.get((topic, job.seq))
            self._leases[topic, job.seq] = job
            if before is not None and rng.random() < _STALE:
                self._use_stale(before)
            dice = rng.random()
            if job.data["is_poison"] or dice < _NACK:
                delay_ms = rng.choice((0, 0, 50, 300))
                self._call("nack", topic, [job.seq], [job.lease_id], delay_ms)
                continue
            dice -= _NACK
            if dice < _FORGET:
                continue
            if dice < _FORGET + _OVERSLEEP and job.lease_ms <= _OVERSLEPT_MS:
                time.sleep(job.lease_ms / 1000 + rng.uniform(0.05, 0.5))
            elif dice < _FORGET + _OVERSLEEP + _EXTEND:
                rest = newest(jobs[index:])
                leases = [each.lease_id for each in rest]
                seqs = [each.seq for each in rest]
                self._call("extend", topic, seqs, leases, rng.choice(LEASES_MS))
            self._effects([job])
            done.append(job)
            if len(done) >= group:
                self._ack(topic, done)
                done = []
        self._ack(topic, done)

    def _use_stale(self, job: Held) -> None:
        """Act like a slow process that forgot that its lease has expired; the server must skip all
        of it.
        """
        kind = self._rng.choice(("ack", "nack", "extend"))
        if kind == "ack":
            self._effects([job])
        self._call(kind, job.queue, [job.seq], [job.lease_id], LEASES_MS[0])

    def _effects(self, jobs: list[Held]) -> None:
        node = self._plan.node
        for job in jobs:
            self._notes.add(
                "effect",
                job.queue,
                job.data["id"],
                job.seq,
                job.lease_id,
                job.deliveries,
                node,
                wall_ms(),
            )

    def _ack(self, topic: str, done: list[Held]) -> None:
        if not done:
            return
        done = newest(done)
        seqs = [job.seq for job in done]
        leases = [job.lease_id for job in done]
        fence = None if self._rng.random() < _WITHOUT_FENCE else leases
        answered = self._call("ack", topic, seqs, fence)
        dice = self._rng.random()
        if dice < (_DOUBLE_ACK if answered else _RETRY):
            self._call("ack", topic, seqs, leases)

    def _ack_for_predecessor(self) -> None:
        """Ack again, under the same name, the last jobs of the previous process, which it may have
        acked.
        """
        effects = [line for line in self._tail if line[0] == "effect"][-20:]
        for topic in self._plan.queues:
            mine = [line for line in effects if line[1] == topic]
            found = {(line[3], line[4]) for line in mine}
            # A job may occur twice, with two leases: each is a call with its own seq.
            by_seq = dict(sorted(found))
            if by_seq:
                self._call("ack", topic, list(by_seq), list(by_seq.values()))

    def _be_fair(self) -> None:
        (topic,) = self._plan.queues
        self._notes.add("waiting", wall_ms())
        jobs = self._claimed(topic, self._plan.fair_max, 60_000, 2000)
        if jobs:
            self._effects(jobs)
            self._call("ack", topic, [job.seq for job in jobs], [job.lease_id for job in jobs])


def main() -> None:
    """Run one worker until it is stopped."""
    worker = Worker(Plan(**json.loads(sys.argv[1])))
    signal.signal(signal.SIGTERM, lambda *_: worker.stop())
    worker.run()


if __name__ == "__main__":
    main()
