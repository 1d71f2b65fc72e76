"""The same reads and jobs on a cluster of two worker processes with executors of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from spark_jobs.session import NO_JAVA, find_java
from tests.contract.driver import ROOT, Server
from tests.spark.conftest import HAS_SPARK, INSTALL
from tests.spark.reading.test_reader import LEFT, webhooks

__all__ = ["webhooks"]

SCRIPT = """
import json, os, sys
from spark_jobs import tag_activity
from spark_jobs.session import spark_session
data, report = sys.argv[1:]
spark = spark_session("cluster", master="local-cluster[2,1,512]", config={
    "spark.driver.memory": "512m", "spark.executor.memory": "512m",
    "spark.executor.extraJavaOptions": os.environ["SPARK_SUBMIT_OPTS"],
    "spark.sql.shuffle.partitions": "2"})
frame = spark.read.format("topics").options(report=report, partitionBytes="300k").load(data)
rows = sorted((row.seq, row.tag) for row in frame.select("seq", "tag").collect())
tags = {row.tag: row.records for row in tag_activity.transform(frame).collect()}
def who(rows):
    yield os.getppid()
parts = spark.sparkContext.parallelize(range(8), 8).mapPartitions(who).collect()
print("FOUND " + json.dumps({"rows": rows, "executors": len(set(parts))}))
print("TAGS " + json.dumps(tags))
spark.stop()
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_workers_read_what_one_process_does(webhooks: Server, tmp_path: Path) -> None:
    if not HAS_SPARK:
        pytest.skip(f"PySpark is not installed; {INSTALL}")
    if find_java() is None:
        pytest.skip(NO_JAVA)
    words = [str(webhooks.data_dir), str(tmp_path / "report")]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "src")))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = dict(
        line.split(" ", 1) for line in done.stdout.splitlines() if line[:4] in ("FOUN", "TAGS")
    )
    found = json.loads(said["FOUND"])
    assert found["rows"] == [[e.seq, e.tag] for e in LEFT]
    assert found["executors"] == 2
    assert json.loads(said["TAGS"]) == Counter(e.tag for e in LEFT)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_spark_submit_runs_a_job_as_a_file(webhooks: Server, tmp_path: Path) -> None:
    """spark-submit sets master and configuration; its argument is the job's module."""
    if not HAS_SPARK:
        pytest.skip(f"PySpark is not installed; {INSTALL}")
    java = find_java()
    if java is None:
        pytest.skip(NO_JAVA)
    out, picture = tmp_path / "out", tmp_path / "tags.svg"
    job = ROOT / "spark_jobs" / "tag_activity.py"
    settings = ("--master", "local[1]", "--driver-memory", "512m")
    words = [str(job), str(webhooks.data_dir), "--out", str(out), "--picture", str(picture)]
    done = subprocess.run(
        [str(Path(sys.executable).with_name("spark-submit")), *settings, *words],
        cwd=tmp_path,
        env={
            **os.environ,
            "JAVA_HOME": java,
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "src"))),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    pq = pytest.importorskip("pyarrow.parquet")
    rows = pq.read_table(str(out / "tags")).to_pylist()
    assert {row["tag"]: row["records"] for row in rows} == Counter(e.tag for e in LEFT)
    assert picture.read_text("utf-8").startswith("<?xml")
