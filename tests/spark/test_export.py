"""`topics export`: every record in exactly one file, over runs and kills, from both sources."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_jobs.datasource import TopicsDataSource
from spark_jobs.export import main
from spark_jobs.exporter import records
from tests.contract.driver import ROOT, Server, good
from tests.crash.kills.test_webhooks import TOPIC
from tests.spark.logs import seal_all
from tests.spark.reading.test_reader import LEFT, webhooks

__all__ = ["webhooks"]


def export(folder: Path, *words: object) -> dict[str, int]:
    """Run it in this process; return its output."""
    done = subprocess.run(
        [sys.executable, "-m", "topics_server", "export", "--to", str(folder), *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, int] = json.loads(done.stdout)
    return said


def manifest(folder: Path) -> dict[str, Any]:
    """The folder's manifest; every file matches it, and there are no others."""
    found: dict[str, Any] = json.loads((folder / "_export.json").read_text("utf-8"))
    named = [each for topic in found["topics"].values() for each in topic["files"]]
    for each in named:
        content = (folder / each["path"]).read_bytes()
        assert len(content) == each["bytes"]
        assert hashlib.sha256(content).hexdigest() == each["sha256"]
    files = {str(p.relative_to(folder)) for p in folder.glob("topic=*/*/*")}
    assert files == {each["path"] for each in named}
    return found


def rows(folder: Path) -> list[dict[str, Any]]:
    """All rows of an export's Parquet or Arrow files, in the manifest's order."""
    found: list[dict[str, Any]] = []
    for topic in manifest(folder)["topics"].values():
        for each in topic["files"]:
            path = folder / each["path"]
            if path.suffix == ".parquet":
                table = pq.ParquetFile(path).read()
            else:
                table = pa.ipc.open_file(path).read_all()
            assert len(table) == each["rows"]
            found += table.to_pylist()
    return found


@pytest.mark.parametrize("source", ["diff", "sealed"])
@pytest.mark.parametrize("kind", ["parquet", "arrow", "ndjson"])
def test_every_record_as_it_was_sent(
    kind: str, source: str, webhooks: Server, tmp_path: Path
) -> None:
    where = ["--url", webhooks.api.url]
    if source == "sealed":
        where = ["--data-dir", str(webhooks.data_dir), "--sealed"]
    said = export(tmp_path, "--format", kind, "--rows-per-file", 100, *where)
    assert (said["records"], said["topics"]) == (len(LEFT), 1)
    assert said["files"] >= 3
    if kind == "ndjson":
        lines = b"".join(p.read_bytes() for p in sorted(tmp_path.glob("topic=*/*/*")))
        found = [json.loads(line) for line in lines.splitlines()]
        assert [(r["$seq"], r["$tag"]) for r in found] == [(e.seq, e.tag) for e in LEFT]
        assert all(b'"data":' + e.data in lines for e in LEFT)
        manifest(tmp_path)
        return
    found = rows(tmp_path)
    assert [(r["seq"], r["tag"], r["data"].encode(), r["meta"].encode()) for r in found] == [
        (e.seq, e.tag, e.data, e.meta) for e in LEFT
    ]
    assert {(r["topic"], r["node"]) for r in found} == {(TOPIC, None)}


def test_runs_follow_each_other_and_sources_meet(server: Server, tmp_path: Path) -> None:
    api = server.start()
    out, url = tmp_path / "out", ["--url", api.url]
    api.add("a", *range(10))
    api.add("b.x", 1)
    seal_all(api)
    api.add("a", *range(3))
    data = ["--data-dir", str(server.data_dir)]
    assert export(out, "a", *data, "--sealed")["records"] == 10
    assert export(out, "a", *data, *url)["records"] == 3
    assert export(out, "a", "b.*", *url)["records"] == 1
    assert export(out, "a", "b.*", *url)["records"] == 0
    good(api.delete("a", before_seq=14))
    api.add("a", 7)
    assert export(out, *url)["records"] == 1
    assert sorted((r["topic"], r["seq"]) for r in rows(out)) == [
        *(("a", n) for n in range(1, 15)),
        ("b.x", 1),
    ]
    assert manifest(out)["topics"]["a"]["next_seq"] == 15


def test_losses_and_new_incarnations_are_reported(
    server: Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    api = server.start()
    good(api.put("a", {"cap_records": 5}))
    api.add("a", *range(4))
    words = ["--to", str(tmp_path / "out"), "--url", api.url]
    assert main(words) == 0
    api.add("a", *range(8))
    assert main(words) == 0
    assert "seqs 5..7 (cap) were gone" in capfd.readouterr().err
    assert manifest(tmp_path / "out")["topics"]["a"]["lost"] == ["5..7 (cap)"]
    good(api.drop("a"))
    api.add("a", "new")
    assert main(words) == 0
    assert "dropped and made again" in capfd.readouterr().err
    found = [(r["seq"], r["data"]) for r in rows(tmp_path / "out")]
    assert found[-1] == (1, '"new"')
    assert len(found) == 10


def test_what_is_refused(webhooks: Server, tmp_path: Path, capfd: Any) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "x").write_text("")
    url = ["--url", webhooks.api.url]
    assert main(["--to", str(foreign), *url]) == 1
    assert "is not empty, and no export is in it" in capfd.readouterr().err
    assert main(["--to", str(tmp_path / "a"), "--format", "ndjson", *url]) == 0
    assert main(["--to", str(tmp_path / "a"), *url]) == 1
    assert "is an export as ndjson" in capfd.readouterr().err
    assert main(["--to", str(tmp_path / "b"), "--url", "http://127.0.0.1:1"]) == 1
    with pytest.raises(SystemExit):
        main(["--to", str(tmp_path / "b"), "--sealed"])


def test_a_run_that_was_killed_before_its_first_manifest_is_no_obstacle(
    webhooks: Server, tmp_path: Path
) -> None:
    """It leaves its lock, and a part of the manifest under its temporary name."""
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / ".lock").touch()
    (folder / "_export.json.tmp").write_text('{"version": 2, "form')
    assert main(["--to", str(folder), "--url", webhooks.api.url]) == 0
    assert json.loads((folder / "_export.json").read_text("utf-8"))["topics"]
    assert not (folder / "_export.json.tmp").exists()
    other = tmp_path / "other"
    other.mkdir()
    (other / "_export.json.tmp.old").touch()
    assert main(["--to", str(other), "--url", webhooks.api.url]) == 1


@pytest.mark.slow
def test_killed_runs_leave_every_record_in_one_file(webhooks: Server, tmp_path: Path) -> None:
    """`kill -9` at any moment; the last run finishes."""
    chance = random.Random(3)
    command = [sys.executable, "-m", "topics_server", "export", "--to", str(tmp_path / "out")]
    words = ["--url", webhooks.api.url, "--rows-per-file", "4"]
    for _ in range(12):
        process = subprocess.Popen(
            [*command, *words], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        time.sleep(0.25 + chance.random() * 0.7)
        process.kill()
        process.wait()
    subprocess.run([*command, *words], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    assert [r["seq"] for r in rows(tmp_path / "out")] == [e.seq for e in LEFT]


def test_files_are_split_by_day() -> None:
    def row(ts: int) -> records.ExportRow:
        return records.ExportRow(1, ts, None, None, b"1", None)

    parts = list(records.split_by_day([row(0), row(86_399_999), row(86_400_000)]))
    assert [(day, len(part)) for day, part in parts] == [("1970-01-01", 2), ("1970-01-02", 1)]


@pytest.mark.parametrize("source", ["diff", "sealed"])
@pytest.mark.parametrize("epoch", [3, None])
def test_the_columns_of_a_file_are_those_of_the_spark_source(
    tmp_path: Path, source: str, epoch: int | None
) -> None:
    found: Any = [records.ExportRow(1, 5, None, "a", b"1", None)]
    if source == "sealed":
        types = {"timestamp": pa.timestamp("us", tz="UTC"), "bigint": pa.int64()}
        types |= {"string": pa.string(), "binary": pa.binary()}
        row = dict(
            zip(dict(records.TABLE_COLUMNS), (1, 5_000, None, "a", b"1", None, "json"), strict=True)
        )
        schema = pa.schema([(name, types[kind]) for name, kind in records.TABLE_COLUMNS])
        found = pa.Table.from_pylist([row], schema)
    pq.write_table(records.table_of(found, "t", epoch, folded=False), tmp_path / "file.parquet")
    table = pq.read_table(tmp_path / "file.parquet")
    spark_types = {"int64": "bigint", "string": "string", "timestamp[us, tz=UTC]": "timestamp"}
    columns = [f"{field.name} {spark_types[str(field.type)]}" for field in table.schema]
    # The source uses these names for its columns; read_output uses the types of the JSON.
    assert ", ".join(columns) == TopicsDataSource({"path": str(tmp_path)}).schema()
    assert "epoch bigint" in columns
    assert table["epoch"].to_pylist() == [epoch]
    kept = {field["name"]: field["type"] for field in records.schema_json()["fields"]}
    assert kept.pop("day") == "date"
    spelled = [f"{name} {kind.replace('long', 'bigint')}" for name, kind in kept.items()]
    assert spelled == columns


@pytest.mark.parametrize("kind", ["parquet", "ndjson"])
def test_names_of_255_characters(kind: str, server: Server, tmp_path: Path) -> None:
    """Names that a path cannot hold and that differ only at their end stay apart over runs."""
    api = server.start()
    names = [f"a{':' * 253}{end}" for end in "ab"]
    for name in names:
        api.add(name, name[-1])
    seal_all(api)
    out = tmp_path / "out"
    where = ["--data-dir", server.data_dir, "--url", api.url, "--format", kind]
    assert export(out, *where)["records"] == 2
    for name in names:
        api.add(name, "later")
    assert export(out, *where)["records"] == 2
    folders = [path.name for path in out.glob("topic=*")]
    assert len(folders) == 2
    assert all(len(each.encode()) <= 255 for each in folders)
    if kind == "parquet":
        found = {(row["topic"], row["data"]) for row in rows(out)}
        assert found == {(n, d) for n in names for d in (f'"{n[-1]}"', '"later"')}
    else:
        lines = [p.read_text("utf-8").count("\n") for p in out.glob("topic=*/*/*.ndjson")]
        assert lines == [1] * 4
    assert set(manifest(out)["topics"]) == set(names)
