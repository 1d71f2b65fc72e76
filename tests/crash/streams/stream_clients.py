"""The official clients of Durable Streams against one server that is killed again and again.

Owns one run: the stream, its writers (two official TypeScript producers, and the official Python
client with producer headers), its readers (both clients, long-polling and over SSE, each from the
beginning), the kills, the end, and the verdict. Writers and readers end by themselves: the run
tells the writers to end, the last one closes the stream, and that ends the readers. The Python
client of this version knows neither producers nor closed streams: its headers are ours, and it ends
at the last message. All waiting is bounded.
"""

from __future__ import annotations

import json
import random
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import durable_streams
import httpx

from tests.streams.node import Node

JSON: Final = "application/json"
BYTES: Final = "application/octet-stream"
# The most messages of a writer, so that a run is bounded on any machine.
MOST: Final = 60_000
END_WITHIN_S: Final = 90.0
_LAST: Final = {"w": "end", "n": 0}
_PAUSE_S: Final = (0.1, 1.2)
_AGAIN_S: Final = 0.05
_BROKEN: Final = (
    httpx.TransportError,
    durable_streams.FetchError,
    durable_streams.DurableStreamError,
)

Json = dict[str, Any]


class Script:
    """One of our scripts over the official TypeScript client, in its own Node process."""

    def __init__(self, found: Node, folder: Path, log: Path, *words: str) -> None:
        self.name = " ".join([words[0], *words[2:4]])
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [found.path, *words],
                cwd=folder,
                env=found.environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )

    def tell(self, order: str) -> None:
        """Send the script its instruction."""
        assert self._process.stdin is not None
        self._process.stdin.write(order.encode() + b"\n")
        self._process.stdin.flush()

    def finish(self) -> Json:
        """Wait for its end; return its report."""
        try:
            said, _ = self._process.communicate(timeout=END_WITHIN_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} did not end: {self._errors()}") from None
        assert self._process.returncode == 0, f"{self.name} failed: {self._errors()}"
        told: Json = json.loads(said)
        return told

    def _errors(self) -> str:
        return self._log.read_text(errors="replace")[-2000:]

    def tear_down(self) -> None:
        """End it, if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()


class Task(threading.Thread):
    """Work with the Python client in a thread; `problem` is the error that ended it early."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.again = 0
        self.stop = threading.Event()
        self.problem: BaseException | None = None

    def run(self) -> None:
        """Work until done; start again when the server dies."""
        try:
            while not self.stop.is_set() and not self.once():
                pass
        except Exception as error:
            self.problem = error

    def once(self) -> bool:
        """Do part of the work; True when it was the last part."""
        raise NotImplementedError

    def patiently(self, call: Callable[[], object]) -> bool:
        """Make a call; False if the server did not answer and the call must be repeated."""
        try:
            call()
        except _BROKEN as error:
            status = getattr(error, "status", None)
            if status is not None and status < 500 and status != 429:
                raise
            self.again += 1
            time.sleep(_AGAIN_S)
            return False
        return True

    def finish(self) -> None:
        """Wait for its end."""
        self.join(END_WITHIN_S)
        assert self.problem is None, f"{self.name}: {self.problem!r}"
        assert not self.is_alive(), f"{self.name} did not end"


class PythonWriter(Task):
    """The Python client with producer headers: one message a request, repeated until answered."""

    def __init__(self, url: str, content_type: str) -> None:
        super().__init__("python-writer")
        self.appended = 0
        headers: dict[str, str | Callable[[], str]] = {
            "Producer-Id": self.name,
            "Producer-Epoch": "0",
            "Producer-Seq": lambda: str(self.appended),
        }
        self._is_json = content_type == JSON
        self._stream = durable_streams.DurableStream(
            url, content_type=content_type, headers=headers, batching=False, timeout=20
        )

    def once(self) -> bool:
        message = {"w": self.name, "n": self.appended, "pad": "x" * (self.appended % 50)}
        data = message if self._is_json else json.dumps(message).encode() + b"\n"
        until = time.monotonic() + END_WITHIN_S
        is_done = self.patiently(lambda: self._append(data, is_repeat=False))
        while not is_done:
            is_done = self.patiently(lambda: self._append(data, is_repeat=True))
            assert time.monotonic() < until, "never answered"
        self.appended += 1
        return self.appended >= MOST

    def _append(self, data: object, *, is_repeat: bool) -> None:
        try:
            self._stream.append(data)
        except ValueError as error:
            # The answer to an already accepted request has no position, which this client needs.
            if not (is_repeat and "did not return" in str(error)):
                raise

    def close(self) -> None:
        """Close its connections."""
        self._stream.close()


class PythonReader(Task):
    """The Python client reads from the beginning to the last message and keeps all."""

    def __init__(self, url: str, content_type: str, live: str) -> None:
        super().__init__(f"python-{live}")
        self._url = url
        self._live = live
        self._is_json = content_type == JSON
        self._offset: str | None = None
        self._ends_at = json.dumps(_LAST, separators=(",", ":")).encode() + b"\n"
        self.received = bytearray()

    def once(self) -> bool:
        self.patiently(self._read)
        return self.received.endswith(self._ends_at)

    def _read(self) -> None:
        live: Any = self._live
        with durable_streams.stream(
            self._url, offset=self._offset or "-1", live=live, timeout=20
        ) as session:
            for event in session.iter_events(mode="json" if self._is_json else "bytes"):
                if self._is_json:
                    for item in event.data:
                        self.received += json.dumps(item, separators=(",", ":")).encode() + b"\n"
                else:
                    self.received += event.data
                self._offset = event.next_offset
                if self.stop.is_set() or self.received.endswith(self._ends_at):
                    return


@dataclass(slots=True)
class Storm:
    """One run. `kill` kills the server of `url` and restarts it there."""

    url: str
    content_type: str
    directory: Path
    found: Node
    folder: Path
    kill: Callable[[], object]
    kills: int
    seed: int
    scripts: list[Script] = field(default_factory=list)
    tasks: list[Task] = field(default_factory=list)
    told: list[Json] = field(default_factory=list)
    killed_ms: list[float] = field(default_factory=list)
    messages: int = 0

    def run(self) -> None:
        """Write, kill, end, and judge."""
        made = httpx.put(self.url, headers={"Content-Type": self.content_type}, timeout=20)
        assert made.status_code == 201, f"{made.status_code} {made.text}"
        producers = [self._producer("one", 1), self._producer("five", 5)]
        writer = PythonWriter(self.url, self.content_type)
        readers = [self._reader(live) for live in ("long-poll", "sse")]
        python_lives = ("long-poll", "sse") if self.content_type == JSON else ("long-poll",)
        python = [PythonReader(self.url, self.content_type, live) for live in python_lives]
        self._begin(writer, *python)
        rng = random.Random(self.seed)
        for _ in range(self.kills):
            time.sleep(rng.uniform(*_PAUSE_S))
            self._kill()
        time.sleep(_PAUSE_S[1])
        appended = self._end_writers(producers, writer)
        self.told += [reader.finish() for reader, _ in readers]
        for task in python:
            task.finish()
        files = [file for _, file in readers] + [self._catch_up()]
        seen = {file.name: file.read_bytes() for file in files}
        seen |= {task.name: bytes(task.received) for task in python}
        self._judge(appended, seen)
        self._judge_unanswered()

    def _kill(self) -> None:
        self.killed_ms.append(time.time() * 1000)
        self.kill()

    def _begin(self, *tasks: Task) -> None:
        for task in tasks:
            self.tasks.append(task)
            task.start()

    def _script(self, name: str, *words: str) -> Script:
        script = Script(self.found, self.folder, self.directory / f"{name}.log", *words)
        self.scripts.append(script)
        return script

    def _producer(self, name: str, in_flight: int) -> Script:
        words = (self.url, name, self.content_type, str(in_flight), str(MOST))
        return self._script(name, "producer.mjs", *words)

    def _reader(self, live: str) -> tuple[Script, Path]:
        mode = "json" if self.content_type == JSON else "bytes"
        file = self.directory / f"typescript-{live}"
        return self._script(file.name, "reader.mjs", self.url, live, mode, str(file)), file

    def _end_writers(self, producers: Sequence[Script], writer: PythonWriter) -> Counter[str]:
        """End all writers; the last one closes the stream, and the server is killed during that
        too.
        """
        writer.stop.set()
        writer.finish()
        writer.close()
        producers[0].tell("stop")
        self.told.append(producers[0].finish())
        producers[1].tell("close")
        if self.kills:
            self._kill()
        self.told.append(producers[1].finish())
        errors = [error for told in self.told for error in told["errors"]]
        assert not errors, f"the producers were told: {errors[:5]}"
        return Counter({told["name"]: told["appended"] for told in self.told}) + Counter(
            {writer.name: writer.appended, "end": 1}
        )

    def _catch_up(self) -> Path:
        """Read everything once more after the writers have ended."""
        script, file = self._reader("false")
        self.told.append(script.finish())
        return file

    def _judge(self, appended: Counter[str], seen: dict[str, bytes]) -> None:
        """Every reader has every message of every writer once, in its order; all readers agree."""
        for who, received in seen.items():
            counts: Counter[str] = Counter()
            assert received.endswith(b"\n"), f"{who} ends in the middle of a message"
            for line in received.splitlines():
                message = json.loads(line)
                writer, number = message["w"], message["n"]
                assert number == counts[writer], (
                    f"{who}: {writer} {number} where {counts[writer]} is next"
                )
                counts[writer] += 1
            assert counts == appended, f"{who} has {counts}, written were {appended}"
            assert _shape(received) == _shape(next(iter(seen.values()))), f"{who} has another order"
        assert min(appended.values()) > 0, f"somebody wrote nothing: {appended}"
        self.messages = appended.total()

    def _judge_unanswered(self) -> None:
        """Every request without an answer went to a server that died meanwhile (see
        `suite/limited.mjs`).
        """
        for told in self.told:
            for began, ended in told["unanswered"]:
                assert any(began <= killed <= ended for killed in self.killed_ms), (
                    f"{told}: no answer for {ended - began} ms, and the server was there"
                )

    def tear_down(self) -> None:
        """End all remaining processes."""
        for task in self.tasks:
            task.stop.set()
        for script in self.scripts:
            script.tear_down()

    def story(self) -> str:
        """The figures of the run, for the log."""
        again = sum(told["again"] for told in self.told) + sum(task.again for task in self.tasks)
        unanswered = sum(len(told["unanswered"]) for told in self.told)
        return (
            f"{self.content_type}: {self.messages} messages, {again} times begun again, "
            f"{unanswered} times without an answer"
        )


def _shape(received: bytes) -> bytes:
    """The messages without the spaces between them, which each client writes differently."""
    return received.replace(b": ", b":").replace(b", ", b",")
