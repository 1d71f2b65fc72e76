"""Runs of `topics pipeline` for tests: days that pass, configurations, killed commands."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Final

from spark_jobs import pipeline
from spark_jobs.running.pipeline_config import read_config
from tests.contract.driver import ROOT, Api, Server, eventually
from tests.crash.kills.test_webhooks import EVENT_LIST, TOPIC, load
from tests.spark import class_archive

# A server whose wall clock the test moves: days pass without waiting.
MOVED_CLOCK: Final = """
import os, sys, time
real, moved = time.time_ns, int(os.environ["MOVED_NS"])
time.time_ns = lambda: real() + moved
from topics_server.cli import main
sys.argv = ["topics", "serve"]
main()
"""
# The time limit of one command on a busy machine.
WITHIN_S: Final = 280
LAST_STEP: Final = "integrity_audit"
DAYS: Final = ("2026-03-01", "2026-03-02", "2026-03-03")
CONFIG: Final = """
[source]
data_dir = "{data}"
[lake]
path = "lake"
kind = "{kind}"
[state]
path = "state"
[spark]
master = "{master}"
[spark.config]
"spark.driver.memory" = "512m"
"spark.executor.memory" = "512m"
"spark.cores.max" = "2"
"spark.sql.shuffle.partitions" = "2"
"spark.sql.codegen.wholeStage" = "false"
"spark.driver.extraJavaOptions" = "-XX:+UseSerialGC"
"spark.executor.extraJavaOptions" = "-XX:+UseSerialGC {java}"
[[jobs]]
name = "topic_volume"
out = "volume"
[[jobs]]
name = "tag_activity"
out = "tags"
[[jobs]]
name = "integrity_audit"
out = "audit"
"""


@contextlib.contextmanager
def on_day(server: Server, day: str) -> Iterator[Api]:
    """Run the server at noon of a day, UTC."""
    noon = datetime.fromisoformat(f"{day}T12:00:00+00:00").timestamp()
    server.env = {**server.env, "MOVED_NS": str(int((noon - time.time()) * 1e9))}
    server.command = (sys.executable, "-c", MOVED_CLOCK)
    yield server.start()
    server.stop()


def write_config(
    folder: Path,
    data: Path,
    kind: str = "to_parquet",
    master: str = "local[2]",
    url: str | None = None,
) -> Path:
    """Write a configuration into a folder of its own, where all outputs go. `url`: the server to
    seal.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "pipeline.toml"
    java = class_archive.java_options()
    text = CONFIG.format(data=data, kind=kind, master=master, java=java)
    if url is not None:
        text = text.replace("[source]\n", f'[source]\nurl = "{url}"\n', 1)
    path.write_text(text)
    return path


def digests(folder: Path) -> dict[str, str]:
    """A hash of the rows in each folder of an output, whatever the names of its files."""
    import pyarrow.parquet as pq

    found: dict[str, list[str]] = {}
    for path in folder.rglob("*.parquet"):
        rows = found.setdefault(str(path.parent.relative_to(folder)), [])
        rows += [repr(sorted(row.items())) for row in pq.ParquetFile(path).read().to_pylist()]
    return {k: hashlib.sha256("\n".join(sorted(v)).encode()).hexdigest() for k, v in found.items()}


def command(path: Path) -> subprocess.Popen[bytes]:
    """`topics pipeline run` in a process group of its own."""
    paths = os.pathsep.join((str(ROOT), str(ROOT / "src")))
    with path.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "topics_server", "pipeline", "run", str(path)],
            cwd=path.parent,
            env={**os.environ, "PYTHONPATH": paths},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


@contextlib.contextmanager
def running(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The running command; the rest of its group is killed after the block."""
    process = command(path)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_whole(path: Path) -> None:
    """Run the command to its end, which must be a success."""
    with running(path) as process:
        assert process.wait(WITHIN_S) == 0, output(path)[-3000:]


def told(path: Path) -> list[str]:
    """The steps that runs of a configuration reported, in order."""
    lines = output(path).splitlines()
    return [line.split(": ", 1)[1] for line in lines if line.startswith("topics pipeline: ")]


def output(path: Path) -> str:
    """All that runs of a configuration wrote."""
    log = path.with_suffix(".log")
    return log.read_text("utf-8", "replace") if log.exists() else ""


def kill_after_steps(path: Path, steps: int = 1, *, also_last: bool = True) -> int:
    """Run the command again and again, killed as soon as it has done so many steps more; how often.

    The first kill is after the seal. Ends when the last step is done: that run is killed too, or it
    must end well (`also_last`).
    """
    kills = 0
    for wanted in (1, *[1 + steps] * 20):
        begun = len(told(path))
        with running(path) as process:

            def is_due(count: int = begun + wanted) -> bool:
                return len(told(path)) >= count or process.poll() is not None

            eventually(is_due, "one step more is done", WITHIN_S)
            is_last = any(each.startswith(LAST_STEP) for each in told(path)[begun:])
            if is_last and not also_last:
                assert process.wait(WITHIN_S) == 0, output(path)[-3000:]
                return kills
            kills += process.poll() is None
            if is_last:
                return kills
    raise AssertionError(told(path))


def frozen(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of each Parquet file of a folder, except the audit's, which every run
    makes.
    """
    files = [path for path in folder.rglob("*.parquet") if "audit" not in path.parts]
    return {
        str(path.relative_to(folder)): (path.stat().st_ino, path.stat().st_mtime_ns)
        for path in files
    }


def two_days(
    server: Server,
    folder: Path,
    first: Callable[[Path], None],
    second: Callable[[Path], None],
    master: str = "local[2]",
) -> None:
    """From the webhook events: the seal, a day of the lake, each job; then a second day.

    `first` and `second` run the command of a configuration on these days, with kills, up to a run
    that ends well. The result must be that of one run in this process that was never killed; the
    second day must add files of its own and touch no other.
    """
    cut, whole = folder / "cut", folder / "whole"
    with on_day(server, DAYS[0]) as api:
        load(server)
        path = write_config(cut, server.data_dir, master=master, url=api.url)
        first(path)
        steps = [each.split(":")[0] for each in told(path)]
        names = ("to_parquet", "topic_volume", "tag_activity")
        done = [*(f"{name} {DAYS[0]}" for name in names), LAST_STEP]
        once = [each for each in steps if each != "seal"]
        # A run after all steps are done repeats only the audit.
        assert once in (done, [*done, LAST_STEP])
        pipeline.run(read_config(write_config(whole, server.data_dir, url=api.url)))
    before = digests(cut)
    assert before == digests(whole)
    assert len(before) >= 4
    lake = [key for key in before if key.startswith("lake")]
    assert lake == [f"lake/topic={TOPIC}/day={DAYS[0]}"]
    kept = frozen(cut)

    with on_day(server, DAYS[1]) as api:
        api.add(TOPIC, *(json.loads(event.data) for event in EVENT_LIST[:50]))
        path = write_config(cut, server.data_dir, master=master, url=api.url)
        second(path)
        pipeline.run(read_config(write_config(whole, server.data_dir, url=api.url)))
    after = digests(cut)
    assert after == digests(whole)
    new = {key for key in after.keys() - before.keys() if "audit" not in key}
    assert len(new) >= 4
    assert all(DAYS[1] in key for key in new)
    assert {key: at for key, at in frozen(cut).items() if key in kept} == kept
