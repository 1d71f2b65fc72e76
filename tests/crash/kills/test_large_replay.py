"""The replay of large hostile appends is bounded, in loop time and in memory.

A real server with high limits accepts large appends of a hostile kind, to a topic and to streams,
and is killed. The next start must read them all from its journal. Meanwhile it answers probes: no
turn of the loop is longer than one of a server that handles such a body, minus the time for which
the kernel had no processor for it, and memory grows by a bounded multiple of the kept bodies. All
acknowledged records are there. A turn may also wait for threads that hold the interpreter's lock
without a processor, so the best of a few starts counts.
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

from tests.crash.hostile.hostile_bodies import KINDS, MIB, WRITER, Bench, Memory

pytestmark = [pytest.mark.crash, pytest.mark.slow]

SIZE: Final = 60_000_000
LIMITS: Final = {
    "TOPICS_MAX_BODY_BYTES": str(64 * MIB),
    "TOPICS_MAX_RECORD_BYTES": str(64 * MIB),
    # Everything is replayed and nothing sealed: attaching segments is another test.
    "TOPICS_SEGMENT_MAX_EVENTS": "1000000",
}
# Turns of the loop have the same bounds as in a ready server.
TURN_MS: Final = 50.0
# Allowed beside the bodies: the interpreters of two processes, and the allocations of a first use.
SPARE_BYTES: Final = 64 * MIB
STARTS_MAX: Final = 4
# The most records of one append; bodies of tiny records become many appends.
RECORDS: Final = 10_000


def _tiny(size: int) -> list[bytes]:
    record = b'{"data":1},'
    body = b'{"records":[' + record * (RECORDS - 1) + b'{"data":1}]}'
    # These bodies have a tenth of the size, because each record costs more than its bytes.
    return [body] * (size // len(body) // 10)


def _one(kind: str) -> Callable[[int], list[bytes]]:
    return lambda size: [KINDS[kind](size)]


def _messages(size: int) -> list[bytes]:
    message = b'"' + b"\\\\" * 3_000 + b'"'
    return [b"[" + b",".join([message] * min(RECORDS, size // len(message))) + b"]"]


# The body, its route and its content type.
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


@pytest.mark.parametrize("kind", ["string", "honest", "tiny records"])
def test_the_restore_of_a_large_tail_is_bounded(tmp_path: Path, kind: str) -> None:
    """A snapshot at the stop has all records of a topic, as none is sealed."""
    bodies_of, path, content_type = WRITTEN[kind]
    bench = Bench(tmp_path, env=LIMITS)
    with bench.running():
        for body in bodies_of(SIZE):
            told = bench.send("POST", path, WRITER, body, [f"Content-Type: {content_type}"])
            assert told.startswith("20"), told
        written = _read(bench.port, "t")
    for _ in range(STARTS_MAX):
        found = _start(bench)
        print(f"{kind}: {found}")
        try:
            assert _read(bench.port, "t") == written
        finally:
            bench.stop()
        if found.turn_ms <= TURN_MS:
            break
    assert found.turn_ms <= TURN_MS
    assert found.grown_bytes <= 3 * SIZE + SPARE_BYTES


def test_segments_are_attached_beside_the_loop(tmp_path: Path) -> None:
    """Two hundred segments of one topic; the topic comes once from a snapshot and once from the
    replay of its creation.
    """
    bench = Bench(tmp_path, env={"TOPICS_SEGMENT_MAX_EVENTS": "10"})
    with bench.running(signal.SIGKILL):
        body = b'{"records":[' + b'{"data":1},' * 999 + b'{"data":1}]}'
        for _ in range(2):
            told = bench.send("POST", "/v0/topics/many", WRITER, body)
            assert told.startswith("20"), told
        told = bench.send("POST", "/v0/admin/seal", WRITER, b'{"topics":["many"]}')
        assert told.startswith("20"), told
        written = _read(bench.port, "many")
    for how in (signal.SIGTERM, signal.SIGTERM):
        for _ in range(STARTS_MAX):
            found = _start(bench)
            print(f"{how.name}: {found}")
            try:
                assert _read(bench.port, "many") == written
            finally:
                bench.stop(signal.SIGKILL if found.turn_ms > TURN_MS else how)
            if found.turn_ms <= TURN_MS:
                break
        assert found.turn_ms <= TURN_MS


class Started(NamedTuple):
    """The cost of a start; `longest_ms` is that of the readiness questions."""

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
    # Everything but the duration.
    records = page[page.index(b'"records":') : page.rindex(b'"performance"')]
    assert len(records) > 100
    return hashlib.sha256(records).hexdigest(), head
