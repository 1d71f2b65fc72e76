"""A streaming query whose driver is killed writes every record once, in both modes.

The driver and its JVM are separate processes; SIGKILL ends both, between batches and in the middle
of them. Meanwhile manifests disappear and return, and segments move to the cold folder: the query
may end with an error of its own, and is restarted. `--stream-kills` sets the number of kills;
tests/spark has a short run of the same.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from spark_jobs.session import NO_JAVA, find_java
from tests.contract.driver import ROOT, Api, Server, eventually, good

STREAM = """
import sys
from spark_jobs.session import spark_session
data, cold, out, checkpoint, mode = sys.argv[1:]
spark = spark_session("killed", master="local[2]", config={
    "spark.driver.memory": "700m", "spark.sql.codegen.wholeStage": "false",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"})
frame = (spark.readStream.format("topics").option("maxRecordsPerTrigger", "40")
         .option("failOnDataLoss", mode).option("coldDir", cold).load(data))
query = (frame.writeStream.format("parquet").option("checkpointLocation", checkpoint)
         .trigger(processingTime="50 milliseconds").start(out))
print("STARTED", flush=True)
query.awaitTermination()
"""
TOPICS = ("a", "b", "c")
# The time of a driver to start and write a batch, on a busy machine.
WITHIN_S = 120


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server that is not killed and moves segments to a cold folder."""
    directory = tmp_path / "server"
    env = {"TOPICS_WAL_SHARDS": "1", "TOPICS_HOT_RETAIN_SEGMENTS": "1"}
    made = Server(directory, {**env, "TOPICS_COLD_DIR": str(directory / "cold")})
    yield made
    if made.process is not None:
        made.stop()


@pytest.mark.crash
@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("mode", ["true", "false"])
def test_a_killed_query_writes_every_record_once(
    server: Server, tmp_path: Path, mode: str, request: pytest.FixtureRequest
) -> None:
    """`failOnDataLoss` is `mode`."""
    kills = int(request.config.getoption("--stream-kills", default=2))
    kill_drivers(server, tmp_path, mode, kills)


def kill_drivers(server: Server, tmp_path: Path, mode: str, kills: int) -> None:
    """Kill this many drivers, let the last one finish, and check the sink."""
    if importlib.util.find_spec("pyspark") is None:
        pytest.skip("PySpark is not installed; ./run spark-setup installs it")
    if find_java() is None:
        pytest.skip(NO_JAVA)
    chance = random.Random(f"{mode} {kills}")
    api = server.start()
    cold = server.directory / "cold"
    out, checkpoint = tmp_path / "out", tmp_path / "checkpoint"
    words = [str(each) for each in (server.data_dir, cold, out, checkpoint, mode)]
    heads = dict.fromkeys(TOPICS, 0)
    killed = vanished = 0
    for _ in range(5 * kills):
        if killed == kills:
            break
        for topic in TOPICS:
            count = chance.choice([20, 60])
            add_sealed(api, topic, count)
            heads[topic] += count
            # A published change; after it the server examines segments and moves them to the cold
            # folder.
            good(api.put(topic, {"cap_records": 10_000 + heads[topic]}))
        with driver(words) as process:
            # Kill at once, after some batches, or within one.
            wanted = committed(checkpoint) + chance.choice([0, 1, 1, 2])
            _wait(process, checkpoint, wanted)
            away: list[Path] = []
            for manifest in sorted(server.data_dir.glob("segments/*/manifest")):
                if chance.random() < 0.5:
                    away += hidden(manifest)
            vanished += len(away)
            time.sleep(chance.random())
            # some manifests stay away during the kill
            for path in away[: chance.randint(0, len(away))]:
                shown_again(path)
            time.sleep(chance.random() * 0.4)
            killed += process.poll() is None
        for path in away:
            shown_again(path)
    assert killed == kills
    assert vanished
    assert any(cold.rglob("*.data")), "segments have moved"
    for _ in range(3):
        with driver(words) as process:
            _wait_for_rows(process, out, sum(heads.values()), WITHIN_S + kills * 10)
            if process.poll() is None:
                time.sleep(1)  # it would wait if there were more batches
                break
    import pyarrow.parquet as pq

    rows: list[tuple[str, int]] = []
    for path in sink_files(out):
        table = pq.read_table(path, partitioning=None)
        rows += zip(table["topic"].to_pylist(), table["seq"].to_pylist(), strict=True)
    assert len(rows) == len(set(rows)), "none twice"
    assert set(rows) == {(t, n) for t in TOPICS for n in range(1, heads[t] + 1)}, "none is missing"


def _wait(process: subprocess.Popen[bytes], checkpoint: Path, batches: int) -> None:
    """Wait until this many batches are done, or the query has ended by itself."""
    eventually(
        lambda: process.poll() is not None or committed(checkpoint) >= batches,
        "batches are written",
        WITHIN_S,
    )


def _wait_for_rows(process: subprocess.Popen[bytes], out: Path, rows: int, within_s: float) -> None:
    """Wait until this many rows are in the sink, or the query has ended by itself."""
    eventually(
        lambda: process.poll() is not None or holds(out, rows), "everything is written", within_s
    )


@contextlib.contextmanager
def driver(words: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A driver in a process group of its own; it is killed after the block."""
    process = subprocess.Popen(
        [sys.executable, "-c", STREAM, *words],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def hidden(manifest: Path) -> list[Path]:
    """Move a manifest away; return its new path, or nothing if the server is replacing it now."""
    away = manifest.with_name("manifest.away")
    try:
        manifest.rename(away)
    except FileNotFoundError:
        return []
    return [away]


def shown_again(away: Path) -> None:
    """Move a manifest back, unless the server has written a newer one meanwhile."""
    with contextlib.suppress(FileExistsError, FileNotFoundError):
        os.link(away, away.with_name("manifest"))
    away.unlink(missing_ok=True)


def add_sealed(api: Api, topic: str, count: int) -> None:
    """Append this many records and seal them."""
    api.add(topic, *range(count))
    good(api.http.post("/v0/admin/seal", json={"topics": [topic]}))


def committed(checkpoint: Path) -> int:
    """The batches that the checkpoint lists as done."""
    folder = checkpoint / "commits"
    return len([p for p in folder.glob("*") if p.name.isdigit()]) if folder.exists() else 0


def holds(out: Path, rows: int) -> bool:
    """Whether this many rows are in the sink."""
    return seen(out) >= rows


def sink_files(out: Path) -> list[Path]:
    """Files in the sink's own log: only these count, whatever else a crash left."""
    listed: dict[str, None] = {}
    log = out / "_spark_metadata"
    names = [p for p in log.glob("*") if p.name.split(".")[0].isdigit()] if log.exists() else []
    for path in names:
        for line in path.read_text("utf-8").splitlines()[1:]:
            listed[json.loads(line)["path"].removeprefix("file://").removeprefix("file:")] = None
    return [Path(name) for name in listed]


def seen(out: Path) -> int:
    """The rows in the sink."""
    import pyarrow.parquet as pq

    return sum(pq.read_metadata(path).num_rows for path in sink_files(out) if path.exists())
