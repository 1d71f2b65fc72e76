"""`topics jobs to_iceberg`: tables equal a diff, over runs, deletes, incarnations and names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spark_jobs.to_iceberg.__main__ import main
from spark_jobs.to_iceberg.catalogs import sqlite_catalog
from spark_jobs.to_iceberg.tables import names_for
from tests.contract.driver import Api, Server, eventually, good
from tests.spark.lake.engines import by_duckdb, by_pyiceberg, by_spark, job, load
from tests.spark.logs import digests, make_log, read_rows, seal_all

pytestmark = pytest.mark.timeout(300)


def seqs(out: Path, table: str) -> list[int]:
    """The seqs of a table, ascending, as pyiceberg reads them."""
    return sorted(row["seq"] for row in by_pyiceberg(load(out, table)))


def test_three_engines_read_the_rows_of_a_diff(spark: Any, server: Server, tmp_path: Path) -> None:
    """The rows of random logs are compared by hash; a second run adds nothing."""
    api = server.start()
    names = [name for name in make_log(api, 6) if api.state(name).status_code == 200]
    eventually(
        lambda: good(api.http.get("/v0/routers/s6.r"))["lag"] == 0, "the router has copied", 60
    )
    seal_all(api)
    wanted = {name: rows for name in names if (rows := read_rows(api, name))}
    assert len(wanted) >= 3
    server.stop()
    out = tmp_path / "lake house"
    done = job(server.data_dir, out, "--rows-per-commit", 8)
    assert max(each["commits"] for each in done.values()) > 1
    assert {name for name, each in done.items() if each["records"]} == wanted.keys()
    for name, rows in wanted.items():
        table = load(out, done[name]["table"].removeprefix("topics."))
        found = by_pyiceberg(table)
        assert {(row["topic"], row["epoch"]) for row in found} == {(name, found[0]["epoch"])}
        assert digests(found) == digests(rows), name
        assert digests(by_duckdb(table)) == digests(rows), name
        assert digests(by_spark(spark, table)) == digests(rows), name
    again = job(server.data_dir, out)
    assert not any(each["commits"] for each in again.values())


def test_runs_go_on_and_deleted_rows_go_with_a_rebuild(server: Server, tmp_path: Path) -> None:
    api, out = server.start(), tmp_path / "out"
    api.add("a", *range(4))
    api.add("a", "secret", tag="x")
    api.add("a", *range(5))
    api.add("kept", 1, 2)
    good(api.delete("a", before_seq=2))
    seal_all(api)
    assert job(server.data_dir, out)["a"]["records"] == 9
    api.add("a", "unseen", tag="x")
    api.add("a", 2)
    good(api.delete("a", match="x"))
    seal_all(api)
    done = job(server.data_dir, out)
    assert done["a"]["records"] == 1
    assert seqs(out, "a") == [2, 3, 4, 5, 6, 7, 8, 9, 10, 12]
    other = job(server.data_dir, out, "--rebuild", "2001-01-01..2001-01-31")
    assert other["a"]["removed"] == 0
    done = job(server.data_dir, out, "--rebuild", "all")
    assert (done["a"]["removed"], done["kept"]["removed"]) == (1, 0)
    assert seqs(out, "a") == [2, 3, 4, 6, 7, 8, 9, 10, 12]
    assert digests(by_duckdb(load(out, "a"))) == digests(read_rows(api, "a"))
    snapshots = len(load(out, "a").snapshots())
    assert job(server.data_dir, out, "--rebuild", "all")["a"]["removed"] == 0
    assert len(load(out, "a").snapshots()) == snapshots, "nothing was written"
    api.add("a", 3)
    seal_all(api)
    assert job(server.data_dir, out)["a"]["records"] == 1
    assert seqs(out, "a")[-2:] == [12, 13]


def test_the_lake_keeps_what_the_store_evicted_or_dropped(server: Server, tmp_path: Path) -> None:
    """A rebuild removes only rows that the store could still have; the rows of a new incarnation
    are added.
    """
    api, out = server.start(), tmp_path / "out"
    good(api.put("capped", {"cap_records": 5}))
    api.add("capped", *range(5))
    api.add("again", *range(4))
    seal_all(api)
    job(server.data_dir, out)
    api.add("capped", *range(3))
    good(api.drop("again"))
    api.add("again", "new")
    seal_all(api)
    done = job(server.data_dir, out, "--rebuild", "all")
    assert [row["seq"] for row in read_rows(api, "capped")] == [4, 5, 6, 7, 8]
    assert seqs(out, "capped") == list(range(1, 9))
    assert done["capped"]["removed"] == 0
    rows = by_pyiceberg(load(out, "again"))
    epochs = sorted({row["epoch"] for row in rows})
    assert len(epochs) == 2
    found = sorted((row["epoch"], row["seq"]) for row in rows)
    assert found == [(epochs[0], seq) for seq in (1, 2, 3, 4)] + [(epochs[1], 1)]


def test_topics_whose_names_meet_have_tables_of_their_own(server: Server, tmp_path: Path) -> None:
    api, out = server.start(), tmp_path / "out"
    names = ("orders.eu", "orders:eu", "orders_eu")
    for number, name in enumerate(names):
        api.add(name, *range(number + 1))
    seal_all(api)
    for _ in range(2):
        tables = {name: each["table"] for name, each in job(server.data_dir, out).items()}
        assert len(set(tables.values())) == 3
        assert set(tables.values()) <= {f"topics.{n}" for name in names for n in names_for(name)}
        for number, name in enumerate(names):
            found = by_pyiceberg(load(out, tables[name].removeprefix("topics.")))
            assert [row["topic"] for row in found] == [name] * (number + 1)


# -- refusals ------------------------------------------------------------------------------------


@pytest.fixture
def sealed(server: Server) -> Api:
    """A running server with one sealed topic."""
    api = server.start()
    api.add("a", *range(6))
    seal_all(api)
    return api


def test_tables_of_others_are_refused_and_left(
    sealed: Api, server: Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out, words = tmp_path / "out", [str(server.data_dir), "--out"]
    job(server.data_dir, out)
    other = Server(tmp_path / "other", {"TOPICS_WAL_SHARDS": "1"})
    try:
        api = other.start()
        api.add("a", 1)
        seal_all(api)
        assert main([str(other.data_dir), "--out", str(out)]) == 2
        assert "is an output of store" in capfd.readouterr().err
    finally:
        other.stop()
    catalog = sqlite_catalog(out)
    try:
        catalog.create_namespace("mine")
        catalog.create_table(("mine", "a"), schema=catalog.load_table(("topics", "a")).schema())
        store = catalog.load_table(("topics", "a"))
        with store.transaction() as change:
            change.set_properties({"topics.store-id": "f" * 32})
    finally:
        catalog.close()
    assert main([*words, str(out), "--namespace", "mine"]) == 2
    assert "mine.a: was not made by this job" in capfd.readouterr().err
    assert main([*words, str(out)]) == 2
    assert "topics.a: is of store ffff" in capfd.readouterr().err
    assert seqs(out, "a") == list(range(1, 7))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    for where, why in (
        (tmp_path / "full", "is not empty"),
        (server.data_dir / "lake", "lies inside"),
    ):
        assert main([*words, str(where)]) == 2
        assert why in capfd.readouterr().err
    assert main([*words[:1], "--catalog", "nowhere"]) == 2
    assert "PYICEBERG_CATALOG__NOWHERE__URI" in capfd.readouterr().err
    assert main([str(tmp_path / "absent"), "--out", str(tmp_path / "new")]) == 1
    assert "absent" in capfd.readouterr().err
    for bad in ("monday", "2026-01-02..2026-01-01"):
        with pytest.raises(SystemExit) as stopped:
            main([*words, str(out), "--rebuild", bad])
        assert stopped.value.code == 2


def test_damage_ends_the_run_and_the_rows_before_it_stay(
    sealed: Api, server: Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    job(server.data_dir, out)
    sealed.add("a", *range(6))
    seal_all(sealed)
    server.stop()
    newest = max(server.data_dir.glob("segments/*/*.data"), key=lambda path: path.name)
    whole = newest.read_bytes()
    half = len(whole) // 2
    newest.write_bytes(whole[:half] + bytes([whole[half] ^ 255]) + whole[half + 1 :])
    assert main([str(server.data_dir), "--out", str(out)]) == 1
    assert newest.name in capfd.readouterr().err
    assert seqs(out, "a") == list(range(1, 7))
    newest.write_bytes(whole)
    assert job(server.data_dir, out)["a"]["records"] == 6
    assert seqs(out, "a") == list(range(1, 13))
