"""`topics pipeline run` on a standalone cluster of two workers, killed and continued."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spark_jobs.session import find_java
from tests.contract.driver import ROOT, Server, eventually
from tests.spark.jobs.pipelines import kill_after_steps, run_whole, two_days


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


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_command_of_a_cluster_that_is_killed(
    spark: Any, server: Server, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """`kill -9` of all processes of the command, behind the seal and behind a later step.

    `test_pipeline_kills` kills behind each step; `--pipeline-kills` does so here, on both days.
    """
    everywhere = bool(request.config.getoption("--pipeline-kills", default=False))

    def killed(path: Path) -> None:
        assert kill_after_steps(path) >= 4
        run_whole(path)

    def killed_once(path: Path) -> None:
        assert kill_after_steps(path, 2, also_last=False) >= 2

    first, second = (killed, killed) if everywhere else (killed_once, run_whole)
    with standalone_cluster(tmp_path / "machines") as url:
        two_days(server, tmp_path, first, second, master=url)
    log = (tmp_path / "machines" / "log.txt").read_text()
    runs = log.count("Registering app")
    assert runs >= 3
    assert log.count("Asked to launch executor") >= 2 * runs - 2, "on both workers"
