"""Payloads as typed columns: each record by itself, whatever its neighbours."""

from __future__ import annotations

import json
import random
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.json as pj
import pytest

from spark_jobs.reader.columns import schema_of
from spark_jobs.reader.listing import list_segments
from spark_jobs.reader.options import parse_options
from spark_jobs.reader.payload import PayloadMismatch, typed
from spark_jobs.reader.query import BadOption, Query
from spark_jobs.reader.segments import read_segments
from tests.contract.driver import Server
from tests.spark.conftest import HAS_SPARK, INSTALL
from tests.spark.reading.test_reader import LEFT, webhooks
from topics_server.values.blocks import make_block
from topics_server.wal.format.manifest import HOT, Manifest, SegmentEntry, encode_manifest
from topics_server.wal.format.segment import DEAD, decode_index
from topics_server.wal.segments.packing import pack

__all__ = ["webhooks"]

INNER: Final = pa.struct([pa.field("x", pa.float64()), pa.field("y z", pa.bool_())])
KIND: Final = pa.struct(
    [
        pa.field("a", pa.int64()),
        pa.field("b", pa.string()),
        pa.field("c", INNER),
        pa.field("d", pa.list_(pa.field("element", pa.int32()))),
    ]
)


def parsed(payloads: list[bytes | None], kind: Any = KIND) -> tuple[list[Any], list[int]]:
    """Rows, and the positions of those that do not fit."""
    is_json = np.ones(len(payloads), "?")
    made, unfit = typed(pa.array(payloads, pa.binary()), is_json, kind)
    assert made.type == kind
    made.validate(full=True)
    return made.to_pylist(), unfit.tolist()


def row(a: Any = None, b: Any = None, c: Any = None, d: Any = None) -> dict[str, Any]:
    """A struct with some fields."""
    return {"a": a, "b": b, "c": c, "d": d}


FITTING: Final[list[tuple[bytes, Any]]] = [
    (b'{"a":1,"b":"x"}', row(1, "x")),
    (b'{ "b" : "\\u00e9\\ud834\\udd1e\\n\\u0000" }', row(b="é𝄞\n\0")),
    (b'{"c":{"x":1,"y z":true,"z":{}},"d":[1,null]}', row(c={"x": 1.0, "y z": True}, d=[1, None])),
    (b'{"a":-9223372036854775808,"c":{"x":1e300}}', row(-(2**63), c={"x": 1e300, "y z": None})),
    (b"{}", row()),
    (b'{"a":null,"b":null,"c":null,"d":null}', row()),
    (b'\n{\n"a"\n:\n7\n}\n', row(7)),
    (b'{"z":[{"a":"no"},[[]]],"zz":"}{\\"","a":3}', row(3)),
    (b'{"d":"}"}'.replace(b'"}"', b"[]"), row(d=[])),
    (b"null", None),
    (b" null ", None),
]  # fmt: skip
UNFIT: Final = [
    *(b"1", b"-1.5", b'"text"', b"true", b"[]", b'[{"a":1}]', b" [1]"),
    *(b'{"a":1.0}', b'{"a":1e2}', b'{"a":"1"}', b'{"a":9223372036854775808}', b'{"a":true}'),
    *(b'{"a": 1.5 }', b'{"b":1}', b'{"b":{}}', b'{"c":[]}', b'{"c":{"x":"1"}}', b'{"c":{"y z":0}}'),
    *(b'{"d":{}}', b'{"d":[1.5]}', b'{"d":["1"]}', b'{"d":[2147483648]}', b'{"a":1,"a":2}'),
    b'{"b":"\\ud800"}',
]


def test_what_fits_is_typed() -> None:
    rows, unfit = parsed([payload for payload, _ in FITTING])
    assert rows == [value for _, value in FITTING]
    assert unfit == []


@pytest.mark.parametrize("payload", UNFIT)
def test_what_does_not_fit_is_null_and_moves_nothing(payload: bytes) -> None:
    before, after = b'{"a":1}', b'{"a":2}'
    rows, unfit = parsed([before, payload, None, after])
    assert rows == [row(1), None, None, row(2)]
    assert unfit == [1]


@pytest.mark.parametrize(
    "payload",
    [
        b'{"a":1}} {"d":{"a":99}',
        b'{"a":1}}\n{"d":null}\n{"d":{"a":99}',
        b'{"b":"',
        b'{"a":[',
        b'"}',
        b"",
        b"  \n",
        b'{"a":1}/*',
        b"{",
        b"}",
    ],
)
def test_bytes_that_no_server_would_have_taken_move_nothing(payload: bytes) -> None:
    """Payloads with more or less than one value: the reader notices the wrong number of rows, or
    refuses them.
    """
    two = b'{"a":1}} {"d":{"a":9}'
    for others in ([], [b'"}'], [b'"}', two], [b"]}", two], [b'{"b":"'], [b"", b""], [payload]):
        rows, unfit = parsed([b'{"a":1}', payload, *others, b'{"a":2}'])
        assert rows == [row(1), None, *(None for _ in others), row(2)]
        assert unfit == list(range(1, 2 + len(others)))


def alone(payload: bytes, kind: Any) -> Any:
    """Arrow's result for one payload, by the plainest call."""
    options = pj.ParseOptions(
        explicit_schema=pa.schema([("d", kind)]), unexpected_field_behavior="ignore"
    )
    try:
        line = pa.py_buffer(b'{"d":' + payload.replace(b"\n", b" ") + b"}")
        found = pj.read_json(pa.BufferReader(line), parse_options=options)
    except pa.ArrowInvalid:
        return None
    return found.column("d").to_pylist()[0] if len(found) == 1 else None


@pytest.mark.parametrize("seed", range(12))
def test_a_record_is_what_it_is_alone(seed: int) -> None:
    """Random neighbours, of which between none and most fail."""
    chance = random.Random(seed)
    scalars: list[Any] = [None, 0, -3, 2**31, 2**64, 1.5, 1e300, "", "x", "\n", True, [], {}]

    def value(depth: int) -> Any:
        if depth == 0 or chance.random() < 0.5:
            return chance.choice(scalars)
        if chance.random() < 0.3:
            return [value(depth - 1) for _ in range(chance.randrange(4))]
        names = ("a", "b", "c", "d", "x", "y z")
        return {chance.choice(names): value(depth - 1) for _ in range(chance.randrange(5))}

    good = [b'{"a":%d,"b":"%d"}' % (n, n) for n in range(50)]
    share = (0.0, 0.01, 0.1, 0.9)[seed % 4]
    payloads: list[bytes | None] = [
        json.dumps(value(3), indent=chance.choice([None, 1])).encode()
        if chance.random() < share
        else chance.choice(good)
        for _ in range(400)
    ]
    rows, unfit = parsed(payloads)
    expected = [alone(payload, KIND) for payload in payloads if payload is not None]
    assert rows == expected
    assert [
        n for n, made in enumerate(expected) if made is None and payloads[n] != b"null"
    ] == unfit


# -- through segments --------------------------------------------------------------------------


DATAS: Final = [b'{"a":1}', b'{"a":2}', b"\xff{", b'{"a":"3"}', b"null", b'{"a":5}', b'{"a":6}']


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A directory whose payloads are JSON, text and bytes, one of another type, one deleted."""
    count = len(DATAS)
    block = msgspec.structs.replace(
        make_block(10, array("q", range(count)), DATAS, None, [None] * count, ["n"] * count),
        kinds=bytes([0, 1, 2, 0, 0, 0, 0]),
    )
    data, idx = pack(1, 1, [block], bytes([0] * count))
    data = data[:-2] + bytes([DEAD]) + data[-1:]
    folder = tmp_path / "mixed" / "segments" / "1"
    folder.mkdir(parents=True)
    (tmp_path / "mixed" / "FORMAT").write_text("{}")
    (folder / "0000000001.data").write_bytes(data)
    (folder / "0000000001.idx").write_bytes(idx)
    checksum = decode_index(idx).data_checksum
    entry = SegmentEntry(1, HOT, 10, 9 + count, 0, count - 1, len(data), len(idx), checksum)
    manifest = Manifest(1, "t", 1, {}, 9 + count, 0, (), 2, (entry,))
    (folder / "manifest").write_bytes(encode_manifest(manifest))
    return tmp_path / "mixed"


def rows_of(data_dir: Path, **more: Any) -> list[dict[str, Any]]:
    """Seqs and parsed data."""
    kind = pa.struct([pa.field("a", pa.int64())])
    columns = (("seq", "bigint"), ("data", "struct"))
    asked = replace(Query(), columns=columns, payload_type=kind, **more)
    segments = list_segments(str(data_dir), asked).segments
    table = pa.Table.from_batches(read_segments(segments, asked), schema_of(columns, kind))
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def test_text_and_bytes_do_not_fit_and_deleted_ones_are_null(mixed: Path) -> None:
    found = [(row["seq"], row["data"]) for row in rows_of(mixed)]
    assert found == [(10, {"a": 1}), (11, None), (12, None), (13, None), (14, None), (16, {"a": 6})]
    found = [(row["seq"], row["data"]) for row in rows_of(mixed, with_deleted=True)]
    assert found[5:] == [(15, None), (16, {"a": 6})]


def test_failfast_says_which_record(mixed: Path) -> None:
    def refused(**more: Any) -> str:
        with pytest.raises(PayloadMismatch) as caught:
            rows_of(mixed, is_failfast=True, **more)
        return str(caught.value)

    assert refused() == "the payload of seq 11 of topic t does not fit: it is not JSON"
    assert refused(first_seq=13) == (
        "the payload of seq 13 of topic t does not fit: Column(/a) changed from number to string"
    )
    # Null, deleted and unrequested payloads do not end a read.
    assert len(rows_of(mixed, is_failfast=True, first_seq=14, with_deleted=True)) == 3


def test_options_that_cannot_be_are_refused() -> None:
    def refused(**options: str) -> str:
        with pytest.raises(BadOption) as caught:
            parse_options({"path": "/x", **options})
        return str(caught.value)

    assert "leave the option data out" in refused(payloadSchema="a int", data="string")
    assert "payloadMode is permissive or failfast" in refused(payloadMode="dropmalformed")
    assert "data is string or binary or variant" in refused(data="json")
    options = parse_options({"path": "/x", "payloadSchema": "a int", "columns": "seq,data,meta"})
    assert options.query.columns == (("seq", "bigint"), ("data", "struct"), ("meta", "string"))
    columns = parse_options({"path": "/x", "data": "variant"}).query.columns
    assert dict(columns)["data"] == "variant"
    assert dict(columns)["meta"] == "string"


# -- in Spark ----------------------------------------------------------------------------------

needs_spark: Final = pytest.mark.skipif(not HAS_SPARK, reason=f"PySpark: {INSTALL}")
SCHEMA: Final = "event string, payload struct<action string, number bigint, sender struct<id long>>"


def load(spark: Any, data_dir: Path, **options: str) -> Any:
    """A frame of a directory."""
    return spark.read.format("topics").options(**options).load(str(data_dir))


@needs_spark
def test_a_schema_of_ones_own_gives_what_spark_makes_of_it(spark: Any, webhooks: Server) -> None:
    """The same structs as Spark's own parser makes, from real events; no text crosses the
    socket.
    """
    from spark_jobs.datasource import payloads

    frame = load(spark, webhooks.data_dir, payloadSchema=SCHEMA)
    truth = payloads(load(spark, webhooks.data_dir), SCHEMA)
    assert frame.schema == truth.schema
    found = {row.seq: row.data for row in frame.collect()}
    assert found == {row.seq: row.data for row in truth.collect()}
    assert len(found) == len(LEFT)
    by_event = {row.seq: row.event for row in frame.select("seq", "data.event").collect()}
    assert by_event == {event.seq: event.tag for event in LEFT}
    by_schema = spark.read.format("topics").schema(f"seq long, data struct<{SCHEMA}>")
    assert {r.seq: r.data for r in by_schema.load(str(webhooks.data_dir)).collect()} == found


@needs_spark
def test_permissive_nulls_and_failfast_names(spark: Any, webhooks: Server) -> None:
    """In no event `number` is a string, so this schema fits only events without a number."""
    schema = "event string, payload struct<number: string>"
    numbered = {
        event.seq
        for event in LEFT
        if isinstance(json.loads(event.data)["payload"].get("number"), int)
    }
    assert 0 < len(numbered) < len(LEFT)
    rows = load(spark, webhooks.data_dir, payloadSchema=schema, columns="seq,data").collect()
    assert {row.seq for row in rows if row.data is None} == numbered
    assert {row.seq: row.data.event for row in rows if row.data is not None} == {
        event.seq: event.tag for event in LEFT if event.seq not in numbered
    }
    strict = load(spark, webhooks.data_dir, payloadSchema=schema, payloadMode="failfast")
    with pytest.raises(Exception, match=r"seq \d+ of topic webhooks does not fit: Column\(/pay"):
        strict.collect()


@needs_spark
@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ("a timestamp", "timestamp is not offered"),
        ("a map<string,int>", "is not offered"),
        ("a int not null", "NOT NULL"),
        ("a int, a string", "twice"),
        ("a nonsense", "(?i)nonsense"),
    ],
)
def test_a_schema_that_cannot_be_is_refused(
    spark: Any, webhooks: Server, schema: str, said: str
) -> None:
    with pytest.raises(Exception, match=said):
        load(spark, webhooks.data_dir, payloadSchema=schema).collect()


@needs_spark
def test_variant_by_an_option(spark: Any, webhooks: Server, mixed: Path) -> None:
    frame = load(spark, webhooks.data_dir, data="variant")
    assert dict(frame.dtypes)["data"] == "variant"
    rows = frame.selectExpr("seq", "to_json(data) as text", "meta").collect()
    assert {row.seq: json.loads(row.text) for row in rows} == {
        event.seq: json.loads(event.data) for event in LEFT
    }
    assert {row.meta.encode() for row in rows} == {event.meta for event in LEFT}
    rows = load(spark, mixed, data="variant").selectExpr("seq", "to_json(data) as text").collect()
    assert [(row.seq, row.text) for row in rows] == [
        *((10, '{"a":1}'), (11, None), (12, None), (13, '{"a":"3"}'), (14, "null"), (16, '{"a":6}'))
    ]
    with pytest.raises(Exception, match="seq 11 of topic t does not fit: it is not JSON"):
        load(spark, mixed, data="variant", payloadMode="failfast").collect()
