"""An Airflow DAG that runs the pipeline every night.

Steps and their state are the pipeline's own: a task that is tried again goes on where the last try
stopped. A cleared task does the whole run again only where there is something new; days are done
again with `topics pipeline run CONFIG --from DAY --to DAY`.
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
