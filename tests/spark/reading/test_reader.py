"""The reader without Spark: rows, columns, snapshots, ranges, on directories of a real server."""

from __future__ import annotations

import base64
import subprocess
import sys
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa
import pytest

from spark_jobs.reader.columns import schema_of
from spark_jobs.reader.listing import Listing, list_segments
from spark_jobs.reader.options import parse_options
from spark_jobs.reader.places.segment import SegmentGone
from spark_jobs.reader.query import BadOption, Query
from spark_jobs.reader.report import ReadReport
from spark_jobs.reader.segments import read_segments
from tests.contract.driver import ROOT, Server, eventually, good
from tests.crash.kills.test_webhooks import EVENT_LIST, TOPIC, load
from tests.spark.logs import seal_all
from topics_server.values.blocks import Block, make_block
from topics_server.wal.format.manifest import HOT, Manifest, SegmentEntry, encode_manifest
from topics_server.wal.format.segment import decode_index
from topics_server.wal.segments.packing import pack

AS_IS: Final = tuple((name, "bigint" if name == "ts" else kind) for name, kind in Query().columns)


def query(**options: str) -> Query:
    """A query from options, times as numbers."""
    parsed = parse_options({"path": "/nowhere", **options}).query
    return replace(
        parsed,
        columns=tuple((n, "bigint" if n == "ts" else kind) for n, kind in parsed.columns),
    )


def read(
    data_dir: Path, asked: Query | None = None, report: ReadReport | None = None, **more: Any
) -> list[dict[str, Any]]:
    """All rows of a directory."""
    wanted = asked or replace(Query(), columns=AS_IS)
    listing = list_segments(str(data_dir), wanted, **more)
    return rows_of(listing, wanted, report)


def rows_of(
    listing: Listing, asked: Query, report: ReadReport | None = None
) -> list[dict[str, Any]]:
    """The rows of a listing."""
    batches = list(read_segments(listing.segments, asked, report))
    rows: list[dict[str, Any]] = pa.Table.from_batches(
        batches, schema=schema_of(asked.columns)
    ).to_pylist()
    return rows


@pytest.fixture(scope="module")
def webhooks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """All events in 17 segments of at most 20; the events `issues` are deleted."""
    server = Server(tmp_path_factory.mktemp("webhooks"), {"TOPICS_SEGMENT_MAX_EVENTS": "20"})
    api = server.start()
    load(server)
    good(api.delete(TOPIC, match="issues"))
    seal_all(api)
    yield server
    if server.process is not None:
        server.stop()


LEFT: Final = [event for event in EVENT_LIST if event.tag != "issues"]


def test_rows_are_the_events_byte_by_byte(webhooks: Server) -> None:
    rows = read(webhooks.data_dir)
    assert [(r["seq"], r["tag"], r["data"].encode(), r["meta"].encode()) for r in rows] == [
        (event.seq, event.tag, event.data, event.meta) for event in LEFT
    ]
    assert {(r["topic"], r["epoch"], r["node"]) for r in rows} == {(TOPIC, 1, None)}


def test_columns_that_need_no_payload_read_the_index_only(webhooks: Server) -> None:
    asked, report = query(columns="tag,seq"), ReadReport()
    rows = read(webhooks.data_dir, asked, report)
    assert [(r["tag"], r["seq"]) for r in rows] == [(e.tag, e.seq) for e in LEFT]
    assert list(rows[0]) == ["tag", "seq"]
    assert {Path(name).suffix for name in report.names} == {".idx"}
    assert report.bytes == sum(f.stat().st_size for f in webhooks.data_dir.rglob("*.idx"))


def test_a_tag_reads_the_records_that_have_it(webhooks: Server) -> None:
    full, report = ReadReport(), ReadReport()
    read(webhooks.data_dir, None, full)
    rows = read(webhooks.data_dir, query(tags="push,star"), report)
    wanted = [event for event in LEFT if event.tag in ("push", "star")]
    assert [(r["seq"], r["data"].encode()) for r in rows] == [(e.seq, e.data) for e in wanted]
    # Events of one name are neighbours: two of all 17 segments hold them.
    opened = {Path(name).name for name in report.names if name.endswith(".data")}
    assert opened == {f"{(event.seq - 1) // 20 + 1:010d}.data" for event in wanted}, (
        "records are read where the tag is, nowhere else"
    )
    assert report.bytes < full.bytes / 4


def test_a_prefix_of_tags(webhooks: Server) -> None:
    rows = read(webhooks.data_dir, query(tags="pull_*"))
    assert [r["seq"] for r in rows] == [e.seq for e in LEFT if e.tag.startswith("pull_")]


def test_ranges_of_seqs_and_times_leave_files_alone(webhooks: Server) -> None:
    report = ReadReport()
    rows = read(webhooks.data_dir, query(fromSeq="55", toSeq="83"), report)
    assert [r["seq"] for r in rows] == [e.seq for e in LEFT if 55 <= e.seq <= 83]
    assert report.segments == 3
    times = sorted({row["ts"] for row in read(webhooks.data_dir)})
    start, end = times[len(times) // 3], times[-1]
    rows = read(webhooks.data_dir, query(fromTs=str(start), toTs=str(end)))
    expected = [r["seq"] for r in read(webhooks.data_dir) if start <= r["ts"] < end]
    assert [r["seq"] for r in rows] == expected
    assert read(webhooks.data_dir, query(fromTs=str(end + 1))) == []


def test_deleted_rows_are_shown_without_their_payload(webhooks: Server) -> None:
    rows = read(webhooks.data_dir, query(deleted="true"))
    assert [r["seq"] for r in rows] == [e.seq for e in EVENT_LIST]
    dead = [r for r in rows if r["deleted"]]
    assert [r["seq"] for r in dead] == [e.seq for e in EVENT_LIST if e.tag == "issues"]
    assert {(r["data"], r["meta"]) for r in dead} == {(None, None)}


def test_binary_payloads_and_the_other_columns(webhooks: Server) -> None:
    asked = query(data="binary", columns="seq,data,meta,kind,hop,bytes")
    for row, event in zip(read(webhooks.data_dir, asked), LEFT, strict=True):
        assert (row["data"], row["meta"]) == (event.data, event.meta)
        assert (row["kind"], row["hop"]) == ("json", 0)
        assert row["bytes"] == len(event.data) + len(event.meta) + len(event.tag) + 24


def test_topics_by_name_prefix_and_glob(server: Server) -> None:
    api = server.start()
    for name in ("a.x", "a.y", "b.x"):
        api.add(name, name)
    seal_all(api)

    def found(topics: str) -> set[str]:
        return {row["topic"] for row in read(server.data_dir, query(topics=topics))}

    assert found("a.x,b.x") == {"a.x", "b.x"}
    assert found("a.*") == {"a.x", "a.y"}
    assert found("?.x") == {"a.x", "b.x"}
    assert found("c") == set()
    assert found("*") == {"a.x", "a.y", "b.x"}


def test_nodes_and_tags_by_name_and_prefix(server: Server) -> None:
    """Names in both lists are selected; neither list selects a record without a name."""
    api = server.start()
    for n, (node, tag) in enumerate([("n1", "a"), ("n2", "ab"), ("m", ""), (None, None)]):
        named = {"node": node, "tag": tag} if node is not None else {}
        api.add("t", n, **named)
    seal_all(api)

    def found(**options: str) -> list[int]:
        return [row["seq"] for row in read(server.data_dir, query(**options))]

    assert found(nodes="n1") == [1]
    assert found(nodes="n*,m") == [1, 2, 3]
    assert found(nodes="x") == []
    assert found(tags="a*") == [1, 2]
    assert found(tags="a") == [1]
    assert found(tags="a*", nodes="n2,m") == [2]
    assert found() == [1, 2, 3, 4]


def test_a_listing_is_a_snapshot(server: Server) -> None:
    """Deletes, seals and moves after the listing do not change its reads."""
    cold = server.directory / "cold"
    server.env = {**server.env, "TOPICS_COLD_DIR": str(cold), "TOPICS_HOT_RETAIN_SEGMENTS": "1"}
    api = server.start()
    for n in range(5):
        api.add("a", *range(10 * n, 10 * n + 10), tag=f"t{n}")
        good(api.http.post("/v0/admin/seal", json={"topics": ["a"]}))
    asked = replace(Query(), columns=AS_IS)
    listing = list_segments(str(server.data_dir), asked, cold_dir=str(cold))
    before = rows_of(listing, asked)
    assert len(before) == 50
    good(api.delete("a", match="t4"))
    api.add("a", 99)
    seal_all(api)
    eventually(lambda: len(list(cold.rglob("*.data"))) >= 3, "segments move")
    # The flags of t4's records are set and its segment may soon be dropped, so the test reads
    # before that.
    kept = [row for row in before if row["tag"] != "t4"]
    first_four = listing.segments[:4]
    rows = pa.Table.from_batches(read_segments(first_four, asked)).to_pylist()
    assert rows == kept
    now = read(server.data_dir, cold_dir=str(cold))
    assert [r["data"] for r in now] == [str(n) for n in (*range(40), 99)]
    # If the segment was dropped since the listing, the read raises an error and never returns fewer
    # rows.
    eventually(
        lambda: not list(server.data_dir.rglob("0000000005.data")), "the dead segment is dropped"
    )
    with pytest.raises(SegmentGone, match=r"seqs 41\.\.50 of a .*dropped since the listing"):
        rows_of(listing, asked)
    with pytest.raises(SegmentGone, match=r"in the cold folder: name it with the option coldDir"):
        read(server.data_dir)
    tiers = [read(server.data_dir, query(tier=t), cold_dir=str(cold)) for t in ("hot", "cold")]
    assert all(tiers)
    assert sorted(r["seq"] for part in tiers for r in part) == [r["seq"] for r in now]


def test_flags_can_be_those_of_the_read(server: Server) -> None:
    api = server.start()
    api.add("a", 1, 2, tag="x")
    api.add("a", 3)
    seal_all(api)
    listed, live = query(flags="listing"), query(flags="read")
    first = list_segments(str(server.data_dir), listed)
    second = list_segments(str(server.data_dir), live)
    good(api.delete("a", match="x"))
    seal_all(api)
    assert [r["seq"] for r in rows_of(first, listed)] == [1, 2, 3]
    assert [r["seq"] for r in rows_of(second, live)] == [3]


def test_expired_and_evicted_rows_are_not_shown(server: Server) -> None:
    api = server.start()
    api.add("a", 1)
    good(api.put("a", {"ttl_ms": 60_000}))
    api.add("a", 2)
    seal_all(api)
    first, second = (row["ts"] for row in read(server.data_dir))
    late = second + 60_000
    assert [r["data"] for r in read(server.data_dir, now_ms=late)] == (
        ["2"] if first < second else ["1", "2"]
    )
    assert read(server.data_dir, now_ms=late + 1) == []


def test_what_is_not_sealed_is_counted(server: Server) -> None:
    api = server.start()
    api.add("a", *range(5))
    seal_all(api)
    assert list_segments(str(server.data_dir), Query()).unsealed == 0
    api.add("a", *range(3))
    # The manifest is as of its last change; no call requested a newer one.
    assert list_segments(str(server.data_dir), Query()).unsealed == 0
    assert len(read(server.data_dir)) == 5


def written(target: Path, block: Block, dead: bytes) -> None:
    """A directory with this block as its only segment."""
    data, idx = pack(1, 1, [block], dead)
    columns = decode_index(idx)
    folder = target / "segments" / "1"
    folder.mkdir(parents=True)
    (target / "FORMAT").write_text("{}")
    (folder / "0000000001.data").write_bytes(data)
    (folder / "0000000001.idx").write_bytes(idx)
    times = block.times[0], block.times[-1]
    seqs = block.first_seq, block.last_seq
    entry = SegmentEntry(1, HOT, *seqs, *times, len(data), len(idx), columns.data_checksum)
    manifest = Manifest(1, "t", 1, {}, block.last_seq, 0, (), 2, (entry,))
    (folder / "manifest").write_bytes(encode_manifest(manifest))


def test_a_trace_is_not_in_meta(tmp_path: Path) -> None:
    trace = b"\t00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    rests = [b"", b'{"m":1}', b' {"$content_type":"image/png"}', b'{"m":2}', b""]
    metas = [trace + rests[0], trace + rests[1], trace + rests[2], rests[3], trace]
    datas = [b"1", b'{"a":2}', b"\xff", b"4", b"5"]
    block = make_block(5, array("q", range(5)), datas, metas, [None] * 5, [None] * 5)
    written(tmp_path, block, bytes([0, 0, 0, 0, 1]))
    rows = read(tmp_path, query(columns="seq,data,meta,kind,deleted", deleted="true"))
    assert [(r["seq"], r["data"], r["meta"], r["kind"], r["deleted"]) for r in rows] == [
        (5, "1", None, "json", False),
        (6, '{"a":2}', '{"m":1}', "json", False),
        (7, "/w==", ' {"$content_type":"image/png"}', "bytes", False),
        (8, "4", '{"m":2}', "json", False),
        (9, None, None, "json", True),
    ]
    few = read(tmp_path, query(columns="seq,meta", fromSeq="6", toSeq="7"))
    assert [r["meta"] for r in few] == ['{"m":1}', ' {"$content_type":"image/png"}']


def test_bytes_are_base64_in_text_and_themselves_in_binary(tmp_path: Path) -> None:
    """Kind 2: data are raw bytes, also empty ones and bytes that are not UTF-8."""
    datas = [b'{"a":1}', b"\xff\x00raw", b"", b"plain text"]
    block = msgspec.structs.replace(
        make_block(5, array("q", [1, 2, 3, 4]), datas, None, [None] * 4, ["n"] * 4),
        kinds=bytes([0, 2, 2, 1]),
    )
    written(tmp_path, block, bytes(4))
    texts = read(tmp_path, query(columns="data,kind"))
    assert [(r["data"], r["kind"]) for r in texts] == [
        ('{"a":1}', "json"),
        (base64.b64encode(datas[1]).decode(), "bytes"),
        ("", "bytes"),
        ("plain text", "text"),
    ]
    assert [r["data"] for r in read(tmp_path, query(data="binary", columns="data"))] == datas


def test_a_directory_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="no such data directory"):
        read(tmp_path / "nothing")
    (tmp_path / "segments").mkdir()
    with pytest.raises(Exception, match="it has no FORMAT"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tag": "x"}, "there is no option 'tag'"),
        ({"fromSeq": "-1"}, "fromSeq is a number"),
        ({"fromTs": "yesterday"}, "fromTs is ms since the epoch"),
        ({"tier": "warm"}, "tier is both or hot or cold"),
        ({"checks": "none"}, "checks is strict or tolerant"),
        ({"data": "struct"}, "for a schema of your own there is payloadSchema"),
        ({"columns": "seq,body"}, "there is no column 'body'"),
        ({"columns": "seq,seq"}, "a column is named twice"),
        ({"deleted": "yes"}, "deleted is true or false"),
        ({"partitionBytes": "many"}, "partitionBytes must be a size"),
        ({"partitionBytes": "1"}, "partitionBytes is at least 16384"),
        ({"tags": "a*b"}, "one * at its end"),
        ({"path": ""}, "the data directory is missing"),
        ({"path": "hdfs://bucket/x"}, "another scheme than file, s3, gs and az"),
        ({"path": "s3://key:secret@bucket/x"}, "a user, a query or a fragment"),
        ({"coldDir": "s3://bucket/x"}, "only directories that are mounted"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, str], said: str) -> None:
    with pytest.raises(BadOption) as caught:
        parse_options({"path": "/x", **options})
    assert said in str(caught.value)


def test_options_are_taken_in_any_case_and_times_as_dates() -> None:
    parsed = parse_options({"PATH": "file:///x", "fromts": "1970-01-02", "PARTITIONBYTES": "64m"})
    assert (parsed.data_dir, parsed.partition_bytes) == ("/x", 64 * 2**20)
    assert parsed.query.start_ts == 86_400_000


def test_an_executor_loads_nothing_else_of_the_server(webhooks: Server) -> None:
    """The executor loads the formats and their imports, but neither the engine nor its
    dependencies.
    """
    script = (
        "import sys, spark_jobs.reader.segments as s, spark_jobs.reader.listing as l\n"
        "import spark_jobs.reader.query as q\n"
        "listing = l.list_segments(sys.argv[1], q.Query())\n"
        "print(sum(b.num_rows for b in s.read_segments(listing.segments, q.Query())))\n"
        "print(*sorted(m for m in sys.modules if m.startswith('topics_server')))\n"
        "print(*sorted({'msgspec', 'starlette', 'pydantic', 'uvicorn'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(webhooks.data_dir)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    rows, ours, others, *_ = [*done.stdout.split("\n"), "", ""]
    assert int(rows) == len(LEFT)
    assert set(ours.split()) == {
        "topics_server",
        "topics_server.values",
        "topics_server.values.errors",
        "topics_server.values.limits",
        "topics_server.wal",
        "topics_server.wal.layout",
        "topics_server.wal.format",
        "topics_server.wal.format.manifest",
        "topics_server.wal.format.json_objects",
        "topics_server.wal.format.segment",
    }
    assert others == ""
