"""Makes days of a table equal to the store: removes rows that were deleted in the store, and fills
typed payloads. A day is first compared, by seqs and by typed payloads, so that an equal day is not
rewritten. Only rows that the store could still have are compared: rows of the current incarnation,
not below its floor and not expired. All others stay, because the lake keeps records that the store
has evicted.
"""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import Any, Final, NamedTuple

from spark_jobs.to_iceberg.sealed import DAY_MS, PAYLOAD, SealedTopics
from spark_jobs.to_iceberg.tables import TopicTable

_EPOCH_DAY: Final = date(1970, 1, 1)


class RebuiltDay(NamedTuple):
    """The result of a rebuild: the number of removed rows, and whether the day was rewritten."""

    removed: int
    is_new: bool


def days_of(table: Any) -> list[date]:
    """The days of a table's rows, from its manifests."""
    if table.current_snapshot() is None:
        return []
    found = set()
    for task in table.scan(selected_fields=("seq",)).plan_files():
        day = task.file.partition[0]
        found.add(day if isinstance(day, date) else _EPOCH_DAY + timedelta(days=day))
    return sorted(found)


def rebuild_day(
    topics: SealedTopics, topic: str, table: TopicTable, day: date, struct: Any = None
) -> RebuiltDay:
    """Rebuild a topic's day if the store has lost rows of it, or if typed payloads differ."""
    from pyiceberg.expressions import And, EqualTo, GreaterThanOrEqual, LessThan, LessThanOrEqual

    start_ms = (day - _EPOCH_DAY).days * DAY_MS
    sealed = topics.day(topic, start_ms, table.position(), struct)
    if sealed is None or sealed.bounds.is_empty:
        return RebuiltDay(0, is_new=False)
    where = And(
        EqualTo("epoch", sealed.epoch),
        GreaterThanOrEqual("seq", sealed.bounds.first_seq),
        LessThanOrEqual("seq", sealed.bounds.last_seq),
        GreaterThanOrEqual("ts", _moment(sealed.bounds.start_ts)),
        LessThan("ts", _moment(sealed.bounds.end_ts)),
    )
    known = table.table.scan(row_filter=where, selected_fields=("seq",)).to_arrow()
    if not len(known):
        return RebuiltDay(0, is_new=False)
    live: set[int] = set()
    is_other = False
    for rows in sealed.rows():
        live.update(rows["seq"].to_pylist())
        is_other = is_other or (struct is not None and _is_other(table, where, rows))
    dead = sum(seq not in live for seq in known["seq"].to_pylist())
    if dead or is_other:
        table.replace(where, sealed.rows())
    return RebuiltDay(dead, is_new=bool(dead) or is_other)


def _is_other(table: TopicTable, where: Any, rows: Any) -> bool:
    """Whether the table's typed payloads differ from those of these (ascending) rows."""
    import pyarrow.compute as pc
    from pyiceberg.expressions import And, GreaterThanOrEqual, LessThanOrEqual

    from spark_jobs.to_iceberg.payloads import as_struct

    span = And(
        GreaterThanOrEqual("seq", rows["seq"][0].as_py()),
        LessThanOrEqual("seq", rows["seq"][-1].as_py()),
    )
    found = table.table.scan(row_filter=And(where, span), selected_fields=("seq", PAYLOAD))
    known = found.to_arrow().sort_by("seq")
    known = known.filter(pc.is_in(known["seq"], rows["seq"]))
    rows = rows.filter(pc.is_in(rows["seq"], known["seq"]))
    struct = table.struct()
    made, stored = (as_struct(each[PAYLOAD].combine_chunks(), struct) for each in (rows, known))
    return not made.equals(stored)


def _moment(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds")
