"""The code blocks of the documentation that need Spark or Arrow run unchanged.

`tests/cli/docs` runs all other blocks. Only paths of the pages are replaced by paths of the test.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cli.docs.docs_blocks import Block, Shell, blocks_of, steps_of
from tests.contract.driver import ROOT, Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PAGES = ("docs/ANALYTICS.md", "docs/TOUR.md", "examples/analytics/README.md")
BLOCKS = [block for page in PAGES for block in blocks_of(ROOT / page)]
RECORDS = [
    {"data": {"id": number, "type": "paid", "amount": number}, "tag": "push"}
    for number in range(40)
]


def block_with(words: str) -> Block:
    """The one block that has these words."""
    (found,) = [block for block in BLOCKS if words in block.text]
    return found


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """A folder with `topics-data`, the directory of a running server that has sealed records."""
    folder = tmp_path_factory.mktemp("pages")
    server = Server(folder / "server")
    made = Shell(folder, server.start().url)
    (folder / "run").symlink_to(ROOT / "run")
    for name in ("spark_jobs", "pyspark_topics"):
        (folder / name).symlink_to(ROOT / name)
    try:
        for topic in ("orders.eu", "orders.us", "orders"):
            body = json.dumps({"records": RECORDS})
            command = f"curl -s localhost:4000/v0/topics/{topic} --json '{body}'"
            made.run(steps_of(Block("", 0, "sh", command))[0])
        made.run(steps_of(Block("", 0, "sh", "curl -sX POST localhost:4000/v0/admin/seal"))[0])
        (folder / "topics-data").symlink_to(server.data_dir)
        yield made
    finally:
        server.stop()


def here(shell: Shell, text: str) -> str:
    """A text of a page with the paths of this test."""
    data = str(shell.folder / "topics-data")
    text = text.replace("/srv/topics-data", data).replace("/path/to/data", data)
    return re.sub(r"(?:localhost|127\.0\.0\.1):4000", shell.url.removeprefix("http://"), text)


def run_lines(shell: Shell, block: Block) -> None:
    """Run the lines of a block of shell; each must succeed."""
    for step in steps_of(block):
        done = subprocess.run(
            ["bash", "-c", here(shell, step.command)],
            cwd=shell.folder,
            env={**shell.env, "PYSPARK_PYTHON": sys.executable},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"$ {step.command}\n{done.stdout}{done.stderr}"


def run_python(shell: Shell, text: str) -> str:
    """Run some Python in the folder, in a process of its own; its output."""
    done = subprocess.run(
        [sys.executable, "-c", here(shell, text)],
        cwd=shell.folder,
        env=shell.env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_first_block_seals_runs_a_job_and_makes_a_pipeline(shell: Shell, spark: Any) -> None:
    run_lines(shell, block_with("# Spark, Arrow, pandas and matplotlib into .venv"))
    assert (shell.folder / "volume.svg").read_text().lstrip().startswith("<?xml")
    assert (shell.folder / "pipeline.toml").exists()


def test_the_pipeline_runs_with_the_configuration_it_makes(shell: Shell, spark: Any) -> None:
    (shell.folder / "pipeline.toml").unlink(missing_ok=True)
    run_lines(shell, block_with("# every night; examples/analytics has"))


def test_a_session_of_ones_own_reads_the_source(shell: Shell, spark: Any) -> None:
    printed = run_python(shell, block_with('spark_session("mine")').text)
    assert "orders.eu" in printed
    assert "40" in printed


def test_tables_and_views_of_sql(shell: Shell, spark: Any) -> None:
    for statement in here(shell, block_with("CREATE TABLE events").text).split(";"):
        if statement.strip():
            spark.sql(statement)
    assert spark.sql("SELECT count(*) FROM events").head()[0] == 120
    assert spark.sql("SELECT sum(data.id) FROM orders").head()[0] == 2 * sum(range(40))
    spark.sql("DROP TABLE events")


def test_payload_schemas(shell: Shell, spark: Any) -> None:
    folder = str(shell.folder / "topics-data")
    for line in block_with('option("payloadSchema"').text.splitlines():
        if line.startswith("spark.read"):
            frame = eval(line, {"spark": spark, "dir": folder})
            assert frame.select("data.id").agg({"id": "sum"}).head()[0] == 3 * sum(range(40))


def test_a_stream_reads_everything_once(shell: Shell, spark: Any) -> None:
    folder = str(shell.folder / "topics-data")
    (line,) = block_with("spark.readStream").text.splitlines()
    frame = eval(line, {"spark": spark, "dir": folder})
    query = frame.writeStream.format("memory").queryName("walk").trigger(availableNow=True).start()
    query.awaitTermination(120)
    assert spark.sql("SELECT count(*) FROM walk").head()[0] == 120


def test_exports_and_how_their_files_are_read(shell: Shell, spark: Any) -> None:
    import pandas

    lines = steps_of(block_with("# calls no server"))
    assert len(lines) == 3
    reading = block_with("read_output").text
    for number, step in enumerate(lines):
        out = f"out-{number}"
        run_lines(shell, Block("", 0, "sh", step.command.replace("out/", f"{out}/")))
        names: dict[str, Any] = {"spark": spark, "pandas": pandas}
        exec(reading.replace('"out"', repr(str(shell.folder / out))), names)
        assert names["frame"].count() == (80, 120, 120)[number]


def test_iceberg_tables_and_how_they_are_read(shell: Shell) -> None:
    run_lines(shell, block_with("topics jobs to_iceberg"))
    count, metadata = run_python(shell, block_with("sqlite_catalog").text).split()
    assert count == "30"
    assert metadata.endswith(".metadata.json")


def test_the_blocks_of_the_tour(shell: Shell, spark: Any) -> None:
    (shell.folder / "volume.svg").unlink(missing_ok=True)
    run_lines(shell, block_with("./run jobs topic_volume"))
    assert (shell.folder / "volume.svg").exists()


def test_the_job_of_the_examples(shell: Shell, spark: Any) -> None:
    """In this process; the first block starts the same job by `topics jobs`."""
    from spark_jobs import topic_volume

    (shell.folder / "volume.svg").unlink(missing_ok=True)
    (step,) = steps_of(block_with("topics jobs topic_volume /path/to/data"))
    words = shlex.split(here(shell, step.command))
    assert words[:3] == ["topics", "jobs", "topic_volume"]
    with contextlib.chdir(shell.folder):
        assert topic_volume.main(words[3:]) == 0
    assert (shell.folder / "volume.svg").exists()
