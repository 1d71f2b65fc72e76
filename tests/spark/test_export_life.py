"""Exports over the life of a topic: configuration, incarnations, bytes, damage elsewhere, sizes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from spark_jobs import export as exports
from spark_jobs.export import main
from spark_jobs.exporter.records import TABLE_COLUMNS, ExportRow
from spark_jobs.exporter.sources import Chunk
from spark_jobs.reader.listing import list_segments
from spark_jobs.reader.query import Query
from tests.contract.driver import Api, Server, eventually, good
from tests.spark.logs import seal_all
from tests.spark.test_export import export, manifest, rows


def seal(api: Api, *topics: str) -> None:
    """Seal these topics only."""
    good(api.http.post("/v0/admin/seal", json={"topics": list(topics)}))


def seqs(folder: Path, topic: str = "a") -> list[int]:
    """Seqs of a topic in an export."""
    return [row["seq"] for row in rows(folder) if row["topic"] == topic]


# -- configuration -------------------------------------------------------------------------------


def test_a_raised_ttl_loses_nothing(server: Server, tmp_path: Path) -> None:
    """The manifest is older than the change: the export holds back rows that it hides and exports
    them in the next run.
    """
    api = server.start()
    good(api.put("a", {"ttl_ms": 3_600_000}))
    api.add("a", *range(5))
    seal(api, "a")
    server.stop()
    _rewrite_config(server.data_dir, ttl_ms=1)  # as if the raise had not reached the manifest yet
    data = ["--data-dir", str(server.data_dir), "--sealed"]
    out = tmp_path / "out"
    assert export(out, "a", *data)["records"] == 0, "a diff of a server would not show them now"
    book = manifest(out)["topics"]["a"]
    assert (book["next_seq"], book["held"], book["lost"]) == (6, [[1, 5]], [])
    assert export(out, "a", *data)["records"] == 0
    _rewrite_config(server.data_dir, ttl_ms=3_600_000)
    assert export(out, "a", *data)["records"] == 5
    assert manifest(out)["topics"]["a"]["held"] == []
    assert export(out, "a", *data)["records"] == 0
    assert seqs(out) == [1, 2, 3, 4, 5]


def test_a_changed_configuration_reaches_the_files(server: Server, tmp_path: Path) -> None:
    """A reader of the files applies the current configuration, without another seal."""
    api = server.start()
    good(api.put("a", {"ttl_ms": 400_000}))
    api.add("a", *range(3))
    seal(api, "a")
    good(api.put("a", {"ttl_ms": 3_600_000}))

    def told() -> int:
        from topics_server.wal.format.manifest import decode_manifest

        (path,) = server.data_dir.rglob("manifest")
        return int(decode_manifest(path.read_bytes()).config["ttl_ms"])

    eventually(lambda: told() == 3_600_000, "the manifest has the new configuration")
    server.stop()
    query = Query(columns=TABLE_COLUMNS)
    later = int(time.time() * 1000) + 600_000  # the old TTL would have removed them by then
    listing = list_segments(str(server.data_dir), query, now_ms=later)
    assert sum(segment.entry.record_count for segment in listing.segments) == 3


def _rewrite_config(data_dir: Path, **config: int) -> None:
    """Replace the configuration in the only manifest."""
    from dataclasses import replace

    from topics_server.wal.format.manifest import decode_manifest, encode_manifest

    (path,) = data_dir.rglob("manifest")
    known = decode_manifest(path.read_bytes())
    temp = path.with_name("manifest.tmp")
    temp.write_bytes(encode_manifest(replace(known, config={**known.config, **config})))
    temp.rename(path)


def test_held_back_rows_that_are_gone_are_reported(server: Server, tmp_path: Path) -> None:
    api = server.start()
    good(api.put("a", {"ttl_ms": 1}))
    api.add("a", *range(3))
    time.sleep(0.05)  # the records are older than the TTL before it is raised
    good(api.put("a", {"ttl_ms": 3_600_000}))
    api.add("a", *range(3))
    out, url = tmp_path / "out", ["--url", api.url]
    # The state that a run over segments leaves: seqs 1 to 3 held back, 4 and 5 next.
    out.mkdir()
    state = {"epoch": 1, "generation": 0, "next_seq": 6, "files": [], "lost": []}
    content = {"version": 2, "format": "parquet", "topics": {"a": {**state, "held": [[1, 5]]}}}
    (out / "_export.json").write_text(json.dumps(content))
    assert export(out, "a", *url)["records"] == 3
    assert seqs(out) == [4, 5, 6]
    book = manifest(out)["topics"]["a"]
    assert (book["held"], book["next_seq"]) == ([], 7)
    assert [text.split(" ")[0] for text in book["lost"]] == ["1..3"]


# -- incarnations --------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["diff", "both"])
def test_a_topic_made_again_is_exported_whole(way: str, server: Server, tmp_path: Path) -> None:
    """The new topic is longer than the old one and not sealed, so only the epoch distinguishes
    them.
    """
    api = server.start()
    api.add("a", "old-1", "old-2")
    seal(api, "a")
    where = ["--url", api.url]
    if way == "both":
        where += ["--data-dir", str(server.data_dir)]
    out = tmp_path / "out"
    assert export(out, *where)["records"] == 2
    good(api.drop("a"))
    api.add("a", *(f"new-{n}" for n in range(1, 6)))
    assert export(out, *where)["records"] == 5
    seal(api, "a")
    assert export(out, *where)["records"] == 0
    found = [(row["epoch"], row["seq"], row["data"]) for row in rows(out)]
    assert found == [
        (1, 1, '"old-1"'),
        (1, 2, '"old-2"'),
        *((2, n, f'"new-{n}"') for n in range(1, 6)),
    ]


def test_an_older_export_goes_on(server: Server, tmp_path: Path) -> None:
    api = server.start()
    api.add("a", 1, 2, 3)
    out, url = tmp_path / "out", ["--url", api.url]
    out.mkdir()
    state: dict[str, Any] = {"epoch": None, "generation": 0, "next_seq": 3, "files": [], "lost": []}
    content = {"version": 1, "format": "parquet", "topics": {"a": state}}
    (out / "export.json").write_text(json.dumps(content))
    assert export(out, *url)["records"] == 1
    assert not (out / "export.json").exists()
    assert seqs(out) == [3]


# -- bytes ---------------------------------------------------------------------------------------


@pytest.fixture
def mixed(server: Server) -> Api:
    """A topic of bytes, some of which look like JSON, and one of JSON."""
    api = server.start()
    headers = {"Content-Type": "image/png"}
    assert api.http.put("/v1/stream/bin", headers=headers).status_code == 201
    for content in (b"\x00\xff\nx", b'{"a":1}', b"1234", b"\r\n"):
        answer = api.http.post("/v1/stream/bin", content=content, headers=headers)
        assert answer.status_code in (200, 204)
    api.add("json", {"a": "b\nc"}, tag="t", node="n", meta={"k": [1]})
    seal_all(api)
    return api


def test_lines_of_both_sources_are_the_records_of_a_diff(
    mixed: Api, server: Server, tmp_path: Path
) -> None:
    where = {"http": ["--url", mixed.url], "sealed": ["--data-dir", str(server.data_dir)]}
    where["sealed"] += ["--sealed"]
    for topic in ("bin", "json"):
        shown = mixed.read(topic, include_tags=True)["records"]
        assert shown
        for name, words in where.items():
            out = tmp_path / f"{topic}-{name}"
            export(out, topic, "--format", "ndjson", *words)
            lines = [p.read_bytes() for p in sorted(out.glob("topic=*/*/*"))]
            assert [json.loads(line) for line in b"".join(lines).splitlines()] == shown, name


def test_tables_of_both_sources_are_equal(mixed: Api, server: Server, tmp_path: Path) -> None:
    export(tmp_path / "http", "--url", mixed.url)
    export(tmp_path / "sealed", "--data-dir", str(server.data_dir), "--sealed")
    assert rows(tmp_path / "http") == rows(tmp_path / "sealed")
    (first,) = [row for row in rows(tmp_path / "http") if row["topic"] == "bin"][:1]
    assert (first["data"], json.loads(first["meta"])) == (
        "AP8KeA==",
        {"$content_type": "image/png"},
    )


# -- unrequested records -------------------------------------------------------------------------


def test_damage_of_another_topic_and_of_what_is_exported_is_no_matter(
    server: Server, tmp_path: Path
) -> None:
    api = server.start()
    for _ in range(2):
        api.add("a", *range(3))
        api.add("b", *range(3))
        seal_all(api)
    data, out = ["--data-dir", str(server.data_dir), "--sealed"], tmp_path / "out"
    assert export(out, "a", *data)["records"] == 6
    api.add("a", *range(4))
    seal(api, "a")
    folders = {p.parent for p in server.data_dir.rglob("0000000003.data")}
    (of_a,) = folders
    for file in server.data_dir.rglob("*.data"):
        if file.parent != of_a or file.name != "0000000003.data":
            file.unlink()  # the other topic's records, and those already exported
    assert export(out, "a", *data)["records"] == 4
    assert seqs(out) == list(range(1, 11))


# -- reading back --------------------------------------------------------------------------------


def test_an_export_is_read_at_its_root(spark: Any, server: Server, tmp_path: Path) -> None:
    import pandas as pd

    from spark_jobs.datasource import read_output

    api = server.start()
    long = "long" + "x" * 251
    topics = ["007", "08", "a", long]
    for topic in topics:
        api.add(topic, topic, node="ä")
    out = tmp_path / "out"
    export(out, "--url", api.url)
    assert spark.read.parquet(str(out)).count() == 4
    frame = read_output(spark, str(out)).where("topic not like 'long%'")
    assert {(row.topic, row.data) for row in frame.collect()} == {
        (topic, f'"{topic}"') for topic in topics[:3]
    }
    direct = spark.read.option("recursiveFileLookup", "true").parquet(str(out))
    assert {row.topic for row in direct.collect()} == set(topics)
    assert set(pd.read_parquet(out)["data"]) == {f'"{topic}"' for topic in topics}
    assert set(pd.read_parquet(out, partitioning=None)["topic"]) == set(topics)


def test_files_end_by_bytes_too(tmp_path: Path) -> None:
    """Few large rows fill a file as many small ones do: bytes bound the memory."""

    class Source:
        def chunks(self, _topic: str, _epoch: int | None, _seq: int) -> Iterator[Chunk]:
            for seq in range(1, 7):
                yield Chunk([ExportRow(seq, 0, None, None, b"1" * 400_000, None)], seq + 1)

    with exports.locked(tmp_path):
        made = exports.Export(tmp_path, "parquet", bytes_per_file=1_000_000)
        made.open()
        made.topic("a", 1, Source())
        made.close()
    files = manifest(tmp_path)["topics"]["a"]["files"]
    assert [each["rows"] for each in files] == [3, 3]


def test_a_step_costs_a_line_and_not_the_whole_manifest(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spark_jobs.exporter import exporting
    from spark_jobs.running import outputs

    api = server.start()
    api.add("a", *range(20))
    whole: list[int] = []
    real = outputs.publish_json

    def publish(path: Path, content: Any) -> None:
        whole.append(1)
        real(path, content)

    monkeypatch.setattr(exporting, "publish_json", publish)
    assert main(["--to", str(tmp_path / "out"), "--url", api.url, "--rows-per-file", "1"]) == 0
    assert len(manifest(tmp_path / "out")["topics"]["a"]["files"]) == 20
    assert len(whole) == 2, "at the begin and at the end"


def test_what_a_person_put_beside_the_files_stays(server: Server, tmp_path: Path) -> None:
    api = server.start()
    api.add("a", 1)
    out = tmp_path / "out"
    export(out, "--url", api.url)
    (day,) = out.glob("topic=a/day=*")
    (day / "notes.txt").write_text("mine")
    (day / "0-00000000000000000007-00000000000000000009.parquet").write_bytes(b"of a killed run")
    export(out, "--url", api.url)
    assert {p.name for p in day.iterdir()} == {
        "notes.txt",
        "0-00000000000000000001-00000000000000000001.parquet",
    }
    assert pq.ParquetFile(next(day.glob("*.parquet"))).read().num_rows == 1


def test_another_store_is_not_exported_into_the_same_folder(
    server: Server, tmp_path: Path, capfd: Any
) -> None:
    """The other store's topics have the same names, epochs and seqs, but other records."""
    out = tmp_path / "out"
    other = Server(tmp_path / "other", {"TOPICS_WAL_SHARDS": "1"})
    for each in (server, other):
        each.start().add("a", 1)
        seal_all(each.api)
        each.stop()
    assert main(["--to", str(out), "--data-dir", str(server.data_dir), "--sealed"]) == 0
    assert main(["--to", str(out), "--data-dir", str(other.data_dir), "--sealed"]) == 1
    assert "is an export of store" in capfd.readouterr().err


def test_an_export_into_a_store_is_refused(server: Server, tmp_path: Path) -> None:
    api = server.start()
    api.add("a", 1)
    seal_all(api)
    for place in (server.data_dir, server.data_dir / "x", server.data_dir / "segments" / "1"):
        assert main(["--to", str(place), "--url", api.url]) == 1
    eventually(lambda: api.get_state("a")["count"] == 1, "the server is well")
    assert not (server.data_dir / "x").exists()
