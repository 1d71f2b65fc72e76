"""Random logs made on a real server, and their diffs: the truth for the reader.

A seed makes a log: topics of every kind with appends, deletes by tag and by seq, caps, expiry,
drops and recreations, routers, queues. After `Sealing` everything is sealed as far as possible, so
that the files must show exactly what a diff does.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, Final

import msgspec

from tests.contract.driver import Api, Json, good

COLUMNS: Final = ("seq", "ts", "node", "tag", "data", "meta")
TEXTS: Final = ("", "ä", "x" * 300, '\\u00e9 \\" ', "𝄞", "a,b\\n")
TAGS: Final = ("a", "b:1", "b:2", "", "ähre", None)
NODES: Final = ("n1", "n2", None)

Row = dict[str, Any]


class _Record(msgspec.Struct):
    seq: int = msgspec.field(name="$seq")
    ts: int = msgspec.field(name="$ts")
    data: msgspec.Raw
    node: str | None = msgspec.field(name="$node", default=None)
    tag: str | None = msgspec.field(name="$tag", default=None)
    meta: msgspec.Raw = msgspec.Raw()


class _Page(msgspec.Struct):
    records: list[_Record]
    next_from_seq: int
    caught_up: bool


def read_rows(api: Api, topic: str) -> list[Row]:
    """Every record of a diff, as the reader's columns."""
    rows: list[Row] = []
    cursor = 0
    for _ in range(10_000):
        answer = api.diff(topic, from_seq=cursor, limit=1000, include_tags=True)
        assert answer.status_code == 200, answer.text
        page = msgspec.json.decode(answer.content, type=_Page)
        for record in page.records:
            meta = bytes(record.meta).decode() or None
            data = bytes(record.data).decode()
            values = (record.seq, record.ts, record.node, record.tag, data, meta)
            rows.append(dict(zip(COLUMNS, values, strict=True)))
        if page.caught_up:
            return rows
        cursor = page.next_from_seq
    raise AssertionError("no end")


def digests(rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """A hash of each column, in order of seq."""
    ordered = sorted(rows, key=lambda row: int(row["seq"]))
    totals = {name: hashlib.sha256() for name in COLUMNS}
    for row in ordered:
        for name, total in totals.items():
            encoded = json.dumps(row[name], ensure_ascii=False).encode()
            total.update(b"%d:" % len(encoded) + encoded)
    return {name: total.hexdigest() for name, total in totals.items()}


def seal_all(api: Api) -> Json:
    """Seal everything: all records are in segments, with the current flags and floors."""
    return good(api.http.post("/v0/admin/seal"))


def make_log(api: Api, seed: int) -> list[str]:
    """Make the topics of one seed."""
    chance = random.Random(seed)
    plain, capped, queue = f"s{seed}.plain", f"s{seed}.capped", f"s{seed}.jobs"
    copies, brief = f"s{seed}.copies", f"s{seed}.brief"
    fading = f"s{seed}.fading"
    good(api.put(plain, {"durability": chance.choice(["disk", "fsync", "memory"])}))
    good(api.put(capped, {"cap_records": chance.randint(3, 30)}))
    good(api.put(queue, {"type": "queue", "lease_log": f"s{seed}.leases"}))
    good(api.put(brief, {}))
    good(api.put(fading, {}))
    _append(api, chance, fading)
    router: Json = {"source": plain, "dest": copies, "preserve_tag": True}
    good(api.http.put(f"/v0/routers/s{seed}.r", json=router))
    for _ in range(chance.randint(4, 9)):
        _step(api, chance, [plain, plain, capped, brief, fading], queue)
    _append(api, chance, fading)
    if chance.random() < 0.5:
        good(api.drop(brief))
        good(api.put(brief, {}))
        _append(api, chance, brief)
    return [plain, capped, queue, copies, brief, fading, f"s{seed}.leases"]


def fade(api: Api, seed: int) -> None:
    """Let a TTL remove records of one seed's topic: all, none, or those before a record.

    A TTL keeps removing records while a test runs. So one that removed a part is raised afterwards:
    the floor keeps the removed records away, and the rest stays.
    """
    chance = random.Random(-1 - seed)
    topic = f"s{seed}.fading"
    how = chance.choice(["all", "none", "some", "some", "some"])
    times = sorted({int(row["ts"]) for row in read_rows(api, topic)})
    if how == "some" and len(times) > 1:
        before, after = chance.choice([*pairwise(times)])
        age_ms = int(time.time() * 1000) - (before + after) // 2
        good(api.put(topic, {"ttl_ms": max(age_ms, 1)}))
        read_rows(api, topic)
    good(api.put(topic, {"ttl_ms": 1 if how == "all" else 3_600_000}))


def change_later(api: Api, seed: int) -> None:
    """Change one seed's topics after a seal and a first export.

    Caps and time limits change in both directions, topics are dropped and recreated with the same
    name, records are added and deleted.
    """
    chance = random.Random(1_000_000 + seed)
    plain, capped, brief = f"s{seed}.plain", f"s{seed}.capped", f"s{seed}.brief"
    how = chance.choice(["cap", "cap and back", "long ttl", "none"])
    if how.startswith("cap"):
        good(api.put(plain, {"cap_records": chance.randint(1, 20)}))
    if how == "cap and back":
        good(api.put(plain, {}))
    elif how == "long ttl":
        good(api.put(plain, {"ttl_ms": 3_600_000}))
    good(api.put(capped, {"cap_records": chance.randint(1, 60)}))
    for _ in range(chance.randint(1, 3)):
        _append(api, chance, chance.choice([plain, capped]))
    if chance.random() < 0.5:
        good(api.delete(plain, match=chance.choice(["a", "ähre"])))
    for _ in range(chance.choice([0, 1, 1, 2])):
        good(api.drop(brief))
        if chance.random() < 0.7:
            good(api.put(brief, {}))
            _append(api, chance, brief)
            if chance.random() < 0.5:
                seal_all(api)
        else:
            break


def _append(api: Api, chance: random.Random, topic: str) -> None:
    api_records = [_record(chance) for _ in range(chance.randint(1, 12))]
    good(api.append(topic, api_records))


def _record(chance: random.Random) -> Json:
    record: Json = {"data": chance.choice([None, 1.5, [1, {}], {"t": chance.choice(TEXTS)}])}
    if (tag := chance.choice(TAGS)) is not None:
        record["tag"] = tag
    if (node := chance.choice(NODES)) is not None:
        record["node"] = node
    if chance.random() < 0.3:
        record["meta"] = {"k": chance.choice(TEXTS)}
    return record


def _step(api: Api, chance: random.Random, topics: list[str], queue: str) -> None:
    topic = chance.choice(topics)
    kind = chance.choice(["append", "append", "append", "tag", "seq", "job", "seal"])
    if kind == "append":
        _append(api, chance, topic)
    elif kind == "tag":
        match = chance.choice(["a", ["tag", "Glob", "b:*"], "ähre"])
        good(api.delete(topic, match=match))
    elif kind == "seq":
        head = int(api.get_state(topic)["head_seq"])
        good(api.delete(topic, before_seq=chance.randint(0, head // 2 + 1)))
    elif kind == "job":
        _append(api, chance, queue)
        path = f"/v0/topics/{queue}"
        claimed = good(api.http.post(f"{path}/claim", json={"node": "w", "max": 3}))
        seqs = [job["$seq"] for job in claimed["claimed"]]
        if seqs:
            good(api.http.post(f"{path}/ack", json={"node": "w", "seqs": seqs[:2]}))
    else:
        good(api.http.post("/v0/admin/seal", json={"topics": [topic]}))
