"""The run of `topics torture`: a server is killed and restarted, and everything is checked.

A cycle starts the server, compares every topic with the acknowledged records, lets the writers
append for a moment, kills the server with SIGKILL and checks its files. Some cycles kill the server
while it starts. In some cycles the disk is "full": `TOPICS_MIN_FREE_BYTES` is set a little below
the free space, so the server must soon refuse appends although the disk has room. Called by
`torture`.
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

from topics_server.cli.connection import ServerConnection, ServerUnreachable, topic_path
from topics_server.cli.paging import pages
from topics_server.cli.server.child import child_server, spawned_server
from topics_server.cli.torture.acknowledged import AcknowledgedTopic, Found
from topics_server.cli.torture.own_folder import OwnFolder
from topics_server.cli.torture.writers import TopicWriter, repeat_unknown
from topics_server.runtime.clock import monotonic_ms, random_u64
from topics_server.values.errors import StorageError
from topics_server.values.limits import MIB
from topics_server.wal.fs import OsFs
from topics_server.wal.tools.dump import verify

CLASSES: Final = ("fsync", "disk")
FILLER: Final = "torture-filler"
# How long writers write in a cycle, and how long a start runs before it is killed.
WRITE_S: Final = (0.2, 2.0)
START_S: Final = (0.05, 0.6)
KILL_STARTING_EVERY: Final = 4
FILL_EVERY: Final = 12
# The first cycle with a killed start, and the first with a full disk.
FIRST: Final = 1
# The disk is full once the server has taken about this much; the filler stops at twice as much.
FILL_BYTES: Final = 48 * MIB
_FILL_STEP_BYTES: Final = MIB
_FILL_PAUSE_S: Final = 0.05
# The server checks the free space once a second.
_AGAIN_WITHIN_S: Final = 60.0
_SLACK_BYTES: Final = 32 * MIB
_OPTIONS: Final = (
    "--checkpoint-interval-ms", "1000",
    "--segment-max-events", "2000",
    "--segment-max-age-ms", "500",
)  # fmt: skip

Report = Callable[[str], None]


class Totals(msgspec.Struct):
    """Counts of a run so far."""

    cycles: int = 0
    kills: int = 0
    appends: int = 0
    records_checked: int = 0
    disk_full: str = "not tried"


class _State(msgspec.Struct):
    head_seq: int


_STATE: Final = msgspec.json.Decoder(_State)


class _Record(msgspec.Struct):
    data: object
    seq: int = msgspec.field(name="$seq")


_RECORD: Final = msgspec.json.Decoder(_Record)


class Broken(Exception):
    """The server broke a promise; the arguments are the problems."""


class TortureRun:
    """One server over many cycles."""

    def __init__(
        self,
        folder: OwnFolder,
        *,
        writers: int,
        size_limit: int,
        stop: threading.Event,
        report: Report,
    ) -> None:
        self.totals = Totals()
        self._folder = folder
        self._size_limit = size_limit
        self._stop = stop
        self._report = report
        # The server itself must leave this many bytes free.
        self._least_free = max(0, folder.free_bytes() - size_limit)
        self._topics = [
            AcknowledgedTopic(f"torture-{CLASSES[n % len(CLASSES)]}-{n}", CLASSES[n % len(CLASSES)])
            for n in range(writers)
        ]

    def run(self, until_ms: float) -> None:
        """Run cycles until the given time, and until each kind of cycle has run once.

        Raises `Broken`.
        """
        reported_ms = monotonic_ms()
        while not self._stop.is_set():
            number = self.totals.cycles
            if number > FIRST and monotonic_ms() >= until_ms:
                break
            if number % FILL_EVERY == FIRST:
                self._fill()
            self.cycle()
            if number % KILL_STARTING_EVERY == FIRST:
                self._kill_starting()
            if monotonic_ms() - reported_ms > 30_000:
                reported_ms = monotonic_ms()
                self._report(self.story())
        with self._server() as (_, client):
            self._check(client)

    def story(self) -> str:
        """One line with the counts of the run."""
        done = self.totals
        return (
            f"{done.kills} kills in {done.cycles} cycles, {done.appends:,} appends acknowledged, "
            f"{done.records_checked:,} records checked, nothing wrong"
        )

    # -- kills -----------------------------------------------------------------------------------

    def cycle(self) -> None:
        """Start, check, write, kill, check the files. Raises `Broken`, `Failure`."""
        with self._server() as (process, client):
            self._check(client)
            if self._stop.is_set():
                return
            ended = threading.Event()
            writers = [TopicWriter(client.url, topic, ended) for topic in self._topics]
            for writer in writers:
                writer.start()
            self._stop.wait(_between(*WRITE_S))
            self._kill(process)
            ended.set()
            for writer in writers:
                writer.join()
                self.totals.appends += writer.appends
            _fail_on([line for writer in writers for line in writer.problems])
        self._verify()
        self.totals.cycles += 1
        used = self._folder.used_bytes()
        if used > self._size_limit + _SLACK_BYTES:
            raise Broken(f"the store takes {used // MIB} MiB, more than --size-limit allows")

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        if process.poll() is not None:
            raise Broken(f"the server ended by itself, with {process.returncode}")
        process.kill()
        process.wait()
        self.totals.kills += 1

    def _kill_starting(self) -> None:
        process = spawned_server(self._folder.path, 0, self._options(self._least_free))
        self._stop.wait(_between(*START_S))
        self._kill(process)
        self._verify()

    @contextlib.contextmanager
    def _server(
        self, least_free: int | None = None
    ) -> Iterator[tuple[subprocess.Popen[bytes], ServerConnection]]:
        """A ready server, and a client for it."""
        options = self._options(self._least_free if least_free is None else least_free)
        try:
            with child_server(self._folder.path, 0, self._stop, options) as (process, url):
                client = ServerConnection(url or "http://127.0.0.1:1")
                try:
                    yield process, client
                finally:
                    client.close()
        except ServerUnreachable as error:
            raise Broken(f"the server ended by itself: {error.message}") from None

    def _options(self, least_free: int) -> list[str]:
        return [*_OPTIONS, "--min-free-bytes", str(least_free)]

    def _verify(self) -> None:
        if not self._folder.data.exists():
            return
        try:
            report = verify(OsFs(), str(self._folder.data), None)
        except StorageError as error:
            raise Broken(f"the files cannot be checked: {error}") from None
        _fail_on([f"the files after the kill: {problem}" for problem in report.problems])

    # -- checks ----------------------------------------------------------------------------------

    def _check(self, client: ServerConnection) -> None:
        """Compare every topic with its acknowledged records, and repeat the unknown calls."""
        for topic in self._topics if not self._stop.is_set() else ():
            config = {"durability": topic.durability, "idempotency_window_ms": 3_600_000}
            if self.totals.cycles == 0:
                client.call("PUT", topic_path(topic.name), msgspec.json.encode(config))
            state = _STATE.decode(client.call("GET", topic_path(topic.name)))
            found = _read(client, topic.name)
            self.totals.records_checked += len(found)
            _fail_on(topic.check(found, state.head_seq))
            if topic.unknown is not None:
                _fail_on(repeat_unknown(client, topic, topic.stored_at(found)))

    # -- the full disk ---------------------------------------------------------------------------

    def _fill(self) -> None:
        """Fill the disk up to the server's limit: the server must refuse appends, and lose
        nothing.
        """
        floor = max(self._least_free, self._folder.free_bytes() - FILL_BYTES)
        with self._server(floor) as (process, client):
            self._check(client)
            stored = self._fill_up(client)
            if stored is None:
                return
            # Reads and deletes must still work, and a refused append must have stored nothing.
            self._check(client)
            self._kill(process)
        self._verify()
        with self._server(floor) as (process, client):
            self._check(client)
            _fail_on(self._filler_problems(client, stored))
            client.call("DELETE", topic_path(FILLER))
            self._kill(process)
        self._verify()
        with self._server() as (_, client):
            self._check(client)
            self._append_again(client)

    def _fill_up(self, client: ServerConnection) -> int | None:
        """Append until the server refuses. Returns the number of stored records.

        None: the server did not refuse, because other programs freed space or the run was stopped.
        """
        record = {"data": "x" * (_FILL_STEP_BYTES - 1024)}
        body = msgspec.json.encode({"records": [record]})
        for number in range(2 * FILL_BYTES // _FILL_STEP_BYTES):
            if self._stop.wait(_FILL_PAUSE_S):
                return None
            answer = client.ask("POST", topic_path(FILLER), body)
            if answer.status in (200, 201):
                continue
            if answer.status != 429:
                raise Broken(f"on a full disk an append was answered {answer.refusal.message}")
            self.totals.disk_full = (
                f"refused after {number * _FILL_STEP_BYTES // MIB} MiB, nothing lost"
            )
            return number
        if self.totals.disk_full == "not tried":
            self.totals.disk_full = "not reached: other programs made room meanwhile"
        client.call("DELETE", topic_path(FILLER))
        return None

    def _filler_problems(self, client: ServerConnection, stored: int) -> list[str]:
        answer = client.ask("GET", topic_path(FILLER))
        if answer.status == 404:
            state, count = _State(0), 0
        else:
            state = _STATE.decode(answer.body)
            count = len(_read(client, FILLER))
        if count == stored == state.head_seq:
            return []
        return [
            f"on a full disk {stored} records were acknowledged, and {count} are there "
            f"(head {state.head_seq})"
        ]

    def _append_again(self, client: ServerConnection) -> None:
        """Check that appends succeed within some seconds after space was freed."""
        body = msgspec.json.encode({"records": [{"data": 0}]})
        until_ms = monotonic_ms() + _AGAIN_WITHIN_S * 1000
        while (answer := client.ask("POST", topic_path(FILLER), body)).status == 429:
            if self._stop.wait(_FILL_PAUSE_S):
                return
            if monotonic_ms() > until_ms:
                raise Broken(
                    f"with room again, appends are refused for {_AGAIN_WITHIN_S:.0f} s: "
                    f"{answer.refusal.message}"
                )
        if answer.status not in (200, 201):
            raise Broken(f"with room again, an append was answered {answer.refusal.message}")
        client.call("DELETE", topic_path(FILLER))


def _read(client: ServerConnection, topic: str) -> list[Found]:
    found: list[Found] = []
    for page in pages(client, topic, 0, {}):
        for raw in page.records:
            record = _RECORD.decode(raw)
            found.append(Found(record.seq, record.data))
    return found


def _fail_on(wrong: Sequence[str]) -> None:
    if wrong:
        raise Broken(*wrong)


def _between(least: float, most: float) -> float:
    return least + (most - least) * (random_u64() % 1000) / 1000
