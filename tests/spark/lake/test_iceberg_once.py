"""Each record once in its table: over kills at any write, over writers that race, over changes of
other engines. `--iceberg-kills 20` for the long form.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from spark_jobs.to_iceberg.catalogs import sqlite_catalog
from spark_jobs.to_iceberg.sealed import LakePosition
from spark_jobs.to_iceberg.tables import LakeRaced, TopicTable, arrow_schema
from tests.contract.driver import ROOT, Server
from tests.spark.lake.engines import as_rows, by_duckdb, by_pyiceberg, job, load
from tests.spark.logs import digests, read_rows, seal_all

pytestmark = pytest.mark.timeout(300)

# Kills itself before the given step: each file that is written, each change of the catalog, and
# what follows that change.
KILLED = """
import os, signal, sys
from pyiceberg.io.pyarrow import PyArrowFile
from sqlalchemy.orm import Session
from spark_jobs.to_iceberg.__main__ import main

left = int(sys.argv.pop(1))

def step():
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)

def create(self, overwrite=False, plain=PyArrowFile.create):
    step()
    return plain(self, overwrite)

def commit(self, plain=Session.commit):
    step()
    plain(self)
    step()

PyArrowFile.create, Session.commit = create, commit
sys.exit(main(sys.argv[1:]))
"""


def test_kills_at_any_step_repeat_and_skip_nothing(
    server: Server, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A commit has six points for a kill: the file of rows, two manifests, metadata, the catalog,
    and after the catalog.
    """
    kills = request.config.getoption("--iceberg-kills")
    api, out, chance = server.start(), tmp_path / "out", random.Random(kills)
    for start in range(0, 40 * kills, 20):
        api.add("a", *({"n": start + number} for number in range(20)))
    seal_all(api)
    wanted = digests(read_rows(api, "a"))
    server.stop()
    words = [str(server.data_dir), "--out", str(out), "--rows-per-commit", "16"]
    counts = set()
    for number in range(kills):
        # The first kills come after, during and before a change of the catalog.
        step = 6 - number if number < 3 else chance.randint(1, 12)
        done = subprocess.run(
            [sys.executable, "-c", KILLED, str(step + 6 * (number == 0)), *words],
            cwd=ROOT,
            capture_output=True,
            check=False,
        )
        assert done.returncode == -9, done.stderr.decode()
        if (out / "topics").exists():
            rows = by_pyiceberg(load(out, "a"))
            assert [row["seq"] for row in sorted(rows, key=lambda row: int(row["seq"]))] == list(
                range(1, len(rows) + 1)
            )
            counts.add(len(rows))
    assert max(counts) > 0, "a killed run had committed something"
    assert job(server.data_dir, out)["a"]["records"] > 0, "a killed run had left something"
    table = load(out, "a")
    assert digests(by_pyiceberg(table)) == wanted
    assert digests(by_duckdb(table)) == wanted


# -- other writers -------------------------------------------------------------------------------


def rows(first: int, count: int, epoch: int = 1) -> Any:
    """Rows of an incarnation."""
    return pa.table(
        {
            "topic": ["a"] * count,
            "epoch": pa.array([epoch] * count, pa.int64()),
            "seq": pa.array(range(first, first + count), pa.int64()),
            "ts": pa.array([seq * 1000 for seq in range(count)]).cast(pa.timestamp("us", tz="UTC")),
            "node": pa.array([None] * count, pa.string()),
            "tag": pa.array([None] * count, pa.string()),
            "data": ["{}"] * count,
            "meta": pa.array([None] * count, pa.string()),
        },
        schema=arrow_schema(),
    )


@pytest.fixture
def lake(tmp_path: Path) -> Any:
    """A catalog with a namespace."""
    catalog = sqlite_catalog(tmp_path)
    catalog.create_namespace("topics")
    yield catalog
    catalog.close()


def found(lake: Any) -> list[tuple[int, int]]:
    """Epochs and seqs of the table, ascending."""
    table = lake.load_table(("topics", "a"))
    return sorted((row["epoch"], row["seq"]) for row in as_rows(table.scan().to_arrow()))


def test_of_two_writers_one_is_told_that_it_lost(lake: Any) -> None:
    """That also holds if the other writer was between two commits and its snapshot is the newest
    known.
    """
    one, two = (TopicTable(lake, "topics", "a", None) for _ in range(2))
    start, middle, end = LakePosition(0, 1), LakePosition(1, 4), LakePosition(1, 7)
    one.append(rows(1, 3), start, middle)
    with pytest.raises(LakeRaced, match="another writer"):
        two.append(rows(1, 3), start, middle)
    assert found(lake) == [(1, 1), (1, 2), (1, 3)]
    late = TopicTable(lake, "topics", "a", None)
    one.append(rows(4, 3), middle, end)
    with pytest.raises(LakeRaced):
        late.append(rows(4, 3), middle, end)
    with pytest.raises(LakeRaced, match="position moved"):
        TopicTable(lake, "topics", "a", None).append(rows(4, 3), middle, end)
    assert found(lake) == [(1, seq) for seq in range(1, 7)]
    assert lake.load_table(("topics", "a")).properties.get("commit.retry.num-retries") is None


def test_the_position_outlives_changes_of_other_engines(lake: Any) -> None:
    """The snapshot of a manual delete has no position; then all snapshots except the newest
    expire.
    """
    table = TopicTable(lake, "topics", "a", "5" * 32)
    table.append(rows(1, 4), LakePosition(0, 1), LakePosition(1, 9))
    other = lake.load_table(("topics", "a"))
    other.delete("seq = 2")
    table = TopicTable(lake, "topics", "a", "5" * 32)
    assert table.position() == LakePosition(1, 9)
    other = lake.load_table(("topics", "a"))
    first = other.snapshots()[0].snapshot_id
    other.maintenance.expire_snapshots().by_id(first).commit()
    table = TopicTable(lake, "topics", "a", None)
    assert table.position() == LakePosition(1, 5), "behind the newest row: what follows was deleted"
    table.append(rows(9, 1), LakePosition(1, 5), LakePosition(1, 10))
    assert found(lake) == [(1, 1), (1, 3), (1, 4), (1, 9)]
    assert json.loads(lake.load_table(("topics", "a")).metadata.model_dump_json())["properties"][
        "topics.store-id"
    ] == ("5" * 32)
