"""Makes a golden data directory: drives a real server over HTTP, kills it twice, and copies its
files.

    .venv/bin/python -m tests.vectors.make_store store-v20

Vectors are only added and never made again: every later server must read what a released server
wrote, and a regenerated vector proves nothing. So the program refuses an existing folder.

A vector has topics of every class; sealed segments in the hot and the cold folder; delete flags;
two snapshots; a journal tail that no snapshot covers; idempotency keys of a body and of a header;
floors of a cap and of a TTL; a head that jumped after a lost boot; deletes in the tail; a dropped
topic, a recreated one, a reconfigured one. From v2 on it has watch sessions: one in the newest
snapshot, one in the snapshot that was moved since, one in the journal's tail. From v3 on leases,
durable and soft, in a snapshot and in the journal; jobs that were released, extended, acked and
delayed; dead letters with their marks (v3 itself has no sessions). From v4 on routers: a fan-out, a
chain, a filter with stamps, a queue; copies in segments, snapshots and the journal, with payloads
and without; losses of a source; routers that were changed, removed, or dropped with their topic.
From v5 on producers: in a snapshot, in the journal, moved without records by a key. From v6 on
streams, see `stream_part`. From v7 on the marks that distinguish missing from empty: a store id and
a run number, a cold folder with the id, end marks beside the journal, generations and digests of
flags. From v8 on `FORMAT` has the run whose snapshot holds moved heads. From v9 on reasons of
nacks, in a snapshot, in the journal and in dead letters, and a session that waits for a missing
topic. From v10 on `FORMAT` has the last lsn of a clean stop's snapshot (0 here: it was killed).
From v11 on views: definitions in a snapshot and in the journal, one changed, one deleted. From v16
on consumers: in a snapshot, moved and deleted in the journal, and made there. From v17 on sessions
with a filter: in the newest snapshot, moved since, and in the journal's tail. From v18 on holds of
consumers and sessions with prefixes, see `consumer_part`. From v19 on records with traces, see
`trace_part`. From v20 on segments of JSON objects, from v21 on with checksums of index rows.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import httpx
import httpx_sse
import msgspec

from tests.contract.driver import Api, Server, eventually, good
from tests.vectors.consumer_part import (
    CLASSES,
    HOLDING,
    LATE,
    committing,
    first_consumers,
    growing,
    holds_of,
    last_consumers,
)
from tests.vectors.stored import (
    BOOT_ID,
    NODE,
    VECTORS,
    Expected,
    consumers_of,
    definition_of,
    opened,
    read_back,
    read_queue,
    router_of,
)
from tests.vectors.stream_part import first_streams, last_streams, streams_of
from tests.vectors.trace_part import ROUTER as TRACED_ROUTER
from tests.vectors.trace_part import first_traces, last_traces
from topics_server.wal.directory import read_format
from topics_server.wal.format.checked_json import encode_checked
from topics_server.wal.fs import OsFs

ENVIRONMENT: Final = {
    "TOPICS_WAL_SHARDS": "2",
    "TOPICS_SEGMENT_MAX_EVENTS": "40",
    "TOPICS_HOT_RETAIN_SEGMENTS": "1",
    "TOPICS_MIN_FREE_BYTES": "0",
    "TOPICS_CHECKPOINT_INTERVAL_MS": "3600000",
    "TOPICS_SESSION_TTL_MS": "3600000",
}
WATCHED: Final = ("fsync", "disk", "again")
ODD: Final = ["Or", ["tag", "Glob", "odd*"], ["Not", ["tag", "Glob", "*"]]]
# A topic that is never created.
AWAITED: Final = "not-yet"
# Durable leases and soft ones.
QUEUES: Final = ("held", "soft")
# Sessions that exist at the end, and two that are gone.
ROUTERS: Final = (
    *("r-all->r-far", "r-going->r-left", "r-short->r-full"),
    *("r-source->r-all", "r-source->r-jobs", "r-source->r-tagged", TRACED_ROUTER),
)
DAY_MS: Final = 86_400_000
# Values that a parser would not return unchanged.
ODD_BODY: Final = (
    b'{"records":[{"data":{ "a" : 1e400,"a":2 ,"n":36893488147419103232,"s":"\\u00e9 \xc3\xa9 '
    b'\\ud83d\\ude00"},"meta":{"k": [1 ,2]},"tag":"odd"},{"data":null},{"data":"","tag":""}]}'
)


def orders(first: int, count: int) -> list[dict[str, Any]]:
    """Records with payload, tag, meta and node in turns."""
    made: list[dict[str, Any]] = []
    for number in range(first, first + count):
        record: dict[str, Any] = {"data": {"id": number, "text": "x" * (number % 23)}}
        if number % 2:
            record["tag"] = f"order-{number % 10}"
        if number % 3 == 0:
            record["meta"] = {"trace": number, "to": ["a", "b"][: number % 3]}
        if number % 5 == 0:
            record["node"] = NODE
        made.append(record)
    return made


def post(api: Api, topic: str, body: bytes, **headers: str) -> dict[str, Any]:
    """Append a body unchanged."""
    sent = {"content-type": "application/json", **headers}
    return good(api.http.post(f"/v0/topics/{topic}", content=body, headers=sent))


def watch(api: Api, from_seq: int, *awaited: str, **more: Any) -> str:
    """Open a session over a few topics, and over some that do not exist; return its wid."""
    topics = {name: {"from_seq": from_seq} for name in (*WATCHED, *awaited)}
    body = {"topics": topics, "limit": 7, "wait": bool(awaited), **more}
    wid: str = good(api.http.post("/v0/watch", json=body))["wid"]
    return wid


def follow(api: Api, wid: str, *more: str) -> dict[str, int]:
    """Stream a session until it is caught up with all its topics; return its positions."""
    seen: dict[str, int] = {}
    with (
        httpx.Client(base_url=api.url, timeout=10, trust_env=False) as http,
        httpx_sse.connect_sse(http, "GET", f"/v0/watch/{wid}") as stream,
    ):
        for event in stream.iter_sse():
            if event.event == "caught-up":
                told = event.json()
                seen[told["topic"]] = told["head_seq"]
                if seen.keys() == {*WATCHED, *more}:
                    return seen
    raise AssertionError("the stream ended before it was caught up")


def ask(api: Api, queue: str, verb: str, **fields: object) -> dict[str, Any]:
    """One call of a worker."""
    return good(api.http.post(f"/v0/topics/{queue}/{verb}", json={"node": NODE, **fields}))


def first_jobs(api: Api) -> None:
    """Jobs that are leased, released, delayed and done, for the snapshots."""
    for queue in QUEUES:
        config = {"type": "queue", "leases_durable": queue == "held", "durability": "fsync"}
        good(api.put(queue, {**config, "max_deliveries": 2, "dead_letter": f"{queue}-dead"}))
        good(api.append(queue, orders(0, 20)))
        good(api.append(queue, [{"data": 20, "delay_ms": DAY_MS}]))
        good(api.append(queue, [{"data": 21, "deliver_at_ms": int(time.time() * 1000) + DAY_MS}]))
        assert ask(api, queue, "claim", max=8, lease_ms=DAY_MS)["count"] == 8
        assert ask(api, queue, "ack", seqs=[1, 2])["acked"] == 2
        assert ask(api, queue, "nack", seqs=[3], error='no "such" file')["nacked"] == 1
        assert ask(api, queue, "nack", seqs=[4], delay_ms=DAY_MS, error="later")["nacked"] == 1


def last_jobs(api: Api) -> None:
    """More such jobs for the journal's tail, and jobs that die."""
    for queue in QUEUES:
        good(api.append(queue, [{"data": 22, "delay_ms": DAY_MS}, {"data": 23}]))
        # The third job is delivered for the second time, released, and dies when it is due again.
        # Four of the soft ones were leased when the server was killed: they come first.
        claimed = ask(api, queue, "claim", max=1 if queue == "held" else 5, lease_ms=DAY_MS)
        assert 3 in [job["$seq"] for job in claimed["claimed"]]
        assert ask(api, queue, "nack", seqs=[3])["nacked"] == 1
        assert ask(api, queue, "claim", max=2, lease_ms=DAY_MS)["count"] == 2
        eventually(lambda: api.get_state(queue)["queue"]["dead_lettered"] == 1, "a dead letter")  # noqa: B023
    held = [6, 7]
    assert ask(api, "held", "extend", seqs=held, lease_ms=DAY_MS // 2)["extended"] == 2
    assert ask(api, "held", "ack", seqs=[5])["acked"] == 1


def route(api: Api, source: str, dest: str, **fields: object) -> None:
    """Create or change a router."""
    body = {"source": source, "dest": dest, **fields}
    good(api.http.put(f"/v0/routers/{source}->{dest}", json=body))


def settled(api: Api, *lagging: str) -> None:
    """Wait until all routers but these have nothing to copy."""

    def is_so() -> bool:
        names = [row["router"] for row in good(api.http.get("/v0/routers"))["routers"]]
        rows = [good(api.http.get(f"/v0/routers/{name}")) for name in names]
        return all((row["lag"] == 0) != (row["router"] in lagging) for row in rows)

    eventually(is_so, "the routers have caught up")


def first_routers(api: Api) -> None:
    """Routers and copies for segments and snapshots."""
    good(api.put("r-jobs", {"type": "queue", "durability": "fsync"}))
    good(api.put("r-full", {"cap_records": 10, "discard": "reject"}))
    good(api.put("r-short", {"cap_records": 15}))
    route(api, "r-source", "r-all")
    odd = ["tag", "Glob", "order-*"]
    route(api, "r-source", "r-tagged", filter=odd, guarantee="exactly_once", preserve_node=False)
    route(api, "r-all", "r-far", preserve_tag=False, guarantee="exactly_once")
    route(api, "r-source", "r-jobs", filter=["tag", "Eq", "order-1"])
    route(api, "r-short", "r-full")
    route(api, "r-going", "r-left")
    good(api.append("r-short", orders(0, 10)))
    settled(api)
    # The destination is full: records that the source evicts meanwhile are lost to it.
    good(api.append("r-short", orders(10, 12)))
    good(api.append("r-short", orders(22, 12)))
    for start in range(0, 90, 30):
        good(api.append("r-source", orders(start, 30)))
    good(api.append("r-going", orders(0, 6)))
    settled(api, "r-short->r-full")
    good(api.delete("r-full", before_seq=6))
    good(api.delete("r-all", match="order-3"))
    eventually(lambda: api.get_state("r-full")["head_seq"] > 10, "it goes on")


def last_routers(api: Api) -> None:
    """Copies for the journal's tail; then routers are changed, and sources trimmed and dropped."""
    good(api.append("r-source", orders(90, 30)))
    post(api, "r-source", ODD_BODY)
    settled(api, "r-short->r-full")
    good(api.delete("r-all", match="order-7"))
    good(api.delete("r-source", before_seq=100))
    route(api, "r-source", "r-jobs", filter=["tag", "Eq", "order-5"])
    good(api.append("r-source", orders(120, 20)))
    good(api.append("r-going", orders(6, 6)))
    settled(api, "r-short->r-full")
    good(api.http.delete("/v0/routers/r-all->r-far"))
    good(api.append("r-source", orders(140, 5)))
    good(api.drop("r-going"))
    settled(api, "r-short->r-full")


def produce(api: Api, topic: str, producer: str, epoch: int, seq: int, **fields: object) -> None:
    """Send one request of a producer, which must be accepted."""
    headers = producer_headers(producer, epoch, seq)
    post(api, topic, json.dumps({"records": orders(400 + seq, 2), **fields}).encode(), **headers)


def producer_headers(producer: str, epoch: int, seq: int) -> dict[str, str]:
    """The three headers of a producer."""
    numbers = {"Producer-Epoch": str(epoch), "Producer-Seq": str(seq)}
    return {"Producer-Id": producer, **numbers}


def last_producers(api: Api) -> list[dict[str, Any]]:
    """More requests for the journal's tail; the requests and answers for a reader of the vector."""
    asked: list[dict[str, Any]] = []
    for topic in ("fsync", "disk", "memory"):
        produce(api, topic, "tail", 4, 0)
        produce(api, topic, "tail", 4, 1)
        produce(api, topic, "moved", 1, 0, idempotency_key=f"moved-{topic}")
        produce(api, topic, "moved", 2, 0, idempotency_key=f"moved-{topic}")
        for producer, epoch, seq, status in (
            *(("kept", 2, 2, 204), ("kept", 2, 0, 204), ("kept", 1, 3, 403), ("kept", 2, 4, 409)),
            *(("tail", 4, 1, 204), ("tail", 3, 0, 403), ("tail", 4, 3, 409)),
            *(("moved", 2, 0, 204), ("moved", 1, 1, 403), ("moved", 2, 2, 409)),
            ("nobody", 0, 1, 409),
        ):
            headers = producer_headers(producer, epoch, seq)
            body = {"records": [{"data": "again"}]}
            answer = api.http.post(f"/v0/topics/{topic}", json=body, headers=headers)
            assert answer.status_code == status, (headers, answer.text)
            told = {
                name: value
                for name, value in answer.headers.items()
                if name.startswith(("producer-", "topic-"))
            }
            asked.append({"topic": topic, "headers": headers, "status": status, "told": told})
    return asked


VIEWS: Final = (("disk", "by-tag"), ("disk", "rows"), ("work", "kept"))
COUNTED: Final = {"shortcut": {"count_by_tag": True}}
LISTED: Final = {
    "schema": "CREATE TABLE rows (seq INTEGER PRIMARY KEY, data)",
    "apply": "INSERT INTO rows VALUES (:seq, :data)",
    "queries": {"all": "SELECT seq, data FROM rows ORDER BY seq"},
}


def define(api: Api, topic: str, view: str, definition: dict[str, Any]) -> None:
    """Define a view."""
    good(api.http.put(f"/v0/topics/{topic}/views/{view}", json=definition))


def first_views(api: Api) -> None:
    """Definitions that a snapshot holds."""
    define(api, "disk", "by-tag", COUNTED)
    define(api, "disk", "rows", COUNTED)
    define(api, "disk", "going", COUNTED)


def last_views(api: Api) -> None:
    """Definitions in the journal: one changed, one deleted, one new."""
    define(api, "disk", "rows", LISTED | {"on_delete": "rebuild"})
    good(api.http.delete("/v0/topics/disk/views/going"))
    define(api, "work", "kept", LISTED)


def views_of(api: Api) -> dict[str, Any]:
    """The definitions by topic and view."""
    return {
        f"{topic}/{view}": definition_of(good(api.http.get(f"/v0/topics/{topic}/views/{view}")))
        for topic, view in VIEWS
    }


def first_run(api: Api, cold: Path) -> None:
    """Sealed history: hot and cold segments, flags, floors, names that come and go."""
    for durability in CLASSES:
        good(api.put(durability, {"durability": durability}))
        for start in range(0, 200, 25):
            good(api.append(durability, orders(start, 25)))
        post(api, durability, ODD_BODY)
        for epoch, seq in ((1, 0), (2, 0), (2, 1), (2, 2)):
            produce(api, durability, "kept", epoch, seq)
    good(api.put("capped", {"cap_records": 30}))
    good(api.put("expired", {"ttl_ms": 300}))
    good(api.put("work", {"type": "queue", "max_deliveries": 3, "lease_ms": 5000}))
    for start in range(0, 90, 30):
        good(api.append("capped", orders(start, 30)))
    good(api.append("expired", orders(0, 45)))
    good(api.append("work", orders(0, 5)))
    first_jobs(api)
    first_routers(api)
    first_streams(api)
    first_views(api)
    first_consumers(api, orders(0, 25))
    first_traces(api, orders(0, 10))
    for name in ("gone", "again"):
        good(api.append(name, orders(0, 50)))
        good(api.drop(name))
    good(api.append("again", orders(0, 3)))
    eventually(lambda: len(list(cold.rglob("*.data"))) >= 9, "cold segments")
    for durability in CLASSES:
        good(api.delete(durability, match="order-3"))
        good(api.delete(durability, before_seq=12))
    time.sleep(1.5)  # so that expired records become a floor


def last_run(api: Api) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The journal tail; the retries and the deletes for a reader of the vector."""
    retries: list[dict[str, Any]] = []
    for durability in CLASSES:
        good(api.append(durability, orders(200, 30)))
        post(api, durability, ODD_BODY)
        good(api.delete(durability, match="order-7"))
        good(api.delete(durability, match=["tag", "Glob", "odd*"]))
    for topic in ("fsync", "disk", "memory", "again"):
        keyed = {"records": orders(300, 2), "idempotency_key": f"body-{topic}"}
        answer = post(api, topic, json.dumps(keyed).encode())
        retries.append({"topic": topic, "body": keyed, "headers": {}, "seqs": answer["seqs"]})
        plain = {"records": orders(310, 1)}
        headers = {"Idempotency-Key": f"header-{topic}"}
        answer = post(api, topic, json.dumps(plain).encode(), **headers)
        retries.append({"topic": topic, "body": plain, "headers": headers, "seqs": answer["seqs"]})
    good(api.append("capped", orders(90, 4)))
    good(api.put("again", {"cap_records": 100, "idempotency_window_ms": 600_000}))
    good(api.append("created-late", orders(0, 7), config={"durability": "fsync"}))
    good(api.append("dropped-late", orders(0, 7)))
    good(api.drop("dropped-late"))
    last_jobs(api)
    last_routers(api)
    last_streams(api)
    last_views(api)
    last_consumers(api, orders(25, 20))
    last_traces(api, orders(0, 10))
    settled(api, "r-short->r-full")
    deletes: list[dict[str, Any]] = [
        {"topic": "disk", "match": "order-5"},
        {"topic": "fsync", "match": ["tag", "Glob", "order-*"]},
        {"topic": "memory", "match": ""},
    ]
    return retries, deletes


def change_boot(data: Path, boot_id: str) -> None:
    """Change the noted boot, as if the machine had been restarted."""
    mark = read_format(OsFs(), str(data))
    assert mark is not None
    changed = msgspec.structs.replace(mark, boot_id=boot_id)
    (data / "FORMAT").write_bytes(encode_checked(changed))


def pack(folder: Path, target: Path) -> None:
    """`data` and `cold` of `folder` as one archive, without owners and without the ballast."""

    def anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if info.name == "data/ballast":
            return None  # random bytes that every start writes anew
        if info.name.startswith("data/views"):
            return None  # what a view computed is made again from its topic
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        return info

    with tarfile.open(target, "w:gz", compresslevel=9) as archive:
        for name in ("data", "cold"):
            archive.add(folder / name, arcname=name, filter=anonymous)


Answers = tuple[dict[str, Any], dict[str, Any]]


async def answers_of(http: httpx.AsyncClient, names: list[str]) -> Answers:
    """The answers about the topics and the queues."""
    topics = {name: await read_back(http, name) for name in names}
    return topics, {name: await read_queue(http, name) for name in QUEUES}


async def live_answers(url: str, names: list[str]) -> Answers:
    """The server's answers before it is killed."""
    async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
        return await answers_of(http, names)


async def live_streams(url: str) -> dict[str, Any]:
    """The server's answers about its streams before it is killed."""
    async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
        return await streams_of(http)


async def answers_of_copy(folder: Path, expected: Expected, names: list[str]) -> Answers:
    """The answers of a node on a copy."""
    async with opened(folder, expected) as http:
        return await answers_of(http, names)


def make(name: str) -> None:
    """Write `tests/vectors/NAME`."""
    vector = VECTORS / name
    if vector.exists():
        raise SystemExit(f"{vector} exists: vectors are never made again, only added")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        server = Server(folder, {**ENVIRONMENT, "TOPICS_COLD_DIR": str(folder / "cold")})
        server.env = {**server.env, "TOPICS_CHECKPOINT_INTERVAL_MS": "200"}
        api = server.start()
        first_run(api, folder / "cold")
        kept, moved = watch(api, 1, AWAITED), watch(api, 2)
        kept_new, moved_new = (growing(api, WATCHED, from_seq) for from_seq in (1, 2))
        acking = committing(api)
        kept_odd, moved_odd = watch(api, 1, filter=ODD), watch(api, 2, filter=ODD)
        snapshots = server.data_dir / "snapshots"
        newest = max(snapshots.glob("*.snap"), default=None)
        eventually(lambda: len(list(snapshots.glob("*.snap"))) == 2, "two snapshots")
        eventually(lambda: max(snapshots.glob("*.snap")) != newest, "one with the sessions")
        server.signal(signal.SIGKILL)
        change_boot(server.data_dir, "11111111-1111-4111-8111-111111111111")
        server.env = {**ENVIRONMENT, "TOPICS_COLD_DIR": str(folder / "cold")}
        api = server.start()
        retries, deletes = last_run(api)
        producers = last_producers(api)
        late, late_odd = watch(api, 3, AWAITED), watch(api, 3, filter="order-1")
        sessions = {
            wid: {**dict.fromkeys(WATCHED, seq), AWAITED: 0} for wid, seq in ((kept, 1), (late, 3))
        }
        sessions[kept_odd] = dict.fromkeys(WATCHED, 1)
        sessions[late_odd] = dict.fromkeys(WATCHED, 3)
        late_new = growing(api, WATCHED, 3)
        sessions[kept_new] = dict.fromkeys(WATCHED, 1)
        sessions[late_new] = {**dict.fromkeys(WATCHED, 3), LATE: 0}
        sessions[acking] = {"disk": 50}
        sessions[moved_new] = follow(api, moved_new, LATE)
        sessions |= {wid: follow(api, wid) for wid in (moved, moved_odd)}
        prefixes = {wid: ["created-", "none."] for wid in (kept_new, moved_new, late_new)}
        filters = {kept_odd: json.dumps(ODD), moved_odd: json.dumps(ODD), late_odd: '"order-1"'}
        time.sleep(1.0)  # flags and segments of this run, as far as they are due
        names = sorted(topic["topic"] for topic in good(api.topics(page_size=1000))["topics"])
        topics, queues = asyncio.run(live_answers(api.url, names))
        streams = asyncio.run(live_streams(api.url))
        routers = {name: router_of(api.http.get(f"/v0/routers/{name}")) for name in ROUTERS[2:]}
        views = views_of(api)
        consumers = {
            topic: consumers_of(good(api.http.get(f"/v0/topics/{topic}/consumers")))
            for topic in (*CLASSES, HOLDING)
        }
        holds = {HOLDING: holds_of(good(api.http.get(f"/v0/topics/{HOLDING}/consumers")))}
        seen_ms = int(time.time() * 1000)
        server.signal(signal.SIGKILL)
        change_boot(server.data_dir, BOOT_ID)
        vector.mkdir()
        pack(folder, vector / "store.tar.gz")
        absent = ["gone", "dropped-late", "r-going"]
        note = "written by tests/vectors/make_store.py; never to be made again"
        expected = Expected(
            note,
            seen_ms,
            ENVIRONMENT,
            topics,
            absent,
            retries,
            deletes,
            sessions,
            queues,
            routers,
            producers,
            streams,
            views,
            consumers,
            filters,
            prefixes,
            {acking: {"disk": "kept"}},
            holds,
        )
        # Only a start can tell what it reports for records that were never on disk.
        after, queues_after = asyncio.run(answers_of_copy(folder, expected, names))
        topics["ephemeral"] = after["ephemeral"]
        # The same holds for leases that a kill removes.
        queues["soft"] = queues_after["soft"]
        assert queues_after == queues, "durable leases are as they were"
        assert not queues["soft"]["leases"], "soft ones are gone"
        differing = [name for name in names if after[name] != topics[name]]
        (vector / "expected.json").write_bytes(
            msgspec.json.format(msgspec.json.encode(expected), indent=1) + b"\n"
        )
        if differing:
            raise SystemExit(f"a node on a copy says something else of {differing}")


if __name__ == "__main__":
    make(sys.argv[1])
