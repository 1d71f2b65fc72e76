"""Analytics, must-show 4: a streaming query killed between and in batches writes exactly once.

The driver is a process of its own, so is its JVM; both are killed. `--stream-kills` says how often.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from spark_jobs.session import NO_JAVA, find_java
from tests.contract.driver import ROOT, Api, Server, eventually, good

STREAM = """
import sys
from spark_jobs.session import spark_session
data, out, checkpoint = sys.argv[1:]
spark = spark_session("killed", master="local[2]", config={"spark.driver.memory": "700m"})
frame = spark.readStream.format("topics").option("maxRecordsPerTrigger", "40").load(data)
query = (frame.writeStream.format("parquet").option("checkpointLocation", checkpoint)
         .trigger(processingTime="50 milliseconds").start(out))
print("STARTED", flush=True)
query.awaitTermination()
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server that stays up."""
    made = Server(tmp_path / "server", {"TOPICS_WAL_SHARDS": "1"})
    yield made
    if made.process is not None:
        made.stop()


@pytest.mark.crash
@pytest.mark.timeout(3600)
def test_a_killed_query_writes_every_record_once(
    server: Server, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Must-show 4: `kill -9` between and in the middle of batches; the sink is exact."""
    if importlib.util.find_spec("pyspark") is None:
        pytest.skip("PySpark is not installed; ./run spark-setup installs it")
    if find_java() is None:
        pytest.skip(NO_JAVA)
    kills = int(request.config.getoption("--stream-kills", default=1))
    chance = random.Random(kills)
    api = server.start()
    out, checkpoint = tmp_path / "out", tmp_path / "checkpoint"
    total = 0
    for kill in range(kills + 1):
        for topic in ("a", "b"):
            add_sealed(api, topic, 60)
            total += 60
        process = start_stream(server.data_dir, out, checkpoint)
        try:
            begun = committed(checkpoint)
            # Now at once, now after some batches, now somewhere within one.
            wanted = begun + chance.choice([0, 1, 1, 2])
            eventually(partial(reached, checkpoint, wanted), "batches are written", 120)
            time.sleep(chance.random() * 0.4)
            if kill == kills:
                eventually(partial(holds, out, total), "everything is written", 120)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    import pyarrow.parquet as pq

    rows: list[tuple[str, int]] = []
    for path in sink_files(out):
        table = pq.read_table(path, partitioning=None)
        rows += zip(table["topic"].to_pylist(), table["seq"].to_pylist(), strict=True)
    assert len(rows) == len(set(rows)) == total
    assert set(rows) == {(t, n) for t in ("a", "b") for n in range(1, total // 2 + 1)}


def add_sealed(api: Api, topic: str, count: int) -> None:
    """So many records more, sealed."""
    api.add(topic, *range(count))
    good(api.http.post("/v0/admin/seal", json={"topics": [topic]}))


def start_stream(data: Path, out: Path, checkpoint: Path) -> subprocess.Popen[bytes]:
    """A driver of its own, in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", STREAM, str(data), str(out), str(checkpoint)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def committed(checkpoint: Path) -> int:
    """Batches that the checkpoint says are done."""
    folder = checkpoint / "commits"
    return len([p for p in folder.glob("*") if p.name.isdigit()]) if folder.exists() else 0


def reached(checkpoint: Path, batches: int) -> bool:
    """Whether so many batches are done."""
    return committed(checkpoint) >= batches


def holds(out: Path, rows: int) -> bool:
    """Whether so many rows are in the sink."""
    return seen(out) >= rows


def sink_files(out: Path) -> list[Path]:
    """Files that the sink's own log lists: only those count, whatever else a crash left."""
    listed: dict[str, None] = {}
    log = out / "_spark_metadata"
    names = [p for p in log.glob("*") if p.name.split(".")[0].isdigit()] if log.exists() else []
    for path in names:
        for line in path.read_text("utf-8").splitlines()[1:]:
            listed[json.loads(line)["path"].removeprefix("file://").removeprefix("file:")] = None
    return [Path(name) for name in listed]


def seen(out: Path) -> int:
    """Rows in the sink."""
    import pyarrow.parquet as pq

    return sum(pq.read_metadata(path).num_rows for path in sink_files(out) if path.exists())
