"""Outputs of jobs: which folders are refused, what a run replaces, and that it removes nothing
else.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spark_jobs.running import outputs
from tests.contract.driver import Server, eventually, good
from tests.spark.conftest import HAS_SPARK, INSTALL
from tests.spark.logs import seal_all

if not HAS_SPARK:
    pytest.skip(f"PySpark is not installed; {INSTALL}", allow_module_level=True)

from spark_jobs import tag_activity, to_parquet, topic_volume
from spark_jobs.datasource import read_output

Main = Callable[[list[str]], int]


def run(main: Main, *words: object) -> int:
    """A job's main, in the session of the tests."""
    return main([*map(str, words), "--rows", "0"])


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder that a server made."""
    found = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    return {name: content for name, content in found.items() if "FORMAT" not in name}


@pytest.fixture
def store(server: Server) -> Server:
    """Two sealed topics; one of them has a segment in the cold folder."""
    server.env = {
        **server.env,
        "TOPICS_COLD_DIR": str(server.directory / "cold"),
        "TOPICS_HOT_RETAIN_SEGMENTS": "1",
    }
    api = server.start()
    api.add("b", *range(3))
    for _ in range(2):
        api.add("a", *range(5))
        seal_all(api)
    # background jobs process the topic, and a segment moves
    good(api.put("a", {"cap_records": 1000}))
    cold = server.directory / "cold"
    eventually(lambda: any(cold.rglob("*.data")), "a segment is cold", 30)
    return server


def dangerous(server: Server) -> list[Path]:
    """Names of a folder that is, holds or lies inside the read directory."""
    data, cold, top = server.data_dir, server.directory / "cold", server.directory
    links = top / "links"
    links.mkdir(exist_ok=True)
    for name, target in {"data": data, "up": top, "deep": data / "segments" / "1"}.items():
        if not (links / name).exists():
            (links / name).symlink_to(target)
    return [
        data,
        Path(f"{data}/"),
        Path(f"{data}//."),
        data / "segments",
        data / "segments" / "1",
        data / "new",
        data / "new" / "deeper",
        cold,
        cold / "new",
        top,
        top.parent,
        top / "other" / ".." / data.name,
        Path(os.path.relpath(data)),
        links / "data",
        links / "data" / "x",
        links / "up",
        links / "up" / data.name,
        links / "deep" / "x",
        links / ".." / data.name / "segments",
    ]


def test_no_way_leads_an_output_into_a_store(spark: Any, store: Server) -> None:
    store.stop()  # a running server writes its journal
    before = contents(store.data_dir), contents(store.directory / "cold")
    cold = ["--cold-dir", store.directory / "cold"]
    for place in dangerous(store):
        assert run(topic_volume.main, store.data_dir, *cold, "--out", place) == 2, place
    # The cold folder is recognised by its files, also where it was not named.
    assert run(topic_volume.main, store.data_dir, "--out", store.directory / "cold" / "x") == 2
    for file in (store.data_dir / "FORMAT", store.data_dir / "p.svg", store.directory / "x.txt"):
        words = (*cold, "--picture", file)
        assert run(topic_volume.main, store.data_dir, *words) == 2, file
    assert (contents(store.data_dir), contents(store.directory / "cold")) == before


def test_places_are_the_same_whatever_a_file_system_calls_them(
    store: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file system that ignores case, `DATA` is `data`: device and inode are compared, not the
    text.
    """
    real = Path.stat

    def stat(path: Path, **more: Any) -> os.stat_result:
        folded = Path(str(path).replace("/SERVER/DATA", str(store.data_dir)))
        return real(folded, **more)

    monkeypatch.setattr(Path, "stat", stat)
    with pytest.raises(outputs.OutputRefused, match="which is read"):
        outputs.resolve(Path("/SERVER/DATA/out"), (store.data_dir,))


def test_a_folder_of_somebody_else_is_refused(spark: Any, store: Server, tmp_path: Path) -> None:
    cold = ["--cold-dir", store.directory / "cold"]
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("years")
    assert run(topic_volume.main, store.data_dir, *cold, "--out", foreign) == 2
    assert [p.name for p in foreign.iterdir()] == ["thesis.txt"]
    own = tmp_path / "own"
    for _ in range(2):
        assert run(topic_volume.main, store.data_dir, *cold, "--out", own) == 0
        assert spark.read.parquet(str(own)).agg({"records": "sum"}).first()[0] == 13
    assert json.loads((own / outputs.MARKER).read_text())["job"] == "topic_volume"
    assert run(tag_activity.main, store.data_dir, *cold, "--out", own) == 2, "another job's"
    (own / "mine.csv").write_text("1")
    assert run(topic_volume.main, store.data_dir, *cold, "--out", own) == 2
    assert (own / "mine.csv").read_text() == "1"


def test_one_run_at_a_time_writes_a_folder(spark: Any, store: Server, tmp_path: Path) -> None:
    cold = ["--cold-dir", store.directory / "cold"]
    assert run(topic_volume.main, store.data_dir, *cold, "--out", tmp_path / "v") == 0
    with outputs.locked(tmp_path / "v"):
        assert run(topic_volume.main, store.data_dir, *cold, "--out", tmp_path / "v") == 2


def test_to_parquet_replaces_only_what_it_computed(
    spark: Any, store: Server, tmp_path: Path
) -> None:
    """Topics of earlier runs stay; a topic that is computed again is replaced and not doubled."""
    cold = ["--cold-dir", store.directory / "cold"]
    lake = tmp_path / "lake"

    def counts() -> dict[str, int]:
        rows = read_output(spark, str(lake)).groupBy("topic").count().collect()
        return {row.topic: row["count"] for row in rows}

    assert run(to_parquet.main, store.data_dir, *cold, "--topics", "a", "--out", lake) == 0
    assert run(to_parquet.main, store.data_dir, *cold, "--topics", "b", "--out", lake) == 0
    assert counts() == {"a": 10, "b": 3}
    store.api.add("007", 1)
    store.api.add("b", 4)
    seal_all(store.api)
    assert run(to_parquet.main, store.data_dir, *cold, "--topics", "b,007", "--out", lake) == 0
    assert counts() == {"a": 10, "b": 4, "007": 1}
    assert run(to_parquet.main, store.data_dir, "--out", lake, "--payload", "variant") == 2
    assert counts() == {"a": 10, "b": 4, "007": 1}
    with pytest.raises(SystemExit):
        run(to_parquet.main, store.data_dir, "--out", lake, "--from", "2026-01-01T12:00")
