"""Makes a golden data directory: a real server is driven over HTTP, killed twice, and copied.

    .venv/bin/python -m tests.vectors.make_store store-v2

Vectors are never made again, only added: what a released server once wrote must be readable for
ever, and a vector that is regenerated proves nothing. An existing folder is therefore refused.

What a vector holds: topics of every class; sealed segments in the hot and the cold folder; delete
flags; two snapshots; a journal tail that no snapshot covers; idempotency keys of a body and of a
header; floors of a cap and of a TTL; a head that jumped after a lost boot; deletes in the tail; a
dropped topic, a recreated one, a reconfigured one.
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
import msgspec

from tests.contract.driver import Api, Server, eventually, good
from tests.vectors.stored import BOOT_ID, NODE, VECTORS, Expected, opened, read_back

ENVIRONMENT: Final = {
    "TOPICS_WAL_SHARDS": "2",
    "TOPICS_SEGMENT_MAX_EVENTS": "40",
    "TOPICS_HOT_RETAIN_SEGMENTS": "1",
    "TOPICS_MIN_FREE_BYTES": "0",
    "TOPICS_CHECKPOINT_INTERVAL_MS": "3600000",
}
CLASSES: Final = ("fsync", "disk", "memory", "ephemeral")
# Values a parser would not give back as they came.
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
    """Append a body exactly as it is."""
    sent = {"content-type": "application/json", **headers}
    return good(api.http.post(f"/v0/topics/{topic}", content=body, headers=sent))


def first_run(api: Api, cold: Path) -> None:
    """Sealed history: hot and cold segments, flags, floors, names that come and go."""
    for durability in CLASSES:
        good(api.put(durability, {"durability": durability}))
        for start in range(0, 200, 25):
            good(api.append(durability, orders(start, 25)))
        post(api, durability, ODD_BODY)
    good(api.put("capped", {"cap_records": 30}))
    good(api.put("expired", {"ttl_ms": 300}))
    good(api.put("work", {"type": "queue", "max_deliveries": 3, "lease_ms": 5000}))
    for start in range(0, 90, 30):
        good(api.append("capped", orders(start, 30)))
    good(api.append("expired", orders(0, 45)))
    good(api.append("work", orders(0, 5)))
    for name in ("gone", "again"):
        good(api.append(name, orders(0, 50)))
        good(api.drop(name))
    good(api.append("again", orders(0, 3)))
    eventually(lambda: len(list(cold.rglob("*.data"))) >= 9, "cold segments")
    for durability in CLASSES:
        good(api.delete(durability, match="order-3"))
        good(api.delete(durability, before_seq=12))
    time.sleep(1.5)  # so that what has expired is a floor


def last_run(api: Api) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The journal tail; the retries and the deletes a reader of the vector is to make."""
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
    deletes: list[dict[str, Any]] = [
        {"topic": "disk", "match": "order-5"},
        {"topic": "fsync", "match": ["tag", "Glob", "order-*"]},
        {"topic": "memory", "match": ""},
    ]
    return retries, deletes


def change_boot(data: Path, boot_id: str) -> None:
    """As if the machine had been started anew: the mark of the boot is another one."""
    mark = json.loads((data / "FORMAT").read_text())
    mark["boot_id"] = boot_id
    (data / "FORMAT").write_text(json.dumps(mark))


def pack(folder: Path, target: Path) -> None:
    """`data` and `cold` of `folder` as one archive, without owners."""

    def anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        return info

    with tarfile.open(target, "w:gz", compresslevel=9) as archive:
        for name in ("data", "cold"):
            archive.add(folder / name, arcname=name, filter=anonymous)


async def live_answers(url: str, names: list[str]) -> dict[str, Any]:
    """What the server says before it is killed."""
    async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
        return {name: await read_back(http, name) for name in names}


async def answers_of_copy(folder: Path, expected: Expected, names: list[str]) -> dict[str, Any]:
    """What a node on a copy says."""
    async with opened(folder, expected) as http:
        return {name: await read_back(http, name) for name in names}


def make(name: str) -> None:
    """Write `tests/vectors/NAME`."""
    vector = VECTORS / name
    if vector.exists():
        raise SystemExit(f"{vector} exists: vectors are never made again, only added")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        server = Server(folder, {**ENVIRONMENT, "TOPICS_COLD_DIR": str(folder / "cold")})
        server.env = {**server.env, "TOPICS_CHECKPOINT_INTERVAL_MS": "200"}
        first_run(server.start(), folder / "cold")
        snapshots = server.data_dir / "snapshots"
        eventually(lambda: len(list(snapshots.glob("*.snap"))) == 2, "two snapshots")
        server.signal(signal.SIGKILL)
        change_boot(server.data_dir, "11111111-1111-4111-8111-111111111111")
        server.env = {**ENVIRONMENT, "TOPICS_COLD_DIR": str(folder / "cold")}
        api = server.start()
        retries, deletes = last_run(api)
        time.sleep(1.0)  # flags and segments of this run, as far as they are due
        names = sorted(topic["topic"] for topic in good(api.topics(page_size=1000))["topics"])
        topics = asyncio.run(live_answers(api.url, names))
        seen_ms = int(time.time() * 1000)
        server.signal(signal.SIGKILL)
        change_boot(server.data_dir, BOOT_ID)
        vector.mkdir()
        pack(folder, vector / "store.tar.gz")
        absent = ["gone", "dropped-late"]
        note = "written by tests/vectors/make_store.py; never to be made again"
        expected = Expected(note, seen_ms, ENVIRONMENT, topics, absent, retries, deletes)
        # Only a start can say what is told of records that were never on disk.
        after = asyncio.run(answers_of_copy(folder, expected, names))
        topics["ephemeral"] = after["ephemeral"]
        differing = [name for name in names if after[name] != topics[name]]
        (vector / "expected.json").write_bytes(
            msgspec.json.format(msgspec.json.encode(expected), indent=1) + b"\n"
        )
        if differing:
            raise SystemExit(f"a node on a copy says something else of {differing}")


if __name__ == "__main__":
    make(sys.argv[1])
