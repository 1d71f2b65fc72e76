"""Chaos of routers: one source with twenty destinations, a chain of five and a queue, over kills.

Owns the server, the writers, the readers that remember every seq's record, and the cycle: write and
interfere until `kill -9`, verify the files, restart, wait until everything is forwarded, judge. All
routers are `exactly_once`. The interference removes records from the source as soon as they are
forwarded (a delete, a cap, another class, the whole topic), and copies from destinations. Then no
acknowledged record may be missing, doubled or back after its delete, and every seq must still have
the record that a reader saw. One seed decides all random choices; only the scheduling of processes
is not repeatable. Called by `test_router_chaos`.
"""

from __future__ import annotations

import http.client
import itertools
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tests.contract.driver import Server
from tests.crash.kills.ledger import Json
from tests.crash.kills.writers import Connection
from topics_server.wal.fs import OsFs
from topics_server.wal.tools.dump import verify

FAN: Final = 20
CHAIN: Final = 5
SOURCE: Final = "src"
QUEUE: Final = "jobs"
ENVIRONMENT: Final = {
    "TOPICS_SEGMENT_MAX_EVENTS": "100",
    "TOPICS_SEGMENT_MAX_AGE_MS": "500",
    "TOPICS_HOT_RETAIN_SEGMENTS": "1",
    "TOPICS_CHECKPOINT_INTERVAL_MS": "200",
    "TOPICS_WAL_FSYNC_INTERVAL_MS": "50",
    "TOPICS_WAL_SHARDS": "2",
}
_BREAKS: Final = (OSError, http.client.HTTPException)
_WRITERS: Final = 2
_UP_S: Final = (0.1, 0.6)
_CALM_S: Final = 30.0
# A destination is sometimes cut down to this many copies, so that a long run stays small.
_KEPT: Final = 300
_CLASSES: Final = ("fsync", "disk", "memory")


class Lost(AssertionError):
    """The server broke a promise; the message says which, with seed, cycle and directory."""


class Copies:
    """The possible content of one destination of `SOURCE`: ids by seq as readers saw them, and
    deleted ids.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.seen: dict[int, str] = {}
        self.where: dict[str, int] = {}
        # Deletes with an answer, and deletes with an unknown result.
        self.dead: set[str] = set()
        self.doubtful: set[str] = set()
        self.dead_below = 0
        self.doubtful_below = 0
        self.problems: list[str] = []

    def see(self, records: list[Json]) -> None:
        """Note records that a reader got."""
        for record in records:
            seq, name = record["$seq"], record["data"]["id"]
            if record["data"]["pad"] != pad_of(name):
                self.problems.append(f"{self.name}: {seq} is not what was written")
            known = self.seen.setdefault(seq, name)
            if known != name:
                self.problems.append(f"{self.name}: {seq} was {known} and is {name}")
            at = self.where.setdefault(name, seq)
            if at != seq:
                self.problems.append(f"{self.name}: {name} is there twice, at {at} and {seq}")

    def judge(self, records: list[Json], written: dict[int, str]) -> list[str]:
        """Judge all present records once everything is forwarded; `written`: ids by source seq."""
        self.see(records)
        wrong, self.problems = self.problems, []
        here = {record["data"]["id"]: record["$seq"] for record in records}
        for name, seq in here.items():
            if name in self.dead or seq < self.dead_below:
                wrong.append(f"{self.name}: {name} at {seq} is back from the dead")
        order = [record["data"]["id"] for record in records]
        known = [name for _, name in sorted(written.items()) if name in here]
        if [name for name in order if name in set(known)] != known:
            wrong.append(f"{self.name}: copies are not in their source's order")
        for name in written.values():
            at = self.where.get(name)
            gone = name in self.dead or name in self.doubtful
            if at is None or not (name in here or gone or at < self.doubtful_below):
                wrong.append(f"{self.name}: {name} is lost, it was at {at}")
        self.doubtful -= set(here)
        self.dead |= self.doubtful
        self.doubtful.clear()
        self.dead_below = max(
            self.dead_below, min(self.doubtful_below, min(here.values(), default=0))
        )
        return wrong


def pad_of(name: str) -> str:
    """The padding in the record of an id."""
    return name * (sum(name.encode()) % 9)


class Writer(threading.Thread):
    """Appends batches to the source until the server dies; notes the acknowledged ones."""

    def __init__(self, port: int, label: str, pause: threading.Lock, seed: str) -> None:
        super().__init__(name=label, daemon=True)
        self.written: dict[int, str] = {}
        self.problems: list[str] = []
        self.stop = threading.Event()
        self._rng = random.Random(f"{seed}/{label}")
        self._connection = Connection(port)
        self._label = label
        self._pause = pause

    def run(self) -> None:
        """Append batch after batch."""
        rng = self._rng
        for number in itertools.count():
            if self.stop.is_set():
                self._connection.close()
                return
            names = [f"{self._label}.{number}.{i}" for i in range(rng.choice((1, 1, 3, 20)))]
            records = [
                {"data": {"id": name, "pad": pad_of(name)}, "tag": f"t{rng.randrange(4)}"}
                for name in names
            ]
            try:
                with self._pause:
                    status, answer = self._connection.ask(
                        "POST", f"/v0/topics/{SOURCE}", {"records": records}
                    )
            except _BREAKS:
                self._connection.close()
                return
            if status == 200:
                self.written.update(enumerate(names, answer["first_seq"]))
            elif status not in (429, 503):
                self.problems.append(f"append: {status} {answer}")
                return
            time.sleep(rng.choice((0.0, 0.002, 0.02)))


class Reader(threading.Thread):
    """Follows one destination with long polls and remembers its records."""

    def __init__(self, port: int, name: str) -> None:
        super().__init__(name=f"reader of {name}", daemon=True)
        self.topic = name
        self.seen: list[Json] = []
        self.stop = threading.Event()
        self._connection = Connection(port)

    def run(self) -> None:
        """Read on from the last position until the server dies."""
        path = f"/v0/topics/{self.topic}/diff"
        try:
            _, state = self._connection.ask("GET", f"/v0/topics/{self.topic}?touch=false")
            cursor = state["head_seq"]
            while not self.stop.is_set():
                body = {"from_seq": cursor, "limit": 1000, "wait_ms": 300}
                status, page = self._connection.ask("POST", path, body)
                if status == 200:
                    self.seen += page["records"]
                    cursor = page["next_from_seq"]
        except _BREAKS:
            return
        finally:
            self._connection.close()


class Chaos:
    """One server over many cycles."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory = directory
        self.seed = seed
        self.cycle = self.kills = self.read = self.dropped = 0
        self.server = Server(directory, ENVIRONMENT)
        self.rng = random.Random(f"{seed}")
        self.pause = threading.Lock()
        fan = [f"fan-{number:02}" for number in range(FAN)]
        chain = [f"chain-{number}" for number in range(1, CHAIN + 1)]
        self.dests = [*fan, *chain, QUEUE]
        self.edges = [(SOURCE, dest) for dest in (*fan, QUEUE)]
        self.edges += list(itertools.pairwise([SOURCE, *chain]))
        self.copies = {dest: Copies(dest) for dest in self.dests}
        # Records of the source by seq: acknowledged, or found there.
        self.written: dict[int, str] = {}
        # Source topics that were removed, and their copied records.
        self.kept: dict[str, list[str]] = {}
        self.connection: Connection | None = None
        self.meddled: dict[str, int] = {}

    # # -- requests --------------------------------------------------------------------------

    def ask(self, method: str, path: str, body: object = None) -> Json:
        """Send one request that must succeed."""
        assert self.connection is not None
        status, answer = self.connection.ask(method, path, body)
        if status not in (200, 201):
            raise Lost(self._told([f"{method} {path}: {status} {answer}"]))
        return answer

    def _start(self) -> None:
        try:
            self.server.start()
        except AssertionError as error:
            raise Lost(self._told([f"did not start again: {error}"])) from None
        self.connection = Connection(self._port())

    def _hang_up(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def _port(self) -> int:
        return int((self.directory / "port").read_text())

    # -- a run -----------------------------------------------------------------------------

    def set_up(self) -> None:
        """Create the topics that routers must not create, and all routers."""
        self._start()
        self.ask("PUT", f"/v0/topics/{SOURCE}", {"durability": "disk"})
        self.ask("PUT", f"/v0/topics/{QUEUE}", {"type": "queue", "durability": "fsync"})
        for number, durability in enumerate(_CLASSES):
            self.ask("PUT", f"/v0/topics/fan-{number:02}", {"durability": durability})
        for source, dest in self.edges:
            self._route(source, dest)

    def _route(self, source: str, dest: str) -> None:
        body = {"source": source, "dest": dest, "guarantee": "exactly_once"}
        self.ask("PUT", f"/v0/routers/{source}.{dest}", body)

    def tear_down(self) -> None:
        """End the server in any state."""
        self._hang_up()
        if self.server.process is not None:
            self.server.signal(signal.SIGKILL)

    def run_cycle(self) -> None:
        """Write and interfere until the kill, verify the files, restart, judge."""
        self.cycle += 1
        self.rng = random.Random(f"{self.seed}/{self.cycle}")
        self._until_killed()
        report = verify(OsFs(), str(self.server.data_dir))
        self._fail_on([f"verify: {problem}" for problem in report.problems])
        self._start()
        # The kill may have come between the two halves of a cap.
        self.ask("PUT", f"/v0/topics/{SOURCE}", {"durability": "disk"})
        self._judge()
        self._cut_down()

    def story(self) -> str:
        """One line of figures."""
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.meddled.items()))
        return (
            f"{self.cycle} cycles, {self.kills} kills, {len(self.written)} records into "
            f"{len(self.dests)} destinations, {self.read} copies read before a kill; {kinds}"
        )

    def _until_killed(self) -> None:
        seed = f"{self.seed}/{self.cycle}"
        label = f"w{self.cycle}"
        writers = [
            Writer(self._port(), f"{label}{'ab'[n]}", self.pause, seed) for n in range(_WRITERS)
        ]
        watched = self.rng.sample(self.dests, 6)
        readers = [Reader(self._port(), name) for name in watched]
        everybody: list[Writer | Reader] = [*writers, *readers]
        for thread in everybody:
            thread.start()
        ends = time.monotonic() + self.rng.uniform(*_UP_S)
        killer = threading.Timer(ends - time.monotonic(), self._kill)
        killer.start()
        try:
            while time.monotonic() < ends:
                self._meddle()
        except _BREAKS:
            pass
        finally:
            killer.join()
            self._hang_up()
        for thread in everybody:
            thread.stop.set()
        for thread in everybody:
            thread.join(30)
            assert not thread.is_alive(), "a thread hangs"
        for writer in writers:
            self._fail_on(writer.problems)
            self.written.update(writer.written)
        for reader in readers:
            self.read += len(reader.seen)
            self.copies[reader.topic].see(reader.seen)

    def _kill(self) -> None:
        process = self.server.process
        if process is not None and process.poll() is None:
            self.server.signal(signal.SIGKILL)
            self.kills += 1

    # -- interfering -----------------------------------------------------------------------

    def _meddle(self) -> None:
        kinds: dict[str, Callable[[], None]] = {
            "source deletes": self._delete_source,
            "source caps": self._cap_source,
            "source classes": self._reclass_source,
            "drops": self._drop_source,
            "copy deletes": self._delete_copies,
            "jobs": self._work,
            "router changes": self._change_router,
        }
        kind = self.rng.choice(sorted(kinds))
        kinds[kind]()
        self.meddled[kind] = self.meddled.get(kind, 0) + 1

    def _forwarded(self) -> int:
        """The seq of the source that all its routers have passed."""
        names = [f"{SOURCE}.{dest}" for source, dest in self.edges if source == SOURCE]
        return min(int(self.ask("GET", f"/v0/routers/{name}")["cursor_seq"]) for name in names)

    def _delete_source(self) -> None:
        self.ask("POST", f"/v0/topics/{SOURCE}/delete", {"before_seq": self._forwarded() + 1})

    def _cap_source(self) -> None:
        """Evict all records but one; no client writes meanwhile."""
        with self.pause:
            self._quiet(SOURCE)
            self.ask("PUT", f"/v0/topics/{SOURCE}", {"durability": "disk", "cap_records": 1})
            self.ask("PUT", f"/v0/topics/{SOURCE}", {"durability": "disk"})

    def _reclass_source(self) -> None:
        with self.pause:
            self._quiet(SOURCE)
            durability = self.rng.choice(_CLASSES)
            self.ask("PUT", f"/v0/topics/{SOURCE}", {"durability": durability})

    def _drop_source(self) -> None:
        """Use a source of its own: after its records are copied, drop it with its router."""
        self.dropped += 1
        source, dest = f"once-{self.dropped}", f"kept-{self.dropped}"
        body = {"source": source, "dest": dest, "guarantee": "exactly_once"}
        self.ask("PUT", f"/v0/routers/{source}", body)
        names = [f"{source}.{number}" for number in range(20)]
        records = [{"data": {"id": name, "pad": pad_of(name)}} for name in names]
        self.ask("POST", f"/v0/topics/{source}", {"records": records})
        while self.ask("GET", f"/v0/routers/{source}")["lag"]:
            time.sleep(0.001)
        self.kept[dest] = names
        self.ask("DELETE", f"/v0/topics/{source}")

    def _delete_copies(self) -> None:
        copies = self.copies[self.rng.choice([dest for dest in self.dests if dest != QUEUE])]
        if copies.name.startswith("chain") and copies.name != f"chain-{CHAIN}":
            return  # records that are deleted on the way need not arrive
        page = self.ask("POST", f"/v0/topics/{copies.name}/diff", {"from_seq": 0, "limit": 1000})
        copies.see(page["records"])
        if not page["records"]:
            return
        upto = self.rng.choice(page["records"])["$seq"]
        gone = {r["data"]["id"] for r in page["records"] if r["$seq"] <= upto}
        copies.doubtful |= gone
        self.ask("POST", f"/v0/topics/{copies.name}/delete", {"before_seq": upto + 1})
        copies.doubtful -= gone
        copies.dead |= gone

    def _work(self) -> None:
        copies = self.copies[QUEUE]
        body = {"node": "w", "max": 20, "lease_ms": 60_000}
        jobs = self.ask("POST", f"/v0/topics/{QUEUE}/claim", body)["claimed"]
        copies.see(jobs)
        if not jobs:
            return
        gone = {job["data"]["id"] for job in jobs}
        copies.doubtful |= gone
        seqs = [job["$seq"] for job in jobs]
        acked = self.ask("POST", f"/v0/topics/{QUEUE}/ack", {"node": "w", "seqs": seqs})
        assert acked["acked"] == len(seqs), acked
        copies.doubtful -= gone
        copies.dead |= gone

    def _change_router(self) -> None:
        """Give a router another definition for the same records: it must continue at its
        position.
        """
        source, dest = self.rng.choice(self.edges)
        body: Json = {
            "source": source,
            "dest": dest,
            "guarantee": "exactly_once",
            "preserve_node": self.rng.random() < 0.5,
        }
        self.ask("PUT", f"/v0/routers/{source}.{dest}", body)

    # -- judging ---------------------------------------------------------------------------

    def _quiet(self, origin: str | None = None) -> None:
        """Wait until every router (of one topic) is at its source's head."""
        deadline = time.monotonic() + _CALM_S
        waiting = [f"{s}.{d}" for s, d in self.edges if origin in (None, s)]
        while waiting:
            state: Json = {}
            while True:
                state = self.ask("GET", f"/v0/routers/{waiting[-1]}")
                if state["lag"] == 0:
                    break
                if time.monotonic() > deadline:
                    raise Lost(self._told([f"never goes on: {state}"]))
                time.sleep(0.002)
            waiting.pop()

    def _read_all(self, name: str) -> list[Json]:
        records: list[Json] = []
        cursor = 0
        while True:
            body = {"from_seq": cursor, "limit": 1000}
            page = self.ask("POST", f"/v0/topics/{name}/diff", body)
            stone = page["tombstone"]
            if stone:
                self._fail_on([f"{name} has lost something: {stone}"])
            records += page["records"]
            cursor = page["next_from_seq"]
            if page["caught_up"]:
                return records

    def _judge(self) -> None:
        # Along the chain, the sources move one after the other.
        for _ in range(2):
            self._quiet()
        wrong: list[str] = []
        for dest, copies in self.copies.items():
            wrong += copies.judge(self._read_all(dest), self.written)
        for dest, names in self.kept.items():
            found = [record["data"]["id"] for record in self._read_all(dest)]
            if found != names:
                wrong.append(f"{dest}: {found} of {names}")
        self._fail_on(wrong)

    def _cut_down(self) -> None:
        """Delete old copies, so that a long run stays small; they must stay deleted."""
        for dest, copies in self.copies.items():
            live = [seq for seq, name in copies.seen.items() if name not in copies.dead]
            if dest.startswith("chain") or len(live) > 2 * _KEPT:
                upto = sorted(live)[-_KEPT:][0] if len(live) > _KEPT else 0
                gone = {name for seq, name in copies.seen.items() if seq < upto}
                self.ask("POST", f"/v0/topics/{dest}/delete", {"before_seq": max(upto, 1)})
                copies.dead |= gone
        if len(self.kept) > 20:
            for dest in list(self.kept)[:10]:
                self.ask("DELETE", f"/v0/topics/{dest}")
                del self.kept[dest]

    def _fail_on(self, problems: list[str]) -> None:
        if problems:
            raise Lost(self._told(problems))

    def _told(self, problems: list[Any]) -> str:
        shown = "\n  ".join(str(problem) for problem in problems[:12])
        return (
            f"seed {self.seed}, cycle {self.cycle}, data kept in {self.directory} "
            f"(server log {self.server.log.name}); {len(problems)} problems:\n  {shown}"
        )
