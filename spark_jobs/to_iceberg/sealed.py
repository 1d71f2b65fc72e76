"""The sealed records of topics from a position on, as Arrow tables of limited size.

Rows are those of the Spark source: live, not evicted, not expired. A position is the incarnation of
a topic and its next seq. With a struct for payloads, rows also have the column `payload`: a payload
that does not fit is null there, and its text is in `data`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final, NamedTuple

from spark_jobs.reader.listing import Lister
from spark_jobs.reader.query import Query
from spark_jobs.reader.segments import read_segments
from topics_server.wal.format.manifest import Manifest

DAY_MS: Final = 86_400_000
# The column of typed payloads.
PAYLOAD: Final = "payload"
# A commit ends at so many rows or bytes in memory.
ROWS_PER_COMMIT: Final = 500_000
BYTES_PER_COMMIT: Final = 128 * 2**20


class LakePosition(NamedTuple):
    """The position of a table: every record of `epoch` below `next_seq` was read.

    Older epochs are finished.
    """

    epoch: int
    next_seq: int


class Part(NamedTuple):
    """Rows for one commit, and the position behind them."""

    rows: Any
    position: LakePosition


class SealedDay(NamedTuple):
    """Rows of one day from one listing, so that every call of `rows()` yields the same rows.

    `bounds`: the seqs and times that the store can still have; rows outside them are not compared.
    """

    bounds: Query
    epoch: int
    rows: Callable[[], Iterator[Any]]


class SealedTopics:
    """The topics of a data directory or an archive that a query selects."""

    def __init__(
        self,
        data_dir: str,
        query: Query,
        *,
        cold_dir: str | None = None,
        rows_per_commit: int = ROWS_PER_COMMIT,
        note: Callable[[str], None],
    ) -> None:
        self._query: Final = query
        self._lister: Final = Lister(data_dir, query, cold_dir=cold_dir)
        self._rows_per_commit: Final = rows_per_commit
        self._note: Final = note

    @property
    def names(self) -> list[str]:
        """The topics that have sealed segments."""
        return [name for name, topic in self._lister.topics.items() if topic.manifest.segments]

    def manifest(self, topic: str) -> Manifest:
        """The topic's manifest as of the listing."""
        return self._lister.topics[topic].manifest

    def parts(self, topic: str, after: LakePosition, struct: Any = None) -> Iterator[Part]:
        """Yield the topic's records behind a position. Raises `StorageError`."""
        epoch = self.manifest(topic).epoch
        if epoch < after.epoch:
            self._note(f"{topic}: the table has a newer incarnation than the segments; left alone")
            return
        first = after.next_seq if epoch == after.epoch else 1
        if epoch > after.epoch > 0:
            self._note(f"{topic} was dropped and made again: read from the start")
        listing = self._lister.list_topic(topic, self._query.narrow_seqs(first, None))
        if listing is None or listing.manifest.epoch != epoch:
            self._note(f"{topic} was dropped or made again meanwhile; the next run reads it")
            return
        floor = listing.manifest.evict_floor
        if first < floor:
            self._note(f"{topic}: seqs {first}..{floor - 1} were evicted before they were read")
        entries = listing.manifest.segments
        end = entries[-1].last_seq + 1 if entries else first
        query = self._query.narrow_seqs(first, None)
        yield from self._sized(listing.segments, query, struct, LakePosition(epoch, end))

    def day(
        self, topic: str, start_ms: int, position: LakePosition, struct: Any = None
    ) -> SealedDay | None:
        """The store's rows for a day of a table; None if the topic has another incarnation now."""
        query = self._query.narrow_times(start_ms, start_ms + DAY_MS)
        query = query.narrow_seqs(None, position.next_seq - 1)
        listing = self._lister.list_topic(topic, query)
        if listing is None or listing.manifest.epoch != position.epoch:
            return None
        manifest = listing.manifest
        # This time is not before the lister's own time for TTLs, so that rows which the lister
        # hides are not compared.
        ttl_ms = int(manifest.config.get("ttl_ms") or 0)
        since_ms = int(time.time() * 1000) - ttl_ms if ttl_ms else start_ms
        query = query.narrow_seqs(max(manifest.evict_floor, 1), None).narrow_times(since_ms, None)

        def rows() -> Iterator[Any]:
            parts = self._sized(listing.segments, query, struct, position)
            return (part.rows for part in parts)

        return SealedDay(query, position.epoch, rows)

    def _sized(
        self, segments: list[Any], query: Query, struct: Any, end: LakePosition
    ) -> Iterator[Part]:
        """The batches of the segments, joined into parts for one commit each.

        The last part ends at `end`.
        """
        import pyarrow as pa

        batches: list[Any] = []
        rows = size = 0
        for batch in _read(segments, query, struct):
            for start in range(0, len(batch), self._rows_per_commit):
                piece = batch.slice(start, self._rows_per_commit)
                is_full = rows + len(piece) > self._rows_per_commit or size >= BYTES_PER_COMMIT
                if batches and is_full:
                    table = pa.Table.from_batches(batches)
                    yield Part(table, LakePosition(end.epoch, table["seq"][-1].as_py() + 1))
                    batches, rows, size = [], 0, 0
                batches.append(piece)
                rows += len(piece)
                size += piece.nbytes
        if batches:
            yield Part(pa.Table.from_batches(batches), end)


def _read(segments: list[Any], query: Query, struct: Any) -> Iterator[Any]:
    """The batches of segments, with payloads as `struct` if given."""
    if struct is None:
        yield from read_segments(segments, query)
        return
    import numpy as np
    import pyarrow as pa

    from spark_jobs.reader.payload import typed

    # The kind distinguishes JSON from texts and bytes that look like JSON.
    columns = (*query.columns, ("kind", "string"))
    for batch in read_segments(segments, replace(query, columns=columns)):
        is_json = np.array([kind == "json" for kind in batch["kind"].to_pylist()], "?")
        payloads, _ = typed(batch["data"].cast(pa.binary()), is_json, struct)
        yield batch.drop_columns(["kind"]).append_column(pa.field(PAYLOAD, struct), payloads)
