"""Makes days of a table equal to the store: rows that were deleted since they were added go.

A day is compared by seqs first, so a day without a delete costs no rewrite. Only rows that the
store could still have are judged: of the current incarnation, not below its floor and not expired.
The others stay, as the lake keeps what the store has evicted.
"""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import Any, Final

from spark_jobs.to_iceberg.sealed import DAY_MS, SealedTopics
from spark_jobs.to_iceberg.tables import TopicTable

_EPOCH_DAY: Final = date(1970, 1, 1)


def days_of(table: Any) -> list[date]:
    """The days that a table has rows of, by its manifests."""
    if table.current_snapshot() is None:
        return []
    found = set()
    for task in table.scan(selected_fields=("seq",)).plan_files():
        day = task.file.partition[0]
        found.add(day if isinstance(day, date) else _EPOCH_DAY + timedelta(days=day))
    return sorted(found)


def rebuild_day(topics: SealedTopics, topic: str, table: TopicTable, day: date) -> int:
    """Rebuild a topic's day if the store lacks rows of it now; the number of rows removed."""
    from pyiceberg.expressions import And, EqualTo, GreaterThanOrEqual, LessThan, LessThanOrEqual

    sealed = topics.day(topic, (day - _EPOCH_DAY).days * DAY_MS, table.position())
    if sealed is None or sealed.bounds.is_empty:
        return 0
    where = And(
        EqualTo("epoch", sealed.epoch),
        GreaterThanOrEqual("seq", sealed.bounds.first_seq),
        LessThanOrEqual("seq", sealed.bounds.last_seq),
        GreaterThanOrEqual("ts", _moment(sealed.bounds.start_ts)),
        LessThan("ts", _moment(sealed.bounds.end_ts)),
    )
    known = table.table.scan(row_filter=where, selected_fields=("seq",)).to_arrow()
    if not len(known):
        return 0
    live = {seq for rows in sealed.rows() for seq in rows["seq"].to_pylist()}
    dead = sum(seq not in live for seq in known["seq"].to_pylist())
    if dead:
        table.replace(where, sealed.rows())
    return dead


def _moment(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds")
