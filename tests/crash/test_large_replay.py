"""Issue 21, build 1: the replay of large hostile appends is bounded, in loop time and in memory.

A real server whose limits allow it takes large appends of a hostile kind, to a topic and to
streams, and is killed. The next start must read them all from its journal. While it does, probes
are answered: no turn of the loop is longer than one of a server that handles such a body, less the
time for which the kernel had no processor for it, and memory grows by a multiple of what is kept.
What was acknowledged is there. A turn also waits for threads that hold the interpreter's lock and
have no processor, so the best of a few starts counts.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from tests.crash.hostile_bodies import KINDS, MIB, WRITER, Bench, Memory

pytestmark = pytest.mark.crash

SIZE: Final = 60_000_000
LIMITS: Final = {
    "TOPICS_MAX_BODY_BYTES": str(64 * MIB),
    "TOPICS_MAX_RECORD_BYTES": str(64 * MIB),
    # All is replayed, nothing is sealed: to attach segments is another matter.
    "TOPICS_SEGMENT_MAX_EVENTS": "1000000",
}
# Turns are judged as those of a server that serves.
TURN_MS: Final = 50.0
# Beside the bodies: the interpreters of two processes, and what a first use allocates.
SPARE_BYTES: Final = 64 * MIB
STARTS_MAX: Final = 4
# Records of one append at most; bodies of tiny records are many appends.
RECORDS: Final = 10_000


def _tiny(size: int) -> list[bytes]:
    record = b'{"data":1},'
    body = b'{"records":[' + record * (RECORDS - 1) + b'{"data":1}]}'
    # A tenth of it: each of them costs more than its bytes.
    return [body] * (size // len(body) // 10)


def _one(kind: str) -> Callable[[int], list[bytes]]:
    return lambda size: [KINDS[kind](size)]


def _messages(size: int) -> list[bytes]:
    message = b'"' + b"\\\\" * 3_000 + b'"'
    return [b"[" + b",".join([message] * min(RECORDS, size // len(message))) + b"]"]


# What is sent, where to, and as what.
WRITTEN: Final[dict[str, tuple[Callable[[int], list[bytes]], str, str]]] = {
    **{
        kind: (_one(kind), "/v0/topics/t", "application/json")
        for kind in ("string", "brackets", "keys", "numbers", "escapes", "wide text", "honest")
    },
    "tiny records": (_tiny, "/v0/topics/t", "application/json"),
    "messages": (_messages, "/v1/stream/s", "application/json"),
    "bytes": (lambda size: [b"\xff" * size], "/v1/stream/b", "application/octet-stream"),
}


@pytest.mark.parametrize("kind", WRITTEN)
def test_replay_of_large_appends_is_bounded(tmp_path: Path, kind: str) -> None:
    bodies_of, path, content_type = WRITTEN[kind]
    topic = path.rpartition("/")[2]
    bench = Bench(tmp_path, env=LIMITS)
    with bench.running(signal.SIGKILL):
        for body in bodies_of(SIZE):
            told = bench.send("POST", path, WRITER, body, [f"Content-Type: {content_type}"])
            assert told.startswith("20"), told
        written = _read(bench.port, topic)
    kept = tmp_path / "kept"
    shutil.copytree(bench.server.directory, kept)
    for _ in range(STARTS_MAX):
        shutil.rmtree(bench.server.directory)
        shutil.copytree(kept, bench.server.directory)
        found = _start(bench)
        print(f"{kind}: {found}")
        try:
            assert _read(bench.port, topic) == written
        finally:
            bench.stop(signal.SIGKILL)
        if found.turn_ms <= TURN_MS:
            break
    assert found.turn_ms <= TURN_MS
    assert found.grown_bytes <= 3 * SIZE + SPARE_BYTES


class Started(NamedTuple):
    """What a start cost; `longest_ms` is of the questions whether it is ready."""

    took_s: float
    turn_ms: float
    longest_ms: float
    grown_bytes: int


def _start(bench: Bench) -> Started:
    bench.forget_turns()
    bench.spawn()
    memory = Memory(bench.pids)
    memory.start()
    began = time.monotonic()
    waits = bench.until_ready()
    took_s = time.monotonic() - began
    return Started(took_s, bench.turn_ms(), 1000 * max(waits), memory.stop())


def _read(port: int, topic: str) -> tuple[str, int]:
    """The digest of the last page of a topic, and its head."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.connect()
    headers = {"Authorization": f"Bearer {WRITER}", "Content-Type": "application/json"}
    connection.request("GET", f"/v0/topics/{topic}", headers=headers)
    head = int(json.loads(connection.getresponse().read())["head_seq"])
    asked = json.dumps({"from_seq": max(0, head - 100), "limit": 100})
    connection.request("POST", f"/v0/topics/{topic}/diff", asked, headers)
    answer = connection.getresponse()
    page = answer.read()
    connection.close()
    assert answer.status == 200
    # All but how long it took.
    records = page[page.index(b'"records":') : page.rindex(b'"performance"')]
    assert len(records) > 100
    return hashlib.sha256(records).hexdigest(), head
