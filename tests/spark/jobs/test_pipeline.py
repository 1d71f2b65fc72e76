"""`topics pipeline` in this process: configuration, each step once, days, failures, examples.

`test_pipeline_kills` and `test_pipeline_cluster` run the command itself.
"""

from __future__ import annotations

import ast
import json
from datetime import UTC, date
from pathlib import Path
from typing import Any

import pytest

from spark_jobs import pipeline
from spark_jobs.running.pipeline_config import EXAMPLE, BadConfig, read_config
from tests.contract.driver import ROOT, Api, Server
from tests.spark.conftest import HAS_SPARK, INSTALL
from tests.spark.jobs.pipelines import DAYS, digests, on_day, write_config
from tests.spark.logs import seal_all

if not HAS_SPARK:
    pytest.skip(f"PySpark is not installed; {INSTALL}", allow_module_level=True)


def fill(api: Api, count: int) -> None:
    """Append records to two topics and seal them."""
    for n in range(count):
        api.add("a", n, tag=f"t{n % 3}")
        api.add("b", {"n": n})
    seal_all(api)


def states(made: pipeline.PipelineRun) -> dict[str, str]:
    """The state of each step, by name and day."""
    return {f"{step.name} {step.day or ''}".strip(): step.state for step in made.steps}


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
    """In one process: a run that ends after each step continues; a second day adds only its day."""
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
