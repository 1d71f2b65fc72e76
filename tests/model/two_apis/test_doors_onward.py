"""Records of bytes wherever they go afterwards: routers, queues, dead letters, snapshots,
segments.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from typing import Any, Final

import pytest

from tests.design7.bench import Bench
from tests.storage.fake_disk import Mode
from topics_server.api.queues.responses import render_job
from topics_server.engine.answers import ReadRequest
from topics_server.engine.topic.applied import Applied
from topics_server.queue.answers import ClaimResult
from topics_server.streams.values import BEGINNING, AppendAsked, CreateAsked
from topics_server.values.appends import decode_append
from topics_server.values.entries import Entry, RecordsAppended
from topics_server.values.errors import Code
from topics_server.values.json_cache import DATA, META, TAGS, render_rows
from topics_server.values.model import (
    Durability,
    Guarantee,
    RouterDefinition,
    TopicConfig,
    TopicType,
)
from topics_server.values.router_answers import RouterSpec

PICTURE: Final = "image/png"
EVERY: Final = bytes(range(256))
JSON_BODY: Final = b'{"records":[{"data":{"a" : 1},"tag":"t","meta":{"m":1 }}]}'


class Onward(Bench):
    """A bench with a stream of bytes at `s`, of class fsync."""

    def __init__(self, seed: int = 1, **changes: Any) -> None:
        super().__init__(seed, **{"wal_fsync_interval_ms": 600_000, **changes})
        self.world.run(self.node.streams.create("s", CreateAsked(PICTURE)))
        self.configure("s")

    def configure(self, name: str, **config: Any) -> None:
        """Create or configure a topic."""
        made = TopicConfig(durability=Durability.FSYNC, **config)
        self.world.run(self.store.put_topic(name, made, keep_type=False))

    def write(self, data: bytes) -> None:
        """Append one record of bytes through the streams API."""
        self.world.run(self.node.streams.append("s", data, AppendAsked(PICTURE)))

    def write_json(self) -> None:
        """Append one record of JSON through `/v0`."""
        decoded = decode_append(JSON_BODY)
        self.world.run(self.store.append("s", JSON_BODY, decoded, header_key=None, config=None))

    def diff(self, name: str) -> list[dict[str, Any]]:
        """A topic through `/v0`, without times."""
        page = self.world.run(self.store.read(name, ReadRequest(0, 1000, 1 << 22)))
        assert page.caught_up
        texts = [t for p in page.pieces for t in render_rows(p.block, p.rows, TAGS | META | DATA)]
        shown = [json.loads(text.encode("latin-1")) for text in texts]
        for rec in shown:
            del rec["$ts"]
        return shown

    def stream(self, name: str) -> list[bytes]:
        """The same through the streams API."""
        read = self.node.streams.read(name, BEGINNING, 1 << 22, explicit=False)
        return [bytes(data) for data in self.world.run(read).datas]


@pytest.fixture
def benches() -> Iterator[list[Onward]]:
    made: list[Onward] = []
    yield made
    for bench in made:
        bench.world.abandon()


def shown(seq: int, data: bytes, **more: object) -> dict[str, Any]:
    told = {
        "$encoding": "base64",
        "$content_type": PICTURE,
        "data": base64.b64encode(data).decode(),
    }
    return {"$seq": seq, **told, **more}


def shown_json(seq: int, **meta: object) -> dict[str, Any]:
    return {"$seq": seq, "$tag": "t", "data": {"a": 1}, "meta": {"m": 1, **meta}}


# --- routers --------------------------------------------------------------------------------------


def _destination(bench: Onward, *, beside: bool) -> str:
    """A topic of the same shard as the source, or of another."""
    source = bench.store.topic("s")
    for number in range(20):
        topic = bench.world.run(bench.store.create_topic(f"d{number}"))
        if bench.node.commits.same_shard(source.topic_id, topic.topic_id) == beside:
            bench.configure(topic.name)
            return topic.name
    raise AssertionError("all topics are of one shard")


@pytest.mark.parametrize("mode", ["kill", "power"])
@pytest.mark.parametrize("guarantee", list(Guarantee))
@pytest.mark.parametrize("beside", [True, False], ids=["same shard", "another shard"])
def test_routers_copy_bytes(
    benches: list[Onward], beside: bool, guarantee: Guarantee, mode: Mode
) -> None:
    """The test covers pages with and without payloads, to the same shard and to another, and after
    a crash.
    """
    bench = Onward(wal_shards=2)
    benches.append(bench)
    dest = _destination(bench, beside=beside)
    bodies: list[bytes] = []

    def observe(lsn: int, entry: Entry, applied: Applied) -> None:
        if isinstance(entry, RecordsAppended) and entry.page is not None:
            bodies.append(entry.body)

    bench.node.commits.observers.append(observe)
    bench.write(EVERY)
    bench.write_json()
    definition = RouterDefinition("s", dest, guarantee=guarantee)
    bench.world.run(bench.node.routers.put("r", RouterSpec(definition, from_earliest=True)))
    bench.wait(1)
    assert bodies, "the records from before the router went"
    assert all(bodies), "nobody knows whether replay would meet them"
    bench.write(b"\n{}")
    bench.write_json()
    bench.wait(1)
    assert (b"" in bodies) == beside
    assert len(bench.diff(dest)) == 4
    for _ in range(2):
        source, copies = bench.diff("s"), bench.diff(dest)
        for seq, copy in enumerate(copies, 1):
            stamp = copy.get("meta", {}).pop("_topics_router", None)
            assert (stamp is not None) == (guarantee is Guarantee.EXACTLY_ONCE)
            assert stamp is None or (stamp["source"], stamp["seq"]) == ("s", seq)
            if not copy.get("meta", True):
                del copy["meta"]
        assert copies == source
        assert source == [shown(1, EVERY), shown_json(2), shown(3, b"\n{}"), shown_json(4)]
        assert (
            bench.stream(dest) == bench.stream("s") == [EVERY, b'{"a" : 1}', b"\n{}", b'{"a" : 1}']
        )
        bench.crash(mode)
        bench.wait(1)


def test_a_copy_of_a_copy_of_bytes_has_one_stamp(benches: list[Onward]) -> None:
    bench = Onward(wal_shards=2)
    benches.append(bench)
    for number, (source, dest) in enumerate((("s", "mid"), ("mid", "end"))):
        definition = RouterDefinition(source, dest, guarantee=Guarantee.EXACTLY_ONCE)
        bench.world.run(bench.node.routers.put(f"r{number}", RouterSpec(definition)))
    bench.write(EVERY)
    bench.wait(1)
    for _ in range(2):
        (copy,) = bench.diff("end")
        assert copy["meta"].keys() == {"_topics_router"}
        assert copy["meta"]["_topics_router"]["source"] == "mid"
        del copy["meta"]
        assert copy == shown(1, EVERY)
        bench.crash("kill")


def test_a_router_into_a_closed_stream_waits_and_says_why(benches: list[Onward]) -> None:
    bench = Onward()
    benches.append(bench)
    run, streams = bench.world.run, bench.node.streams
    run(streams.create("closed", CreateAsked(PICTURE, closes=True)))
    run(bench.node.routers.put("r", RouterSpec(RouterDefinition("s", "closed"))))
    bench.write(EVERY)
    bench.wait(5)
    state = bench.node.routers.get("r")
    assert state.stalled is not None
    assert (state.stalled[0], state.lag) == (Code.STREAM_CLOSED.value, 1)
    run(streams.delete("closed"))
    bench.write(b"more")
    assert bench.stream("s") == [EVERY, b"more"]


# --- queues ---------------------------------------------------------------------------------------


async def _stays() -> None:
    await asyncio.Event().wait()


def _claim(bench: Onward) -> ClaimResult:
    claim = bench.node.queues.claim("jobs", "w", 10, 1000, wait_ms=0, gone=_stays)
    claimed = bench.world.run(claim)
    assert claimed is not None
    return claimed


def _jobs(bench: Onward) -> list[tuple[bytes, bytes]]:
    """The jobs as a worker gets them: stored data and meta."""
    found = _claim(bench).jobs
    for job in found:
        told = json.loads(b"{%b}" % render_job(job))
        is_bytes = told.get("$encoding") == "base64"
        assert is_bytes == (told.get("$content_type") == PICTURE)
        assert not is_bytes or base64.b64decode(told["data"]) == job.block.data(job.row)
    return [(bytes(job.block.data(job.row)), bytes(job.block.meta(job.row))) for job in found]


@pytest.mark.parametrize("mode", ["kill", "power"])
def test_jobs_of_bytes_die_and_live_again_as_they_were(benches: list[Onward], mode: Mode) -> None:
    bench = Onward(wal_shards=2)
    benches.append(bench)
    config: dict[str, Any] = {"type": TopicType.QUEUE, "max_deliveries": 1, "dead_letter": "dead"}
    bench.configure("jobs", lease_ms=1000, **config)
    bench.configure("dead")
    bench.world.run(bench.node.routers.put("r", RouterSpec(RouterDefinition("s", "jobs"))))
    bench.write(EVERY)
    bench.write_json()
    bench.wait(1)
    wanted = [(EVERY, b' {"$content_type":"image/png"}'), (b'{"a" : 1}', b'{"m":1 }')]
    assert _jobs(bench) == wanted
    bench.wait(2)
    assert _jobs(bench) == []
    bench.wait(1)
    assert bench.diff("jobs") == []
    for _ in range(2):
        letters = bench.diff("dead")
        for seq, letter in enumerate(letters, 1):
            stamps = {
                name: letter["meta"].pop(name) for name in list(letter["meta"]) if "$" in name
            }
            assert stamps == {
                "$dead_letter_from": "jobs",
                "$dead_letter_deliveries": 1,
                "$dead_letter_src_seq": seq,
            }
        assert letters == [shown(1, EVERY, meta={}), shown_json(2)]
        assert bench.stream("dead") == [EVERY, b'{"a" : 1}']
        bench.crash(mode)
    redrive = bench.node.queues.redrive(
        "jobs", None, seqs=None, match=None, after_seq=0, max_jobs=10
    )
    assert bench.world.run(redrive).redriven == 2
    bench.crash(mode)
    assert _jobs(bench) == wanted
    assert bench.diff("dead") == []


# --- snapshots and segments -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "cold", [{}, {"cold_dir": "cold", "hot_retain_segments": 1}], ids=["", "cold"]
)
def test_snapshots_and_segments_give_back_the_same_bytes(
    benches: list[Onward], cold: dict[str, Any]
) -> None:
    bench = Onward(segment_max_events=3, **cold)
    benches.append(bench)
    datas = [EVERY, b"\n", b"\x00" * 3000, b'{"data":1}', b" ", EVERY[::-1], b"\xff", b"[1]"]
    for data in datas:
        bench.write(data)
        bench.write_json()
    wanted = bench.diff("s")
    for step in ("in memory", "snapshot", "sealed", "replayed"):
        assert bench.stream("s")[::2] == datas, step
        assert bench.diff("s") == wanted, step
        assert wanted[::2] == [shown(2 * n + 1, data) for n, data in enumerate(datas)]
        if step == "in memory":
            bench.checkpoint()
            bench.crash("power")
        elif step == "snapshot":
            topic = bench.store.topic("s")
            bench.world.run(bench.node.sealer.tend(topic, force_seal=True))
            assert topic.log.tail_count == 0
            bench.restart()
        else:
            bench.crash("kill")
