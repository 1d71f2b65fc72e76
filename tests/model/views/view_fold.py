"""The rows that a view must hold: each definition of the simulation, computed in plain Python.

`DEFINITIONS` are bodies of a `PUT`; `fold` gives the rows of its query `all` from the records that
were applied, in seq order. Written from docs/VIEWS.md, not from the SQL.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from tests.model.views.view_disk import Delivered

Rows = list[list[Any]]
BUCKET_MS: Final = 50
# A record whose `n` is a multiple of this fails in the view `strict`.
UNLUCKY: Final = 19

_AUDIT: Final[dict[str, Any]] = {
    "schema": [
        "CREATE TABLE audit (seq INTEGER PRIMARY KEY, tag, node, k, n)",
        "CREATE TABLE totals (node PRIMARY KEY, records INTEGER, n INTEGER)",
    ],
    "apply": [
        "INSERT INTO audit SELECT :seq, :tag, :node, :data ->> '$.k', :data ->> '$.n'",
        "INSERT INTO totals VALUES (coalesce(:node, '-'), 1, :data ->> '$.n') ON CONFLICT (node) "
        "DO UPDATE SET records = records + 1, n = n + excluded.n",
        "DELETE FROM audit WHERE seq < :seq AND k = :data ->> '$.k' AND tag IS NOT :tag",
    ],
    "queries": {
        "all": "SELECT seq, tag, node, k, n FROM audit UNION ALL "
        "SELECT 0, node, NULL, records, n FROM totals ORDER BY 1, 2"
    },
}
_STRICT: Final[dict[str, Any]] = {
    "schema": f"CREATE TABLE t (seq INTEGER PRIMARY KEY, n INTEGER CHECK (n % {UNLUCKY} <> 0))",
    "apply": "INSERT INTO t VALUES (:seq, :data ->> '$.n')",
    "queries": {"all": "SELECT seq, n FROM t ORDER BY seq"},
}
DEFINITIONS: Final[dict[str, dict[str, Any]]] = {
    "latest_by_tag": {"shortcut": {"latest_by_tag": True}},
    "count_by_tag": {"shortcut": {"count_by_tag": True}},
    "latest_by_key": {"shortcut": {"latest_by_key": "/k"}},
    "timeseries": {
        "shortcut": {"timeseries": {"bucket": BUCKET_MS, "sum": ["/n"], "by_tag": True}}
    },
    "audit": _AUDIT,
    "strict": _STRICT,
}


def fold(kind: str, records: Mapping[int, Delivered]) -> Rows:
    """The rows of the query `all`."""
    return _FOLDS[kind]({seq: records[seq] for seq in sorted(records)})


def _latest_by_tag(records: Mapping[int, Delivered]) -> Rows:
    newest = {record.tag: (seq, record) for seq, record in records.items()}
    return [
        [tag, seq, record.ts, record.node, record.data.decode(), record.meta.decode() or None]
        for tag, (seq, record) in sorted(newest.items(), key=lambda item: item[0] or "")
        if tag is not None
    ]


def _count_by_tag(records: Mapping[int, Delivered]) -> Rows:
    counts: dict[str, list[Any]] = {}
    for seq, record in records.items():
        if record.tag is not None:
            row = counts.setdefault(record.tag, [record.tag, 0, 0, 0])
            row[1:] = [row[1] + 1, seq, record.ts]
    return [counts[tag] for tag in sorted(counts)]


def _latest_by_key(records: Mapping[int, Delivered]) -> Rows:
    newest = {json.loads(record.data)["k"]: (seq, record) for seq, record in records.items()}
    return [
        [key, seq, record.ts, record.tag, record.node, record.data.decode(), _meta(record)]
        for key, (seq, record) in sorted(newest.items())
    ]


def _meta(record: Delivered) -> str | None:
    return record.meta.decode() or None


def _timeseries(records: Mapping[int, Delivered]) -> Rows:
    series: dict[tuple[int, str], list[int]] = {}
    for record in records.values():
        bucket = record.ts // BUCKET_MS * BUCKET_MS
        row = series.setdefault((bucket, record.tag or ""), [0, 0])
        row[0] += 1
        row[1] += json.loads(record.data)["n"]
    order = sorted(series, key=lambda key: (-key[0], key[1]))
    # The query orders by bucket only; within one the key of the table decides.
    return sorted([[*key, *series[key]] for key in order], key=lambda row: (-row[0], row[1]))


def _audit(records: Mapping[int, Delivered]) -> Rows:
    kept: dict[int, list[Any]] = {}
    totals: dict[str, list[int]] = {}
    for seq, record in records.items():
        data = json.loads(record.data)
        total = totals.setdefault(record.node or "-", [0, 0])
        total[0] += 1
        total[1] += data["n"]
        kept = {
            old: row for old, row in kept.items() if row[3] != data["k"] or row[1] == record.tag
        }
        kept[seq] = [seq, record.tag, record.node, data["k"], data["n"]]
    rows = [[0, node, None, *total] for node, total in sorted(totals.items())]
    return rows + [kept[seq] for seq in sorted(kept)]


def _strict(records: Mapping[int, Delivered]) -> Rows:
    return [[seq, json.loads(record.data)["n"]] for seq, record in records.items()]


_FOLDS: Final = {
    "latest_by_tag": _latest_by_tag,
    "count_by_tag": _count_by_tag,
    "latest_by_key": _latest_by_key,
    "timeseries": _timeseries,
    "audit": _audit,
    "strict": _strict,
}
