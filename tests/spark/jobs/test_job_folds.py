"""Must-show 2: jobs on thousands of random records against a plain fold, all values exactly.

A seed makes the records, which never come from Spark; `test_jobs` does the same for volume, tags,
sessions and Parquet files with the records of a real server.
"""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from math import ceil, floor
from typing import Any, Final

import pytest

from tests.spark.conftest import HAS_SPARK, INSTALL

if not HAS_SPARK:
    pytest.skip(f"PySpark is not installed; {INSTALL}", allow_module_level=True)

from spark_jobs import integrity_audit, payload_schema, queue_latency, router_lag, to_parquet
from tests.spark.jobs.test_jobs import DAY, utc

DAY_MS: Final = int(DAY.timestamp() * 1000)
HOUR_MS: Final = 3_600_000


def when(ms: int) -> datetime:
    """A time this many ms after the beginning of the day."""
    return DAY + timedelta(milliseconds=ms)


def since(time: datetime) -> int:
    """The inverse of `when`."""
    return round((utc(time) - DAY) / timedelta(milliseconds=1))


def percentile(values: Sequence[int], share: float) -> float | None:
    """A percentile, interpolated between its two neighbours; None for an empty list."""
    if not values:
        return None
    ordered, place = sorted(values), (len(values) - 1) * share
    low, high = floor(place), ceil(place)
    if ordered[low] == ordered[high]:
        return float(ordered[low])
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


# -- queue_latency -----------------------------------------------------------------------------


def test_queue_latency(spark: Any) -> None:
    """4,000 jobs of three queues: claimed again, expired, dead, waiting, of unknown begin."""
    chance = random.Random(11)
    jobs: list[tuple[str, int, datetime]] = []
    log: list[tuple[str]] = []
    expected: dict[tuple[str, int], tuple[Any, ...]] = {}
    for seq in range(1, 4001):
        queue, enqueued = f"q{chance.randrange(3)}", chance.randrange(6 * HOUR_MS)
        is_known = chance.random() < 0.9
        if is_known:
            jobs.append((queue, seq, when(enqueued)))
        claims, ended, now, state = [], None, enqueued, ""
        for _ in range(chance.randrange(4)):
            now += chance.randint(1, 90_000)
            claims.append(now)
            log.append(event("claimed", queue, seq, now))
            state = chance.choice(["claimed", "released", "expired", "acked", "dead_lettered"])
            if state == "claimed":
                break
            now += chance.randint(1, 30_000)
            log.append(event(state, queue, seq, now))
            if state in ("acked", "dead_lettered"):
                ended = now
                break
        expired = sum(f'"expired","queue":"{queue}","seq":{seq},' in line for (line,) in log[-8:])
        if claims:
            work = ended - claims[-1] if ended is not None and state == "acked" else None
            wait = claims[0] - enqueued if is_known else None
            total = ended - enqueued if ended is not None and is_known else None
            expected[queue, seq] = (len(claims), expired, claims[0], wait, work, total, state)
    chance.shuffle(log)
    got = queue_latency.transform(
        spark.createDataFrame(log, "data string"),
        spark.createDataFrame(jobs, "topic string, seq bigint, ts timestamp"),
    ).cache()
    assert {
        (r.queue, r.seq): (
            *(r.claims, r.expired, since(r.claimed_at)),
            *(r.wait_ms, r.work_ms, r.total_ms, r.state),
        )
        for r in got.collect()
    } == expected
    assert len(expected) > 2500

    groups: dict[tuple[str, int], list[tuple[Any, ...]]] = defaultdict(list)
    for (queue, _), job in expected.items():
        groups[queue, job[2] // HOUR_MS].append(job)
    rows = queue_latency.summary(got).collect()
    assert [(r.queue, since(r.start) // HOUR_MS) for r in rows] == sorted(groups)
    for row in rows:
        mine = groups[row.queue, since(row.start) // HOUR_MS]
        assert row.jobs == len(mine)
        assert row.claimed_again == sum(job[0] - 1 for job in mine)
        assert row.enqueued_unknown == sum(job[3] is None for job in mine)
        for place, name in ((3, "wait"), (4, "work"), (5, "total")):
            values = [job[place] for job in mine if job[place] is not None]
            for share in (50, 95, 99):
                assert row[f"{name}_p{share}_ms"] == percentile(values, share / 100)
    got.unpersist()


def event(kind: str, queue: str, seq: int, ms: int) -> tuple[str]:
    """A record of a lease log."""
    said = f'{{"event":"{kind}","queue":"{queue}","seq":{seq},"ts":{DAY_MS + ms},"node":"n"}}'
    return (said,)


# -- router_lag --------------------------------------------------------------------------------


def test_router_lag(spark: Any) -> None:
    """5,000 copies of 3,000 records of two sources: late, twice, of dropped ones, or unstamped."""
    chance = random.Random(12)
    origins = {
        (f"s{seq % 2}", 1 + seq // 1500, seq): chance.randrange(600_000) for seq in range(3000)
    }
    sources = [(*key, when(ms)) for key, ms in origins.items() if chance.random() < 0.9]
    known = {key[:3] for key in sources}
    copies: list[tuple[str, datetime, str | None]] = []
    lags: dict[tuple[str, str, int], list[int | None]] = defaultdict(list)
    for _ in range(5000):
        dest, key = f"d{chance.randrange(2)}", chance.choice([*origins])
        copied = origins[key] + int(chance.expovariate(1 / 5000))
        source, epoch, seq = key
        stamp = {"source": source, "epoch": epoch, "seq": seq, "key": "r"}
        meta = chance.choice([None, "no json", "{}", '{"k":1}', *[stamp] * 12])
        if isinstance(meta, dict):
            meta = json.dumps({"k": 1, "_topics_router": meta})
            lag = copied - origins[key] if key in known else None
            lags[source, dest, copied // 60_000].append(lag)
        copies.append((dest, when(copied), meta))
    got = router_lag.transform(
        spark.createDataFrame(sources, "topic string, epoch bigint, seq bigint, ts timestamp"),
        spark.createDataFrame(copies, "topic string, ts timestamp, meta string"),
    ).collect()
    expected = []
    for bucket, found in sorted(lags.items()):
        values = [lag for lag in found if lag is not None]
        shares = (percentile(values, 0.5), percentile(values, 0.99), max(values, default=None))
        expected.append((*bucket, len(found), len(found) - len(values), *shares))
    assert [
        (
            *(r.source, r.dest, since(r.start) // 60_000, r.copies, r.unknown),
            *(r.lag_p50_ms, r.lag_p99_ms, r.lag_max_ms),
        )
        for r in got
    ] == expected
    assert sum(row[3] for row in expected) > 3000
    assert sum(row[4] for row in expected) > 200


# -- payload_schema ----------------------------------------------------------------------------

Schema = str | tuple[str, Any]


def schema_of(value: Any) -> Schema:
    """VARIANT's name for a value, with the contents of objects and arrays."""
    if isinstance(value, dict):
        return "OBJECT", {name: schema_of(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return "ARRAY", merge_all([schema_of(inner) for inner in value])
    names = {str: "STRING", int: "BIGINT", bool: "BOOLEAN", type(None): "VOID"}
    return names[type(value)]


def merge_all(found: Sequence[Schema]) -> Schema:
    """The schema that fits all values; without values it is that of null."""
    merged: Schema = "VOID"
    for schema in found:
        merged = merge(merged, schema)
    return merged


def merge(a: Schema, b: Schema) -> Schema:
    """Merge two schemas: null gives the other one; objects are merged by field, arrays by item;
    other pairs become any.
    """
    if "VOID" in (a, b):
        return b if a == "VOID" else a
    if isinstance(a, str) or isinstance(b, str) or a[0] != b[0]:
        return a if a == b else "VARIANT"
    if a[0] == "ARRAY":
        return "ARRAY", merge(a[1], b[1])
    names = {**a[1], **b[1]}
    return "OBJECT", {n: merge(a[1].get(n, "VOID"), b[1].get(n, "VOID")) for n in names}


def words(schema: Schema) -> str:
    """The schema in Spark's notation."""
    if isinstance(schema, str):
        return schema
    kind, inner = schema
    if kind == "ARRAY":
        return f"ARRAY<{words(inner)}>"
    return f"OBJECT<{', '.join(f'{n}: {words(each)}' for n, each in sorted(inner.items()))}>"


def random_value(chance: random.Random, depth: int) -> Any:
    """A random value, at the top mostly an object, with smaller values below."""
    kind = chance.random()
    if depth == 0 or kind < (0.1, 0.5, 0.7, 0.05)[depth]:
        return chance.choice([None, True, 7, -(2**40), "", "x", "ä"])
    if kind < 0.6 and depth < 3:
        return [random_value(chance, depth - 1) for _ in range(chance.randrange(3))]
    names = chance.sample(["a", "b", "c", "d", "e", "f"], chance.randrange(4))
    return {name: random_value(chance, depth - 1) for name in names}


def kind_of(value: Any) -> str:
    """A type without its contents."""
    schema = schema_of(value)
    return schema if isinstance(schema, str) else schema[0]


def test_payload_schema(spark: Any) -> None:
    """5,000 payloads of any form in three topics, in buckets of an hour."""
    chance = random.Random(13)
    rows: list[tuple[str, datetime, str]] = []
    schemas: dict[tuple[str, int], list[Schema | None]] = defaultdict(list)
    fields: Counter[tuple[str, int, str, str]] = Counter()
    for _ in range(5000):
        topic, ms = f"t{chance.randrange(3)}", chance.randrange(48) * HOUR_MS
        ms += chance.randrange(HOUR_MS)
        key = topic, ms // HOUR_MS
        if chance.random() < 0.02:
            rows.append((topic, when(ms), chance.choice(["no", "{", "[1", ""])))
            schemas[key].append(None)
            fields[*key, "(payload)", "no JSON"] += 1
            continue
        # Some buckets have flat objects only: their schemas differ by their fields.
        value = {"a": 1, "b": "x"} if key[1] % 3 else random_value(chance, 3)
        rows.append((topic, when(ms), json.dumps(value, ensure_ascii=chance.random() < 0.5)))
        schemas[key].append(schema_of(value))
        fields[*key, "(payload)", kind_of(value)] += 1
        for name, inner in value.items() if isinstance(value, dict) else ():
            fields[*key, name, kind_of(inner)] += 1
            for deeper, last in inner.items() if isinstance(inner, dict) else ():
                fields[*key, f"{name}.{deeper}", kind_of(last)] += 1
    frame = spark.createDataFrame(rows, "topic string, ts timestamp, data string").cache()
    got = payload_schema.transform(frame, "1 hour").collect()
    expected = []
    before: dict[str, str] = {}
    for (topic, hour), found in sorted(schemas.items()):
        merged = words(merge_all([each for each in found if each is not None]))
        has_changed = before.get(topic, merged) != merged
        before[topic] = merged
        expected.append((topic, hour, len(found), found.count(None), merged, has_changed))
    assert [
        (r.topic, since(r.start) // HOUR_MS, r.records, r.not_json, r.schema, r.changed)
        for r in got
    ] == expected
    assert 30 < sum(row[-1] for row in expected) < len(expected) - 3
    counts = payload_schema.fields(frame, "1 hour").collect()
    assert {
        (r.topic, since(r.start) // HOUR_MS, r.field, r.type): r.records for r in counts
    } == fields
    assert len(counts) == len(fields)
    frame.unpersist()


# -- integrity_audit ---------------------------------------------------------------------------


def test_integrity_audit(spark: Any) -> None:
    """6,000 seqs of three topics with holes, doubled ones and deleted ones; some are damaged."""
    chance = random.Random(14)
    rows: list[tuple[str, int, int, bool]] = []
    for topic in range(3):
        seq = chance.randint(1, 50)
        while len(rows) < 2000 * (topic + 1):
            rows.append((f"t{topic}", topic + 1, seq, chance.random() < 0.3))
            seq += chance.choices([0, 1, 7, 400], [2, 300, 3, 1])[0]
    chance.shuffle(rows)
    frame = spark.createDataFrame(rows, "topic string, epoch bigint, seq bigint, deleted boolean")
    expected = []
    for topic in range(3):
        mine = sorted((seq, deleted) for name, _, seq, deleted in rows if name == f"t{topic}")
        steps = [b - a for (a, _), (b, _) in pairwise(mine)]
        gaps = [step - 1 for step in steps if step > 1]
        live = sum(not deleted for _, deleted in mine)
        counts = (len(mine), live, mine[0][0], mine[-1][0], steps.count(0), len(gaps), sum(gaps))
        expected.append((f"t{topic}", topic + 1, *counts))
    topics = integrity_audit.transform(frame).collect()
    assert [tuple(row) for row in topics] == expected
    assert all(row[6] and row[7] for row in expected)

    damaged = [(f"t{n % 3}", a, a + chance.randrange(9)) for n, a in enumerate(range(90, 1500, 70))]
    findings = spark.createDataFrame(damaged, "topic string, first_seq bigint, last_seq bigint")
    parts: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0, 0])
    is_deleted: dict[tuple[str, int], bool] = {}
    for name, _, seq, deleted in rows:
        is_deleted[name, seq] = deleted and is_deleted.get((name, seq), True)
    for (name, seq), deleted in is_deleted.items():
        if any(topic == name and a <= seq <= b for topic, a, b in damaged):
            continue
        low, high = next((row[4], row[5]) for row in expected if row[0] == name)
        size = ceil((high - low + 1) / integrity_audit.PIECES)
        parts[name, low + (seq - low) // size * size][deleted] += 1
    got = integrity_audit.parts(frame, findings.collect()).collect()
    assert {(r.topic, r.first_seq): [r.live, r.deleted] for r in got} == parts
    assert len(got) == len(parts)


# -- to_parquet --------------------------------------------------------------------------------


def test_to_parquet(spark: Any) -> None:
    """5,000 records over ten days: their day in UTC, payloads as text, VARIANT and typed."""
    chance = random.Random(15)
    rows: list[tuple[str, int, datetime, str]] = []
    for seq in range(5000):
        sent = {"n": chance.randrange(9), "s": chance.choice(["x", "ä", None]), "o": {"k": seq}}
        payload = chance.choice([json.dumps(sent)] * 9 + ["no json"])
        ms = chance.choice([0, 86_399_999, chance.randrange(86_400_000)])
        rows.append((f"t{seq % 3}", seq, when(ms + 86_400_000 * chance.randrange(10)), payload))
    frame = spark.createDataFrame(rows, "topic string, seq bigint, ts timestamp, data string")
    asked = "n int, o struct<k: bigint>"
    text, variant, typed = (
        {r.seq: r for r in to_parquet.transform(frame, *how).collect()}
        for how in (("text", None), ("variant", None), ("text", asked))
    )
    for topic, seq, ts, data in rows:
        for found in (text, variant, typed):
            assert (found[seq].topic, found[seq].day) == (topic, ts.astimezone(UTC).date())
        assert text[seq].data == data
        if data == "no json":
            assert variant[seq].data is None
            assert typed[seq].data is None or [*typed[seq].data] == [None, None]
        else:
            value = json.loads(data)
            assert variant[seq].data.toPython() == value
            assert typed[seq].data.asDict(True) == {"n": value["n"], "o": value["o"]}
    assert len(text) == len(variant) == len(typed) == len(rows)
