"""Decodes a router's copies, live, in replay and in an offline dump.

A copy has its source's `data`, unchanged. The page says whether it keeps `node` and `tag`. An
`exactly_once` router adds the source's position to `meta`, as its last member (§6):

    {"trace":"z9"}  ->  {"trace":"z9","_topics_router":{"source":"orders","epoch":1,"seq":12,
                         "key":"orders->audit/orders/1/12"}}

A copy of a record with a trace has the same trace, which comes before the rest of `meta`. In a copy
of a copy the new stamp replaces the old one, so `meta` does not grow from router to router and
never has one name twice. `ReplayPayloads` finds the records of pages that were journaled without
payloads. A leaf, pure.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Collection
from itertools import chain
from typing import Final

import msgspec

from topics_server.values.appends import DecodedAppend, of_columns
from topics_server.values.blocks import BYTES_MARK, split_trace
from topics_server.values.entries import RecordsAppended, RouterPage, RouterStamp
from topics_server.values.errors import StorageError
from topics_server.values.record_codecs import decode_body

# The match is exact: in valid JSON, `,"_` and `{"_` occur only where a member's name begins, and
# everything from there to the last brace is on the top level of `meta`.
_STAMPED: Final = re.compile(
    rb'[,{]"_topics_router":\{"source":"([A-Za-z0-9][A-Za-z0-9._:-]{0,254})","epoch":([0-9]{1,19}),'
    rb'"seq":([0-9]{1,19}),"key":"([A-Za-z0-9][A-Za-z0-9._:>-]{0,254})/\1/\2/\3"\}\}\Z'
)


class CopyColumns(msgspec.Struct, frozen=True, gc=False):
    """Records of a source: four parallel columns and their seqs."""

    seqs: list[int]
    datas: list[bytes]
    metas: list[bytes]
    tags: list[str | None]
    nodes: list[str | None]


def copies_of(
    columns: CopyColumns,
    *,
    preserve_node: bool,
    preserve_tag: bool,
    stamp: RouterStamp | None,
    hops: bytes,
) -> DecodedAppend:
    """The records for the destination. `hops`: how many routers each passed, one byte each."""
    count = len(columns.datas)
    metas = columns.metas
    if stamp is not None:
        metas = [stamped(meta, stamp, seq) for meta, seq in zip(metas, columns.seqs, strict=True)]
    return of_columns(
        columns.datas,
        metas,
        columns.tags if preserve_tag else [None] * count,
        columns.nodes if preserve_node else [None] * count,
        hops=hops,
    )


def stamped(meta: bytes, stamp: RouterStamp, seq: int) -> bytes:
    """The `meta` of a copy; `meta` is empty where the record has none."""
    source, epoch = stamp.source, stamp.epoch
    member = (
        f'"_topics_router":{{"source":"{source}","epoch":{epoch},"seq":{seq},'
        f'"key":"{stamp.router}/{source}/{epoch}/{seq}"}}'
    ).encode()
    trace, meta = split_trace(meta)
    old = _STAMPED.search(meta) if meta else None
    if old is not None:
        meta = meta[: old.start()] + b"}" if meta[old.start() : old.start() + 1] == b"," else b""
    if not meta:
        return trace + b"{" + member + b"}"
    assert meta.lstrip(BYTES_MARK)[:1] == b"{"
    assert meta[-1:] == b"}"
    inner = meta[:-1].rstrip()
    return trace + inner + (b"," if inner.strip() != b"{" else b"") + member + b"}"


def stamp_of(meta: bytes) -> tuple[RouterStamp, int] | None:
    """The router that made this copy, and the seq of the original; None without a stamp."""
    found = _STAMPED.search(meta) if meta else None
    if found is None:
        return None
    source, epoch, seq, router = found.groups()
    return RouterStamp(router.decode(), source.decode(), int(epoch)), int(seq)


class ReplayPayloads:
    """Records of the replay to which pages without payloads may refer, by topic and seq.

    `sources`: the topics that pages may refer to; the set may grow during replay. Every record of a
    source is kept, even if a snapshot already holds it or its topic is dropped later.
    """

    def __init__(self, sources: Collection[int]) -> None:
        self._sources = sources
        self._firsts: dict[int, list[int]] = {}
        self._appends: dict[int, list[DecodedAppend]] = {}

    def meet(self, entry: RecordsAppended) -> RecordsAppended:
        """The entry, with its records filled in if it is a page without payloads.

        Raises `StorageError` if the records of the page were not in the replay.
        """
        page = entry.page
        if page is not None:
            entry = msgspec.structs.replace(entry, decoded=self._decode(entry, page))
        if entry.topic_id in self._sources:
            if entry.decoded is None:
                decoded = decode_body(entry.body, entry.grammar, entry.trace)
                entry = msgspec.structs.replace(entry, decoded=decoded)
            assert entry.decoded is not None
            if entry.decoded.count:
                first_seq = entry.first_seq + entry.slot_count
                self._firsts.setdefault(entry.topic_id, []).append(first_seq)
                self._appends.setdefault(entry.topic_id, []).append(entry.decoded)
        return entry

    def _decode(self, entry: RecordsAppended, page: RouterPage) -> DecodedAppend:
        hops = page.hops or b"\x01" * page.copy_count
        if entry.body:
            decoded = entry.decoded or decode_body(entry.body, entry.grammar)
            return msgspec.structs.replace(decoded, hops=hops)
        return copies_of(
            self._columns(page),
            preserve_node=page.preserve_node,
            preserve_tag=page.preserve_tag,
            stamp=page.stamp,
            hops=hops,
        )

    def _columns(self, page: RouterPage) -> CopyColumns:
        firsts = self._firsts.get(page.source_id, [])
        appends = self._appends.get(page.source_id, [])
        datas: list[bytes] = []
        metas: list[bytes] = []
        tags: list[str | None] = []
        nodes: list[str | None] = []
        for first, last in zip(page.firsts, page.lasts, strict=True):
            seq = first
            while seq <= last:
                index = bisect_right(firsts, seq) - 1
                if index < 0 or seq >= firsts[index] + appends[index].count:
                    raise StorageError(
                        f"the journal has copies of topic {page.source_id} seq {seq}, and not "
                        "the record itself: a part of it is missing"
                    )
                append = appends[index]
                part = slice(seq - firsts[index], last + 1 - firsts[index])
                datas += append.datas[part]
                metas += append.metas[part]
                tags += append.tags[part]
                nodes += append.nodes[part]
                seq = firsts[index] + min(append.count, part.stop)
        runs = zip(page.firsts, page.lasts, strict=True)
        seqs = list(chain.from_iterable(range(first, last + 1) for first, last in runs))
        return CopyColumns(seqs, datas, metas, tags, nodes)
