"""`topics pipeline`: every step once for the present records, over kills, over days, in a
cluster.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, Final

import pytest

from spark_jobs import pipeline
from spark_jobs.running.pipeline_config import EXAMPLE, BadConfig, read_config
from tests.contract.driver import ROOT, Api, Server, eventually
from tests.crash.kills.test_webhooks import EVENT_LIST, TOPIC, load
from tests.spark.conftest import HAS_SPARK, INSTALL
from tests.spark.logs import seal_all

if not HAS_SPARK:
    pytest.skip(f"PySpark is not installed; {INSTALL}", allow_module_level=True)

from spark_jobs.session import find_java

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
"spark.driver.extraJavaOptions" = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"spark.executor.extraJavaOptions" = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
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


def fill(api: Api, count: int) -> None:
    """Append records to two topics and seal them."""
    for n in range(count):
        api.add("a", n, tag=f"t{n % 3}")
        api.add("b", {"n": n})
    seal_all(api)


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
    text = CONFIG.format(data=data, kind=kind, master=master)
    if url is not None:
        text = text.replace("[source]\n", f'[source]\nurl = "{url}"\n', 1)
    path.write_text(text)
    return path


def states(made: pipeline.PipelineRun) -> dict[str, str]:
    """The state of each step, by name and day."""
    return {f"{step.name} {step.day or ''}".strip(): step.state for step in made.steps}


def digests(folder: Path) -> dict[str, str]:
    """A hash of the rows in each folder of an output, whatever the names of its files."""
    import pyarrow.parquet as pq

    found: dict[str, list[str]] = {}
    for path in folder.rglob("*.parquet"):
        rows = found.setdefault(str(path.parent.relative_to(folder)), [])
        rows += [repr(sorted(row.items())) for row in pq.ParquetFile(path).read().to_pylist()]
    return {k: hashlib.sha256("\n".join(sorted(v)).encode()).hexdigest() for k, v in found.items()}


# -- configuration -------------------------------------------------------------------------------


def test_the_written_configuration_is_a_good_one(tmp_path: Path, capfd: Any) -> None:
    path = tmp_path / "p.toml"
    assert pipeline.main(["init", str(path)]) == 0
    assert path.read_text("utf-8") == EXAMPLE
    config = read_config(path)
    assert (config.lake_kind, config.master, len(config.jobs)) == ("export", "local[*]", 3)
    assert [job.by for job in config.jobs] == ["day", "day", "run"]
    assert pipeline.main(["init", str(path)]) == 2
    assert "it is not replaced" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("was", "now", "told"),
    [
        ("data_dir", "datadir", "source.data_dir is missing"),
        ("[state]", "[stat]", "there is no table stat"),
        ('kind = "to_parquet"', 'kind = "iceberg"', "lake.kind is export or to_parquet"),
        ('name = "topic_volume"', 'name = "volume"', "there is no job 'volume' here"),
        ('out = "tags"', 'out = "volume"', "two outputs go to one folder"),
        ('out = "tags"', 'out = "tags"\noptions = ["--out", "x"]', "is said by the pipeline"),
        ("[[jobs]]", "[[job]]", "there is no table job"),
    ],
)
def test_what_is_refused(was: str, now: str, told: str, tmp_path: Path) -> None:
    path = write_config(tmp_path, tmp_path / "data")
    path.write_text(path.read_text().replace(was, now))
    with pytest.raises(BadConfig, match=told):
        read_config(path)


def test_no_output_of_a_pipeline_goes_into_the_store(server: Server, tmp_path: Path) -> None:
    api = server.start()
    api.add("a", 1)
    seal_all(api)
    for place in ("lake", "state", "volume"):
        path = write_config(tmp_path / place, server.data_dir)
        text = path.read_text().replace(f'"{place}"', f'"{server.data_dir / "x"}"')
        path.write_text(text)
        assert pipeline.main(["run", str(path), "--dry-run"]) == 2
        assert pipeline.main(["run", str(path)]) == 2
    assert not (server.data_dir / "x").exists()


# -- days and kills ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_day_once_over_kills_and_new_days(spark: Any, server: Server, tmp_path: Path) -> None:
    """In one process the run is ended after each step and continues; a second day adds only its own
    results.
    """
    with on_day(server, DAYS[0]) as api:
        fill(api, 4)
    once, cut = tmp_path / "once", tmp_path / "cut"
    config = read_config(write_config(once, server.data_dir))
    planned = pipeline.run(config, is_dry=True)
    assert set(states(planned).values()) == {"planned"}
    assert sorted(path.name for path in once.iterdir()) == ["pipeline.toml"]
    done = pipeline.run(config)
    assert states(done) == {
        f"to_parquet {DAYS[0]}": "done",
        f"topic_volume {DAYS[0]}": "done",
        f"tag_activity {DAYS[0]}": "done",
        "integrity_audit": "done",
    }
    again = states(pipeline.run(config))
    assert again == {**dict.fromkeys(states(done), "skipped"), "integrity_audit": "done"}

    class Killed(BaseException):
        pass

    def end(_step: pipeline.Step) -> None:
        raise Killed

    halting = read_config(write_config(cut, server.data_dir))
    for _ in range(3):

        def end_after_work(step: pipeline.Step) -> None:
            if step.state == "done":
                end(step)

        with pytest.raises(Killed):
            pipeline.run(halting, on_step=end_after_work)
    finished = states(pipeline.run(halting))
    assert [finished[key] for key in finished] == ["skipped", "skipped", "skipped", "done"]
    first = digests(once)
    assert digests(cut) == first
    assert len(first) > 4

    with on_day(server, DAYS[1]) as api:
        fill(api, 2)
    second = pipeline.run(config)
    assert {key for key, state in states(second).items() if state == "done"} == {
        f"to_parquet {DAYS[1]}",
        f"topic_volume {DAYS[1]}",
        f"tag_activity {DAYS[1]}",
        "integrity_audit",
    }
    after = digests(once)
    assert {key: after[key] for key in first if "audit" not in key} == {
        key: value for key, value in first.items() if "audit" not in key
    }
    assert all(DAYS[1] in key for key in after.keys() - first.keys())
    # A range of days runs again whatever the state says, and nothing else does.
    chosen = (date.fromisoformat(DAYS[0]), date.fromisoformat(DAYS[0]))
    assert set(states(pipeline.run(config, chosen=chosen))) == set(states(done))
    assert digests(once) == after


def test_one_run_at_a_time_and_failures_are_reported(
    spark: Any, server: Server, tmp_path: Path, capfd: Any
) -> None:
    api = server.start()
    api.add("a", 1)
    path = write_config(tmp_path, server.data_dir, kind="export")
    text = path.read_text().replace("[lake]", f'url = "{api.url}"\n[lake]')
    path.write_text(text.replace('out = "tags"', 'out = "tags"\noptions = ["--bucket-s", "soon"]'))
    with pipeline.locked(read_config(path).state):
        assert pipeline.main(["run", str(path)]) == 3
    capfd.readouterr()
    assert pipeline.main(["run", str(path), "--json"]) == 1
    told = json.loads(capfd.readouterr().out)
    found = {step["step" if "step" in step else "name"]: step["state"] for step in told["steps"]}
    assert found == {
        "seal": "done",
        "export": "done",
        "topic_volume": "done",
        "tag_activity": "failed",
        "integrity_audit": "done",
    }
    assert json.loads((tmp_path / "lake" / "_export.json").read_text())["topics"]["a"]["files"]
    path.write_text(text.replace(api.url, "http://127.0.0.1:1"))
    assert pipeline.main(["run", str(path)]) == 1
    assert "does not answer" in capfd.readouterr().out


# -- the command, killed; a cluster ------------------------------------------------------------


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
        assert process.wait(WITHIN_S) == 0, path.with_suffix(".log").read_text()[-3000:]


@contextlib.contextmanager
def standalone_cluster(folder: Path) -> Iterator[str]:
    """A master and two workers on loopback; its URL. They end with the block."""
    folder.mkdir(parents=True)
    java = find_java()
    assert java is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    import pyspark

    launcher = Path(pyspark.__file__).parent / "bin" / "spark-class"
    env = {
        **os.environ,
        "JAVA_HOME": java,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_WORKER_DIR": str(folder / "work"),
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_NO_DAEMONIZE": "1",
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "src"))),
    }
    url = f"spark://127.0.0.1:{port}"
    host = ["--host", "127.0.0.1", "--webui-port", "0"]
    base = "org.apache.spark.deploy"
    wanted = [
        [f"{base}.master.Master", *host, "--port", str(port)],
        *([f"{base}.worker.Worker", *host, "--cores", "1", "--memory", "600m", url],) * 2,
    ]
    processes: list[subprocess.Popen[bytes]] = []
    log = folder / "log.txt"
    try:
        for words in wanted:
            with log.open("ab") as out:
                processes.append(
                    subprocess.Popen(
                        [str(launcher), *words],
                        env=env,
                        stdout=out,
                        stderr=out,
                        start_new_session=True,
                    )
                )
            if len(processes) == 1:
                eventually(lambda: "I have been elected leader" in log.read_text(), "a master", 60)
        eventually(
            lambda: log.read_text().count("Successfully registered with master") == 2,
            "two workers",
            60,
        )
        yield url
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def told(path: Path) -> list[str]:
    """The steps that runs of a configuration reported, in order."""
    log = path.with_suffix(".log")
    lines = log.read_text("utf-8", "replace").splitlines() if log.exists() else []
    return [line.split(": ", 1)[1] for line in lines if line.startswith("topics pipeline: ")]


def kill_after_steps(path: Path, steps: int = 1) -> int:
    """Run the command again and again, and kill it each time after so many further steps; returns
    the number of kills.

    The first kill is after the seal. Ends when the last step is done.
    """
    kills = 0
    for wanted in (1, *[1 + steps] * 20):
        begun = len(told(path))
        with running(path) as process:

            def is_due(count: int = begun + wanted) -> bool:
                return len(told(path)) >= count or process.poll() is not None

            eventually(is_due, "one step more is done", WITHIN_S)
            kills += process.poll() is None
            if any(each.startswith("integrity_audit") for each in told(path)[begun:]):
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


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("where", ["local", "cluster"])
def test_a_command_that_is_killed_after_each_step(
    spark: Any, server: Server, tmp_path: Path, where: str, request: pytest.FixtureRequest
) -> None:
    """From the webhook events: the seal, a day of the lake, each job; then a second day.

    `kill -9` of all processes of the command, on this machine's cores and on a standalone cluster
    of two workers: on the first day after each step here, and after every second step in the
    cluster. `--pipeline-kills` kills after each step on both days in both; the test above ends each
    step in this process. The result is that of one run in this process that was never killed; a
    second day adds its own files and touches no other.
    """
    everywhere = bool(request.config.getoption("--pipeline-kills", default=False))
    with contextlib.ExitStack() as stack:
        master = "local[2]"
        if where == "cluster":
            master = stack.enter_context(standalone_cluster(tmp_path / "machines"))
        cut, whole = tmp_path / "cut", tmp_path / "whole"
        with on_day(server, DAYS[0]) as api:
            load(server)
            path = write_config(cut, server.data_dir, master=master, url=api.url)
            if where == "local" or everywhere:
                assert kill_after_steps(path) >= 4
            else:
                assert kill_after_steps(path, 2) >= 2
            steps = [each.split(":")[0] for each in told(path)]
            names = ("to_parquet", "topic_volume", "tag_activity")
            assert [each for each in steps if each != "seal"] == [
                *(f"{name} {DAYS[0]}" for name in names),
                "integrity_audit",
            ]
            run_whole(path)
            pipeline.run(read_config(write_config(whole, server.data_dir, url=api.url)))
        first = digests(cut)
        assert first == digests(whole)
        assert len(first) >= 4
        lake = [key for key in first if key.startswith("lake")]
        assert lake == [f"lake/topic={TOPIC}/day={DAYS[0]}"]
        kept = frozen(cut)

        with on_day(server, DAYS[1]) as api:
            api.add(TOPIC, *(json.loads(event.data) for event in EVENT_LIST[:50]))
            path = write_config(cut, server.data_dir, master=master, url=api.url)
            if everywhere:
                assert kill_after_steps(path) >= 4
            elif where == "local":
                assert kill_after_steps(path, 3) >= 2
            run_whole(path)
            pipeline.run(read_config(write_config(whole, server.data_dir, url=api.url)))
        after = digests(cut)
        assert after == digests(whole)
        new = {key for key in after.keys() - first.keys() if "audit" not in key}
        assert len(new) >= 4
        assert all(DAYS[1] in key for key in new)
        assert {key: at for key, at in frozen(cut).items() if key in kept} == kept
        if where == "cluster":
            log = (tmp_path / "machines" / "log.txt").read_text()
            runs = log.count("Registering app")
            assert runs >= 4
            assert log.count("Asked to launch executor") >= 2 * runs - 2, "on both workers"


# -- examples ------------------------------------------------------------------------------------


def test_the_examples_run_the_command() -> None:
    folder = ROOT / "examples" / "analytics"
    line = (folder / "crontab").read_text("utf-8").splitlines()[-1]
    fields = line.split(None, 5)
    assert len(fields) == 6
    assert "topics pipeline run" in fields[5]
    tree = ast.parse((folder / "airflow_dag.py").read_text("utf-8"))
    made = run_dag(tree)
    assert made["schedule"] == "15 0 * * *"
    assert made["max_active_runs"] == 1
    assert "topics pipeline run" in made["command"]


def run_dag(tree: ast.Module) -> dict[str, Any]:
    """Run the module with stand-ins for Airflow's two classes; return the objects it made."""
    made: dict[str, Any] = {}

    class Dag:
        def __init__(self, _name: str, **given: Any) -> None:
            made.update(given)

        def __enter__(self) -> Dag:
            return self

        def __exit__(self, *_error: object) -> None:
            made["whole"] = True

    def operator(*, task_id: str, bash_command: str, **_given: Any) -> None:
        made.update(task=task_id, command=bash_command)

    tree.body = [
        node
        for node in tree.body
        if not (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("airflow"))
    ]
    exec(compile(tree, "airflow_dag.py", "exec"), {"DAG": Dag, "BashOperator": operator})
    assert made["whole"]
    assert made["start_date"].tzinfo is UTC
    return made
