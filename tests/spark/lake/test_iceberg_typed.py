"""`topics jobs to_iceberg --schema`: typed payloads beside the text, and how their type evolves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.schema import Schema
from pyiceberg.types import DateType, IntegerType, NestedField, StringType, StructType

from spark_jobs.reader.query import BadOption
from spark_jobs.to_iceberg.__main__ import main
from spark_jobs.to_iceberg.catalogs import LakeRefused, sqlite_catalog
from spark_jobs.to_iceberg.payloads import (
    as_struct,
    check_evolution,
    column_of,
    parse_schema,
    struct_of,
)
from spark_jobs.to_iceberg.sealed import LakePosition
from spark_jobs.to_iceberg.tables import LakeRaced, TopicTable, arrow_schema
from tests.contract.driver import ROOT, Server, good
from tests.spark.lake.engines import by_duckdb, by_pyiceberg, job, load
from tests.spark.logs import Row, digests, read_rows, seal_all

pytestmark = pytest.mark.timeout(300)

ORDER = (
    "id bigint, price double, paid boolean, note string, "
    "by struct<name: string, `y z`: int>, tags array<string>, grid array<array<int>>"
)


def order(number: int) -> dict[str, Any]:
    """A payload with all fields of `ORDER`; some are null, and structs and arrays are absent."""
    return {
        "id": number * 2**33,
        "price": None if number % 5 == 0 else number / 4,
        "paid": (True, False, None)[number % 3],
        "note": (f"ä𝄞 {number}\n", "", None)[number % 3],
        "by": None if number % 4 == 0 else {"name": f"n{number}", "y z": number},
        "tags": (None, [], ["a", None, ""])[number % 3],
        "grid": (None, [[1], [], None], [])[number % 3],
    }


def hash_of(values: list[Any]) -> str:
    """A hash of JSON values in their order, whatever the order of their fields."""
    return sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def payloads(rows: list[Row]) -> list[Any]:
    """The typed payloads, in order of seq."""
    return [row["payload"] for row in sorted(rows, key=lambda row: int(row["seq"]))]


def of(out: Path) -> list[Any]:
    """The typed payloads of the topic `a`."""
    return payloads(by_pyiceberg(load(out, "a")))


# -- rows ----------------------------------------------------------------------------------------


def test_typed_rows_equal_the_json_of_a_diff(server: Server, tmp_path: Path) -> None:
    """The rows are compared by hash, over commits of few rows; other fields of a payload are only
    in the text.
    """
    api, out = server.start(), tmp_path / "out"
    for start in range(0, 60, 20):
        api.add("a", *({"other": [{}], **order(start + number)} for number in range(20)))
        seal_all(api)
    wanted = read_rows(api, "a")
    done = job(server.data_dir, out, "--schema", ORDER, "--rows-per-commit", 16)
    assert done["a"]["commits"] > 2
    truth = [json.loads(row["data"]) for row in wanted]
    for each in truth:
        assert each.pop("other") == [{}]
    for rows in (by_pyiceberg(load(out, "a")), by_duckdb(load(out, "a"))):
        assert digests(rows) == digests(wanted)
        assert hash_of(payloads(rows)) == hash_of(truth)
    location = load(out, "a").metadata_location
    job(server.data_dir, out, "--schema", ORDER)
    job(server.data_dir, out, "--schema", ORDER, "--rebuild", "all")
    assert load(out, "a").metadata_location == location, "nothing was written"


def test_what_does_not_fit_is_null_and_readable(server: Server, tmp_path: Path) -> None:
    """Bytes that look like JSON are not JSON, so a topic that has only bytes is all null. A field
    that occurs twice has no value.
    """
    api, out = server.start(), tmp_path / "out"
    api.add("a", {"id": 1}, {"id": "1"}, {"id": 2.5}, {"id": 2**63}, [1], "text", 7, None, {})
    twice = b'{"records": [{"data": {"id": 1, "id": 2}}]}'
    good(api.http.post("/v0/topics/a", content=twice, headers={"content-type": "application/json"}))
    for kind in ("text/plain", "application/octet-stream"):
        header = {"content-type": kind}
        for number in range(2):
            name, method = f"/v1/stream/{kind[:4]}", ("PUT", "POST")[number]
            answer = api.http.request(method, name, headers=header, content=b'{"id": 3}')
            assert answer.status_code < 300, answer.text
    seal_all(api)
    done = job(server.data_dir, out, "--schema", "id bigint")
    assert of(out) == [{"id": 1}, *[None] * 7, {"id": None}, None]
    rows = by_duckdb(load(out, "a"))
    assert payloads(rows) == of(out)
    assert digests(rows) == digests(read_rows(api, "a"))
    for name in ("text", "appl"):
        rows = by_duckdb(load(out, done[name]["table"].removeprefix("topics.")))
        assert rows
        assert payloads(rows) == [None] * len(rows)
        assert all(row["data"] for row in rows)


# -- evolution -----------------------------------------------------------------------------------


def test_a_table_follows_its_schemas(
    server: Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    api, out = server.start(), tmp_path / "out"

    def run(datum: Any, *words: object) -> Any:
        api.add("a", datum)
        seal_all(api)
        return job(server.data_dir, out, *words)["a"]

    datum = {"n": 1, "f": 0.5, "in": {"x": "y"}, "l": [1]}
    run(datum)
    assert "payload" not in by_duckdb(load(out, "a"))[0]
    run(datum, "--schema", "n int, f float, l array<int>")
    assert of(out) == [None, {"n": 1, "f": 0.5, "l": [1]}]
    # new fields, also in a struct; wider types; the order of the fields does not count
    big = {"n": 2**40, "f": 0.1, "in": {"x": "y", "z": True}, "l": [2**40]}
    run(big, "--schema", "in struct<z: boolean>, l array<bigint>, n bigint")
    run(big, "--schema", "f double, in struct<x: string>")
    # a run without a schema uses the table's own fields
    assert run({"n": 2**41})["records"] == 1
    other, none = {"z": True, "x": None}, {"z": None, "x": None}
    expected = [
        None,
        {"n": 1, "f": 0.5, "l": [1], "in": None},
        {"n": 2**40, "f": None, "l": [2**40], "in": other},
        {"n": None, "f": 0.1, "l": None, "in": none | {"x": "y"}},
        {"n": 2**41, "f": None, "l": None, "in": None},
    ]
    for rows in (by_pyiceberg(load(out, "a")), by_duckdb(load(out, "a"))):
        assert payloads(rows) == expected
        assert digests(rows) == digests(read_rows(api, "a"))

    # refused: nothing moves
    api.add("a", {"n": 1})
    seal_all(api)
    location = load(out, "a").metadata_location
    for schema, said in (
        ("n int", "topics.a: field payload.n is bigint in the table, and the schema asks for int"),
        ("new int, n string", "field payload.n is bigint in the table, and the schema asks for st"),
        ("in struct<x: int>", "field payload.in.x is string in the table, and the schema asks for"),
        ("in string", "field payload.in is a struct in the table, and the schema asks for string"),
        ("l array<double>", "field payload.l.element is bigint in the table, and the schema asks"),
        ("in struct<Z: boolean>", "payload.in.Z differs from one of the table only in its case"),
        ("n timestamp", "timestamp is not offered"),
    ):
        assert main([str(server.data_dir), "--out", str(out), "--schema", schema]) == 2
        assert said in capfd.readouterr().err
    assert load(out, "a").metadata_location == location

    # A rebuild fills the earlier rows; the next rebuild finds nothing to do.
    done = job(server.data_dir, out, "--rebuild", "all")["a"]
    assert (done["records"], done["removed"], done["rebuilt"] > 0) == (1, 0, True)
    assert of(out) == [
        *[{"n": 1, "f": 0.5, "l": [1], "in": none | {"x": "y"}}] * 2,
        *[{"n": 2**40, "f": 0.1, "l": [2**40], "in": {"x": "y", "z": True}}] * 2,
        expected[-1],
        {"n": 1, "f": None, "l": None, "in": None},
    ]
    location = load(out, "a").metadata_location
    assert job(server.data_dir, out, "--rebuild", "all")["a"]["rebuilt"] == 0
    assert load(out, "a").metadata_location == location
    good(api.delete("a", before_seq=3))
    seal_all(api)
    done = job(server.data_dir, out, "--rebuild", "all", "--schema", "n bigint")["a"]
    assert done["removed"] == 2
    assert [row["n"] for row in of(out)] == [2**40, 2**40, 2**41, 1]
    assert {row["f"] for row in of(out)} == {None}, "a day is written by the schema of its run"
    assert digests(by_pyiceberg(load(out, "a"))) == digests(read_rows(api, "a"))


KILLED = """
import os, signal, sys
from spark_jobs.to_iceberg.__main__ import main
from spark_jobs.to_iceberg.tables import TopicTable

TopicTable.append = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
sys.exit(main(sys.argv[1:]))
"""


def test_a_kill_between_the_schema_and_the_rows_is_harmless(server: Server, tmp_path: Path) -> None:
    api, out = server.start(), tmp_path / "out"
    api.add("a", *({"n": number} for number in range(3)))
    seal_all(api)
    job(server.data_dir, out)
    api.add("a", *({"n": number} for number in range(3, 6)))
    seal_all(api)
    words = [str(server.data_dir), "--out", str(out), "--schema", "n int"]
    before = load(out, "a")
    done = subprocess.run(
        [sys.executable, "-c", KILLED, *words],
        cwd=ROOT,
        env=dict(os.environ),
        capture_output=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    after = load(out, "a")
    assert after.current_snapshot() == before.current_snapshot()
    assert [field.name for field in after.schema().fields][-1] == "payload"
    assert of(out) == [None] * 3
    assert job(server.data_dir, out, *words[3:])["a"]["records"] == 3
    assert of(out) == [None] * 3 + [{"n": number} for number in range(3, 6)]
    assert digests(by_pyiceberg(load(out, "a"))) == digests(read_rows(api, "a"))


def test_of_two_writers_that_change_the_schema_one_is_told(tmp_path: Path) -> None:
    catalog = sqlite_catalog(tmp_path)
    try:
        catalog.create_namespace("topics")
        one, two = (TopicTable(catalog, "topics", "a", None) for _ in range(2))
        one.widen(parse_schema("a int"))
        with pytest.raises(LakeRaced, match="another writer"):
            two.widen(parse_schema("a string"))
        two = TopicTable(catalog, "topics", "a", None)
        with pytest.raises(LakeRefused, match=r"payload\.a is int .* asks for string"):
            two.widen(parse_schema("a string"))
        with two.table.update_schema() as change:
            change.delete_column("payload")
        late = TopicTable(catalog, "topics", "a", None)
        assert late.struct() is None
        row = {"topic": "a", "epoch": 1, "seq": 1, "ts": 0, "data": "{}"}
        typed = arrow_schema().append(pa.field("payload", parse_schema("a int")))
        rows = pa.Table.from_pylist([{**row, "payload": {"a": 1}}], schema=typed)
        with pytest.raises(LakeRaced, match="its column payload went"):
            late.append(rows, LakePosition(0, 1), LakePosition(1, 2))
        assert late.position() == LakePosition(0, 1)
    finally:
        catalog.close()


# -- the notation --------------------------------------------------------------------------------


def test_the_notation_is_that_of_spark() -> None:
    kind = parse_schema(
        "a INT, b: long,`c``d e` struct<x:double ,y: Array<array<STRING>>>, _1 boolean, é float,"
        "s short, t tinyint"
    )
    item = pa.list_(pa.field("element", pa.list_(pa.field("element", pa.string()))))
    inner = pa.struct([pa.field("x", pa.float64()), pa.field("y", item)])
    assert kind == pa.struct(
        [
            pa.field("a", pa.int32()),
            pa.field("b", pa.int64()),
            pa.field("c`d e", inner),
            pa.field("_1", pa.bool_()),
            pa.field("é", pa.float32()),
            pa.field("s", pa.int32()),
            pa.field("t", pa.int32()),
        ]
    )
    assert struct_of(column_of("payload", kind), "payload") == kind
    assert struct_of(column_of("payload", kind), "other") is None
    deep = "struct<a:" * 31 + "int" + ">" * 31
    assert pa.types.is_struct(parse_schema(f"a {deep}"))


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ("", "a field is missing before the end"),
        ("a", "a type is missing before the end"),
        ("a int,", "a field is missing before the end"),
        ("a int b int", "a comma is missing before 'b'"),
        ("a int)", r"a comma is missing before '\)'"),
        ("`` int", "a field is missing before '`'"),
        ("a struct<>", "a field is missing before '>'"),
        ("a struct<b: int", "> is missing before the end"),
        ("a array int", "< is missing before 'int'"),
        ("a decimal(10, 2)", "decimal is not offered; there are string, bigint"),
        ("a map<string, int>", "map is not offered"),
        ("a array<array<struct<b: int>>>", "an array of structs is not offered"),
        ("a int NOT NULL", "NOT NULL"),
        ("a int, A string", r"named twice \(case does not count, .*: 'A'"),
        ("`y z` int, y_x20z int", r"named twice .*: 'y_x20z'"),
        ("`1x` int, a struct<`Ä b`: int, `ä_x20B`: int>", r"named twice .*: 'ä_x20B'"),
        ("`a.b` int", "no dot in its name: 'a.b'"),
        ("a " + "struct<a:" * 32 + "int" + ">" * 32, "at most 32 deep"),
        ("a " + "array<" * 5_000, "at most 32 deep"),
    ],
)
def test_a_schema_that_cannot_be_is_refused(schema: str, said: str) -> None:
    with pytest.raises(BadOption, match=said):
        parse_schema(schema)


def test_structs_become_structs_of_other_fields() -> None:
    """That also holds for slices whose offset is not 0; absent structs stay absent."""
    rows = [{"a": 1, "s": {"x": "a"}}, None, {"a": None, "s": None}, {"a": 3, "s": {"x": None}}]
    array = pa.array(rows, parse_schema("a int, s struct<x: string>"))
    kind = parse_schema("s struct<y: array<int>, x: string>, b boolean, a bigint")
    wanted = [
        {"s": {"y": None, "x": "a"}, "b": None, "a": 1},
        None,
        {"s": None, "b": None, "a": None},
        {"s": {"y": None, "x": None}, "b": None, "a": 3},
    ]
    for start in range(5):
        made = as_struct(array.slice(start), kind)
        made.validate(full=True)
        assert (made.type, made.to_pylist()) == (kind, wanted[start:])
    narrow = as_struct(array.slice(1), parse_schema("s struct<x: string>"))
    assert narrow.to_pylist() == [None, {"s": None}, {"s": {"x": None}}]


def test_fields_of_other_writers_are_left_alone() -> None:
    """A field of a type that no schema can have is not read from payloads; another writer's column
    `payload` may be no struct.
    """
    day = StructType(NestedField(3, "day", DateType()), NestedField(4, "n", IntegerType()))
    table = Schema(NestedField(1, "payload", day), NestedField(2, "other", StringType()))
    assert struct_of(table, "payload") == parse_schema("n int")
    assert struct_of(table, "other") is None
    check_evolution(table, column_of("payload", parse_schema("n bigint, m int")), "t")
    for name, schema, said in (
        ("payload", "day string", "t: field payload.day is date in the table"),
        ("other", "a int", "t: field other is string in the table, and the schema asks for a st"),
        ("Other", "a int", "field Other differs"),
    ):
        with pytest.raises(LakeRefused, match=said):
            check_evolution(table, column_of(name, parse_schema(schema)), "t")
