"""The sources of exported records: a server's diff, or sealed segments.

Both yield `Chunk`s of one incarnation of a topic in order of seq, and report seqs that were lost
before they could be read. A server applies the current configuration. For segments the manifest
decides: rows below its floor are lost. Rows that only the TTL hides are held back, so that a later
run can check them again if the TTL was raised meanwhile. Called by `export`.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import quote, urlsplit

import msgspec

from spark_jobs.exporter.records import TABLE_COLUMNS, ExportRow, Rows
from spark_jobs.reader.query import ANY, SEQ_LIMIT, Names, Query

PAGE_ROWS: Final = 1000
PAGE_BYTES: Final = 8 * 2**20
# The message of an older server's diff for a topic that ends before the cursor.
_RECREATED: Final = "recreated"


class ExportError(RuntimeError):
    """The export cannot continue; the message is one line."""


class TopicGone(ExportError):
    """The topic was dropped during the read."""


@dataclass(slots=True)
class Chunk:
    """Rows up to `next_seq` (exclusive).

    `lost`: ranges that were lost before they were read, as texts. `held`: seqs that are held back.
    `anew`: a new incarnation with this epoch begins here (0: the server does not report epochs).
    """

    rows: Rows
    next_seq: int
    lost: list[str] = field(default_factory=list)
    held: tuple[int, int] | None = None
    anew: int | None = None


# -- a server ----------------------------------------------------------------------------------


class _Record(msgspec.Struct):
    seq: int = msgspec.field(name="$seq")
    ts: int = msgspec.field(name="$ts")
    data: msgspec.Raw
    node: str | None = msgspec.field(name="$node", default=None)
    tag: str | None = msgspec.field(name="$tag", default=None)
    encoding: str | None = msgspec.field(name="$encoding", default=None)
    content_type: str | None = msgspec.field(name="$content_type", default=None)
    meta: msgspec.Raw = msgspec.Raw()

    def row(self) -> ExportRow:
        data, meta = bytes(self.data), bytes(self.meta) or None
        if self.encoding is None:
            return ExportRow(self.seq, self.ts, self.node, self.tag, data, meta)
        data = msgspec.json.decode(data, type=str).encode()
        return ExportRow(
            self.seq, self.ts, self.node, self.tag, data, meta, self.content_type or ""
        )


class _Gap(msgspec.Struct):
    gap_from: int
    gap_to: int
    reason: str


class _Page(msgspec.Struct):
    records: list[_Record]
    next_from_seq: int
    caught_up: bool
    tombstone: _Gap | None = None
    epoch: int | None = None


_PAGE: Final = msgspec.json.Decoder(_Page)


class Server:
    """Reads topics of a running server, sealed or not, with `diff`."""

    def __init__(self, url: str, token: str | None, page_rows: int = PAGE_ROWS) -> None:
        self._page_rows = min(page_rows, PAGE_ROWS)
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ExportError(f"{url!r} is not the URL of a server")
        kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        self._connection = kind(parts.hostname, parts.port, timeout=60)
        self._base = parts.path.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._url = url

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _ask(self, method: str, path: str, body: object = None) -> bytes:
        encoded = None if body is None else json.dumps(body).encode()
        try:
            self._connection.request(method, self._base + path, encoded, self._headers)
            answer = self._connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise ExportError(f"{self._url} does not answer: {error}") from None
        if answer.status != 200:
            try:
                problem = json.loads(content)["error"]
                kind = TopicGone if problem["code"] == "topic_not_found" else ExportError
                raise kind(f"{problem['code']}: {problem['message']}")
            except (ValueError, KeyError, TypeError):
                raise ExportError(f"{self._url} answered {answer.status}") from None
        return content

    def topics(self, names: Names) -> dict[str, tuple[int | None, int]]:
        """The epoch (None for an older server) and head of each topic in `names`."""
        found: dict[str, tuple[int | None, int]] = {}
        cursor = ""
        for _ in range(1_000_000):
            page = json.loads(self._ask("GET", f"/v0/topics?page_size=1000{cursor}"))
            for topic in page["topics"]:
                if names.has(topic["topic"]):
                    found[topic["topic"]] = (topic.get("epoch"), int(topic["head_seq"]))
            if "next_cursor" not in page:
                break
            cursor = f"&cursor={quote(page['next_cursor'], safe='')}"
        return found

    def chunks(
        self, topic: str, epoch: int | None, next_seq: int, last_seq: int = SEQ_LIMIT
    ) -> Iterator[Chunk]:
        """Yield pages from a seq on until the head, or up to `last_seq`."""
        path, cursor = f"/v0/topics/{quote(topic, safe='')}/diff", next_seq - 1
        while cursor < last_seq:
            asked = {
                "from_seq": cursor,
                "limit": self._page_rows,
                "include_tags": True,
                "max_batch_bytes": PAGE_BYTES,
            }
            page = _PAGE.decode(self._ask("POST", path, asked))
            lost = page.tombstone
            is_other = page.epoch is not None and epoch is not None and page.epoch != epoch
            if is_other or (lost is not None and lost.reason == _RECREATED and cursor > 0):
                if last_seq != SEQ_LIMIT:
                    return  # of a previous incarnation
                epoch, cursor = page.epoch, 0
                yield Chunk([], 1, anew=page.epoch or 0)
                continue
            losses = [] if lost is None else [f"{lost.gap_from}..{lost.gap_to} ({lost.reason})"]
            rows = [record.row() for record in page.records if record.seq <= last_seq]
            yield Chunk(rows, min(page.next_from_seq, last_seq) + 1, losses)
            if page.caught_up:
                return
            if page.next_from_seq <= cursor:
                raise ExportError(f"a diff of {topic} does not move from {cursor}")
            cursor = page.next_from_seq


# -- segments ----------------------------------------------------------------------------------


class SegmentSource:
    """Reads the sealed records of topics in a data directory."""

    def __init__(self, data_dir: str, cold_dir: str | None, names: Names = ANY) -> None:
        from spark_jobs.reader.listing import Lister

        self._query = Query(columns=TABLE_COLUMNS, topics=(names,))
        # The listing ignores the TTL: `_judged` applies it row by row.
        self._lister = Lister(data_dir, self._query, cold_dir=cold_dir, now_ms=0)
        self._now_ms = int(time.time() * 1000)

    def topics(self, names: Names) -> dict[str, tuple[int | None, int]]:
        """The epoch and last sealed seq of each topic in `names`."""
        return {
            name: (topic.manifest.epoch, topic.manifest.segments[-1].last_seq)
            for name, topic in self._lister.topics.items()
            if names.has(name) and topic.manifest.segments
        }

    def chunks(
        self, topic: str, epoch: int | None, next_seq: int, last_seq: int = SEQ_LIMIT
    ) -> Iterator[Chunk]:
        """Yield batches of segments from a seq on, up to `last_seq`."""
        import pyarrow as pa

        from spark_jobs.reader.segments import read_segments

        query = self._query.narrow_seqs(next_seq, last_seq)
        listing = self._lister.list_topic(topic, query)
        if listing is None or (epoch is not None and listing.manifest.epoch != epoch):
            raise TopicGone(f"{topic} was dropped or made again while it was read")
        manifest = listing.manifest
        floor = min(manifest.evict_floor, last_seq + 1)
        losses = [f"{next_seq}..{floor - 1} (evicted)"] if next_seq < floor else []
        ttl_ms = int(manifest.config.get("ttl_ms") or 0)
        since = self._now_ms - ttl_ms if ttl_ms else None
        for segment in listing.segments:
            for batch in read_segments([segment], query):
                table, held = _judged(pa.Table.from_batches([batch]), since)
                last = int(batch["seq"][-1].as_py())
                yield Chunk(table, last + 1, losses, held)
                losses = []
            # Deleted rows may follow the last live row of the segment.
            yield Chunk([], min(segment.entry.last_seq, last_seq) + 1, losses)
            losses = []


def _judged(table: Any, since_ts: int | None) -> tuple[Any, tuple[int, int] | None]:
    """The rows that are not expired, and the span of the expired rows. Times never decrease."""
    if since_ts is None:
        return table, None
    import numpy as np

    times = table["ts"].cast("int64").to_numpy()
    count = int(np.searchsorted(times, since_ts * 1000))
    if not count:
        return table, None
    seqs = table["seq"]
    return table.slice(count), (int(seqs[0].as_py()), int(seqs[count - 1].as_py()))
