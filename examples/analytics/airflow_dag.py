"""An Airflow DAG that runs the pipeline every night.

The pipeline stores the state of its steps, so a task that is tried again continues where the last
try stopped. A cleared task repeats only the steps with new records. To repeat days, run
`topics pipeline run CONFIG --from DAY --to DAY`.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from airflow import DAG
from airflow.operators.bash import BashOperator

CONFIG = "/srv/topics/pipeline.toml"

with DAG(
    "topics_pipeline",
    schedule="15 0 * * *",
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    catchup=False,
    max_active_runs=1,
    default_args={"retries": 2, "retry_delay": timedelta(minutes=10)},
):
    BashOperator(task_id="run", bash_command=f"topics pipeline run {CONFIG} --json")
