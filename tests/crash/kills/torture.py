"""One torture run: a real server, eight mixed writers, `kill -9`, restart, check; repeatedly.

Owns the data directory, the topics with their ledgers, and the cycle. The seed decides every choice
except the scheduling of processes. A problem ends the run; the directory stays, and the message
names it.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from pathlib import Path
from typing import Final

from tests.contract.driver import Server, good
from tests.crash.kills.ledger import Call, Json, TopicLedger, View, bounds
from tests.crash.kills.turnover import Turnover, TurnoverWriter
from tests.crash.kills.writers import PAD, Connection, Moments, Writer, send, until_taken
from topics_server.wal.fs import OsFs
from topics_server.wal.tools.dump import verify

WRITERS: Final = 8
# Data, framing and tag of the writers' largest record.
RECORD_BYTES_MAX: Final = len(PAD) + 100
WINDOW_MS: Final = 600_000
# Some cycles begin with a kill during recovery, some with a recreated topic.
_KILL_STARTING: Final = 0.1
_RECREATE: Final = 0.05
_RETRIES: Final = 12

TOPICS: Final[dict[str, Json]] = {
    "fsync-plain": {"durability": "fsync"},
    "fsync-cap": {"durability": "fsync", "cap_records": 700},
    "disk-plain": {"durability": "disk"},
    "disk-cap": {"durability": "disk", "cap_bytes": 150_000},
    "disk-records": {"durability": "disk", "cap_records": 900},
    "memory-cap": {"durability": "memory", "cap_records": 1200},
}
ENVIRONMENT: Final = {
    "TOPICS_SEGMENT_MAX_EVENTS": "300",
    "TOPICS_SEGMENT_MAX_AGE_MS": "500",
    "TOPICS_HOT_RETAIN_SEGMENTS": "1",
    "TOPICS_CHECKPOINT_INTERVAL_MS": "200",
    "TOPICS_WAL_FSYNC_INTERVAL_MS": "50",
    "TOPICS_WAL_SHARDS": "2",
}


class Lost(AssertionError):
    """The server broke a promise; the message says which, with seed, cycle and directory."""


class Torture:
    """One server over many cycles."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory = directory
        self.cold = directory / "cold"
        self.seed = seed
        self.cycle = 0
        self.calls = 0
        self.kills = 0
        self.server = Server(directory, {**ENVIRONMENT, "TOPICS_COLD_DIR": str(self.cold)})
        self.moments = Moments()
        self.topics: dict[str, TopicLedger] = {}
        self.turnover = Turnover("turnover", self.moments)
        self.rng = random.Random(f"{seed}")

    def set_up(self) -> None:
        """Start the server and make the topics."""
        self._start()
        for name in TOPICS:
            self._create(name)

    def tear_down(self) -> None:
        """End the server, whatever its state."""
        if self.server.process is not None:
            self.server.signal(signal.SIGKILL)

    def run_cycle(self) -> None:
        """Write until killed, verify the files, restart, compare with the ledgers."""
        self.cycle += 1
        self.rng = random.Random(f"{self.seed}/{self.cycle}")
        writers = self._write_until_killed()
        self.calls += sum(len(ledger.calls) for ledger in self.topics.values())
        for writer in writers:
            self._fail_on(writer.problems)
        self._verify()
        if self.rng.random() < _KILL_STARTING:
            self._kill_starting()
        self._start()
        self._check()
        if self.rng.random() < _RECREATE:
            self._recreate(self.rng.choice(sorted(TOPICS)))

    def story(self) -> str:
        """One line of figures."""
        return f"{self.cycle} cycles, {self.kills} kills, {self.calls} appends; " + bounds(
            self.topics.values()
        )

    # -- steps -----------------------------------------------------------------------------

    def _start(self) -> None:
        try:
            self.server.start()
        except AssertionError as error:
            self._fail_on([f"did not start again: {error}"])

    def _port(self) -> int:
        return int((self.directory / "port").read_text())

    def _create(self, name: str) -> None:
        config = {**TOPICS[name], "idempotency_window_ms": WINDOW_MS}
        good(self.server.api.put(name, config))
        self.topics[name] = TopicLedger(
            name,
            cap_records=config.get("cap_records", 0),
            cap_bytes=config.get("cap_bytes", 0),
            record_bytes_max=RECORD_BYTES_MAX,
        )

    def _recreate(self, name: str) -> None:
        assert good(self.server.api.drop(name))["deleted"]
        self._create(name)

    def _write_until_killed(self) -> list[Writer]:
        ledgers = list(self.topics.values())
        seed = f"{self.seed}/{self.cycle}"
        writers = [
            Writer(f"w{number}", self._port(), self.rng.sample(ledgers, 3), self.moments, seed)
            for number in range(WRITERS - 1)
        ]
        last = self.turnover.writer(self._port(), seed)
        everybody: list[Writer | TurnoverWriter] = [*writers, last]
        for writer in everybody:
            writer.start()
        time.sleep(self.rng.uniform(0.05, 1.5))
        self._kill()
        for writer in everybody:
            writer.stop.set()
        for writer in everybody:
            writer.join(30)
            assert not writer.is_alive(), "a writer hangs"
        self._fail_on(last.problems)
        return writers

    def _kill(self) -> None:
        process = self.server.process
        assert process is not None
        self._fail_on([] if process.poll() is None else ["the server ended by itself"])
        self.server.signal(signal.SIGKILL)
        self.kills += 1

    def _kill_starting(self) -> None:
        process = self.server.spawn()
        time.sleep(self.rng.uniform(0.1, 0.6))
        process.kill()
        process.wait()
        self.kills += 1
        self._verify()

    def _verify(self) -> None:
        cold = str(self.cold) if self.cold.exists() else None
        report = verify(OsFs(), str(self.server.data_dir), cold)
        self._fail_on([f"verify: {problem}" for problem in report.problems])

    def _check(self) -> None:
        connection = Connection(self._port())
        try:
            for ledger in self.topics.values():
                view = read_view(connection, ledger.name)
                assert view is not None, f"topic {ledger.name} is gone"
                self._fail_on(ledger.check(view, self.moments.next()))
                self._fail_on(self._retry(connection, ledger))
            found = read_view(connection, self.turnover.name)
            self._fail_on(self.turnover.check(found))
        finally:
            connection.close()

    def _retry(self, connection: Connection, ledger: TopicLedger) -> list[str]:
        """Retry keyed calls: a call with a known result must answer with its old seqs."""
        open_calls = [call for call in ledger.keyed if call.first_seq is None]
        done = [call for call in ledger.keyed if call.first_seq is not None]
        wrong: list[str] = []
        for call in self.rng.sample(done, min(_RETRIES, len(done))):
            status, answer = retry(connection, ledger.name, call)
            last_seq = (call.first_seq or 0) + len(call.tags) - 1
            fits = status == 200 and answer["deduped"]
            if not fits or (answer["first_seq"], answer["last_seq"]) != (call.first_seq, last_seq):
                where = "header" if call.in_header else "body"
                wrong.append(
                    f"{ledger.name}: retry of call {call.number} (key in the {where}, first seq "
                    f"{call.first_seq}) was answered {status} {answer}"
                )
        for call in open_calls:
            wrong += self._retry_unknown(connection, ledger, call)
        return wrong

    def _retry_unknown(self, connection: Connection, ledger: TopicLedger, call: Call) -> list[str]:
        """Retry a call whose records no reader sees: either it is appended now, or its records are
        gone.
        """
        call.sent = self.moments.next()
        status, answer = retry(connection, ledger.name, call)
        if status != 200:
            return [f"{ledger.name}: retry of unknown call {call.number}: {status} {answer}"]
        call.first_seq = answer["first_seq"]
        if answer["deduped"]:
            if answer["last_seq"] > ledger.head_seq:
                return [f"{ledger.name}: {call.number} is a duplicate of nothing: {answer}"]
            return []
        call.acked = self.moments.next()
        ledger.calls.append(call)
        return []

    def _fail_on(self, problems: list[str]) -> None:
        if problems:
            shown = "\n  ".join(problems[:12])
            raise Lost(
                f"seed {self.seed}, cycle {self.cycle}, data kept in {self.directory} "
                f"(server log {self.server.log.name}); {len(problems)} problems:\n  {shown}"
            )


def retry(connection: Connection, topic: str, call: Call) -> tuple[int, Json]:
    """Send a call until it is taken: a server that has just started may throttle."""
    return until_taken(lambda: send(connection, topic, call), threading.Event())


def read_view(connection: Connection, topic: str) -> View | None:
    """All that a reader gets from seq 0 on; None if the topic does not exist."""
    status, state = connection.ask("GET", f"/v0/topics/{topic}?touch=false")
    if status == 404:
        return None
    assert status == 200, f"{topic}: {state}"
    records: list[Json] = []
    stones: list[Json] = []
    cursor = 0
    for _ in range(10_000):
        body = {"from_seq": cursor, "limit": 1000, "include_tags": True}
        status, page = connection.ask("POST", f"/v0/topics/{topic}/diff", body)
        assert status == 200, f"{topic}: {page}"
        records += page["records"]
        stones += [page["tombstone"]] if page["tombstone"] else []
        if page["caught_up"]:
            return View(records, stones, state["head_seq"], state["earliest_seq"], state["count"])
        assert page["next_from_seq"] > cursor, "a page moves its cursor"
        cursor = page["next_from_seq"]
    raise AssertionError("10,000 pages did not reach the head")
