"""Copies of records: verbatim except for the page's changes, and the same again in replay."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from topics_server.values.appends import DecodedAppend, decode_append, of_columns
from topics_server.values.copies import CopyColumns, ReplayPayloads, copies_of, stamp_of, stamped
from topics_server.values.entries import RecordsAppended, RouterPage, RouterStamp
from topics_server.values.errors import StorageError
from topics_server.values.limits import SEQ_MAX
from topics_server.values.record_codecs import body_of

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=6,
)
_NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,12}", fullmatch=True)
_STAMPS = st.builds(
    RouterStamp,
    st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:>-]{0,12}", fullmatch=True),
    _NAMES,
    st.integers(1, 2**62),
)
_STAMP = RouterStamp("a->b", "a", 3)
# Names and values that look like the stamp, in every place.
_TRICKY = st.sampled_from(
    ["_topics_router", ',"_topics_router":{"source":"a"', '"}}', "a->b/a/3/7", "{", "}"]
)
_METAS = st.dictionaries(st.text() | _TRICKY, _JSON | _TRICKY, max_size=4)


def _spelled(meta: dict[str, Any] | None, indent: int | None) -> bytes:
    return b"" if meta is None else json.dumps(meta, indent=indent, ensure_ascii=False).encode()


@given(st.none() | _METAS, st.sampled_from([None, 0, 2]), _STAMPS, st.integers(1, SEQ_MAX))
def test_a_stamp_is_found_again_and_changes_nothing_else(
    meta: dict[str, Any] | None, indent: int | None, stamp: RouterStamp, seq: int
) -> None:
    made = stamped(_spelled(meta, indent), stamp, seq)
    assert stamp_of(made) == (stamp, seq)
    found = json.loads(made)
    key = f"{stamp.router}/{stamp.source}/{stamp.epoch}/{seq}"
    assert found.pop("_topics_router") == {
        "source": stamp.source,
        "epoch": stamp.epoch,
        "seq": seq,
        "key": key,
    }
    assert found == {k: v for k, v in (meta or {}).items() if k != "_topics_router"}


@given(st.none() | _METAS, _STAMPS, _STAMPS, st.integers(1, SEQ_MAX))
def test_a_trace_stays_in_front_of_a_stamp(
    meta: dict[str, Any] | None, one: RouterStamp, two: RouterStamp, seq: int
) -> None:
    trace = b"\t00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    plain = _spelled(meta, None)
    assert stamped(trace + plain, one, seq) == trace + stamped(plain, one, seq)
    again = stamped(stamped(trace + plain, one, seq), two, seq)
    assert again == trace + stamped(stamped(plain, one, seq), two, seq)
    assert stamp_of(again) == (two, seq)


@given(_STAMPS, _STAMPS, st.integers(1, 2**40), st.integers(1, 2**40))
def test_the_last_stamp_counts(one: RouterStamp, two: RouterStamp, a: int, b: int) -> None:
    made = stamped(stamped(b'{"m":1 }', one, a), two, b)
    assert stamp_of(made) == (two, b)
    assert made == stamped(b'{"m":1}', two, b)
    assert stamped(stamped(b"", one, a), two, b) == stamped(b"", two, b)


@given(_METAS)
def test_what_lies_deeper_or_in_text_is_no_stamp(meta: dict[str, Any]) -> None:
    meta.pop("_topics_router", None)
    inner = json.loads(stamped(b"", _STAMP, 7))
    for spelled in (
        json.dumps({**meta, "x": inner}, separators=(",", ":")),
        json.dumps({**meta, "x": json.dumps(inner, separators=(",", ":"))}, separators=(",", ":")),
        json.dumps({**meta, "x": [inner]}, separators=(",", ":")),
    ):
        assert stamp_of(spelled.encode()) is None


_RECORDS = st.lists(
    st.tuples(
        _JSON,
        st.none() | _METAS,
        st.none() | st.text(min_size=1, max_size=8),
        st.none() | st.text(min_size=1, max_size=8),
    ),
    min_size=1,
    max_size=8,
)


def _decoded(records: list[Any]) -> DecodedAppend:
    return of_columns(
        [_spelled_data(data) for data, *_ in records],
        [_spelled(meta, None) for _, meta, *_ in records],
        [tag for *_, tag, _ in records],
        [node for *_, node in records],
    )


def _spelled_data(data: Any) -> bytes:
    return json.dumps(data, ensure_ascii=False).encode()


def _columns_of(decoded: DecodedAppend) -> tuple[object, ...]:
    return (
        [bytes(data) for data in decoded.datas],
        [bytes(meta) for meta in decoded.metas],
        decoded.tags,
        decoded.nodes,
    )


@given(_RECORDS)
def test_a_body_decodes_to_what_it_was_made_of(records: list[Any]) -> None:
    decoded = _decoded(records)
    again = decode_append(body_of(decoded))
    assert _columns_of(again) == _columns_of(decoded)
    assert (again.payload_bytes, again.weight) == (decoded.payload_bytes, decoded.weight)
    assert again.idempotency_key is None


@given(
    appends=st.lists(_RECORDS, min_size=1, max_size=4),
    taken=st.data(),
    preserve=st.tuples(st.booleans(), st.booleans()),
    stamp=st.none() | st.just(_STAMP),
    bare=st.booleans(),
)
def test_replay_makes_the_copies_that_were_made(
    appends: list[Any],
    taken: st.DataObject,
    preserve: tuple[bool, bool],
    stamp: RouterStamp | None,
    bare: bool,
) -> None:
    """A page without payloads gives the same copies as a page with them, even through a further
    topic.
    """
    payloads = ReplayPayloads({1, 2})
    all_records: list[DecodedAppend] = []
    seq = 5
    for records in appends:
        decoded = _decoded(records)
        payloads.meet(RecordsAppended(1, seq, decoded.count, 0, body_of(decoded)))
        all_records.append(decoded)
        seq += decoded.count
    columns = _join(all_records)
    rows = taken.draw(
        st.lists(st.integers(0, len(columns[0]) - 1), min_size=1, unique=True).map(sorted)
    )
    seqs = [5 + row for row in rows]
    live = copies_of(
        CopyColumns(seqs, *[[column[row] for row in rows] for column in columns]),
        preserve_node=preserve[0],
        preserve_tag=preserve[1],
        stamp=stamp,
        hops=b"\x01" * len(rows),
    )
    page = RouterPage(1, 1, seq, seqs, seqs, *preserve, stamp)
    entry = RecordsAppended(2, 1, len(rows), 0, b"" if bare else body_of(live), page=page)
    found = payloads.meet(entry).decoded
    assert found is not None
    assert _columns_of(found) == _columns_of(live)
    assert found.hops == live.hops
    # The copies are available for the next router in a chain.
    further = RouterPage(2, 2, len(rows), [1], [len(rows)])
    last = payloads.meet(RecordsAppended(3, 1, len(rows), 0, b"", page=further)).decoded
    assert last is not None
    assert _columns_of(last) == _columns_of(live)


def _join(appends: list[DecodedAppend]) -> list[list[Any]]:
    return [
        [value for decoded in appends for value in getattr(decoded, name)]
        for name in ("datas", "metas", "tags", "nodes")
    ]


def test_a_slot_is_no_record_of_what_follows_it() -> None:
    payloads = ReplayPayloads({1, 2})
    decoded = _decoded([(1, None, None, None), (2, None, None, None)])
    payloads.meet(RecordsAppended(1, 1, 2, 0, body_of(decoded)))
    page = RouterPage(1, 1, 2, [1], [2], lost=9)
    payloads.meet(RecordsAppended(2, 10, 3, 0, b"", page=page))
    further = RouterPage(2, 2, 12, [11], [12])
    found = payloads.meet(RecordsAppended(3, 1, 2, 0, b"", page=further)).decoded
    assert found is not None
    assert [bytes(data) for data in found.datas] == [b"1", b"2"]
    of_the_slot = msgspec.structs.replace(further, firsts=[10], lasts=[10])
    with pytest.raises(StorageError, match="seq 10"):
        payloads.meet(RecordsAppended(3, 1, 1, 0, b"", page=of_the_slot))


def test_records_that_were_not_met_are_named() -> None:
    payloads = ReplayPayloads({1})
    page = RouterPage(1, 1, 2, [1], [2])
    with pytest.raises(StorageError, match="topic 1 seq 1"):
        payloads.meet(RecordsAppended(2, 1, 2, 0, b"", page=page))
