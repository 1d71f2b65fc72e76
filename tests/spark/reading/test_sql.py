"""Tables and views of Spark SQL over the source, and the queries of the examples."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.driver import ROOT, Server
from tests.spark.conftest import HAS_SPARK, INSTALL
from tests.spark.logs import seal_all

if not HAS_SPARK:
    pytest.skip(f"PySpark is not installed; {INSTALL}", allow_module_level=True)

from spark_jobs import sessions, tag_activity, topic_volume


@pytest.fixture
def events(spark: Any, server: Server) -> Iterator[Path]:
    """A directory, and the tables and views that the examples define over it."""
    api = server.start()
    for n in range(6):
        api.add("a", n, tag=f"t{n % 2}", node=f"n{n % 3}")
    api.add("a", "untagged")
    for n in range(3):
        api.add("orders.eu", {"id": n, "amount": 1.5 * n})
    seal_all(api)
    yield server.data_dir
    spark.sql("DROP TABLE IF EXISTS events")
    spark.sql("DROP VIEW IF EXISTS orders")


def statements(data_dir: Path) -> dict[str, str]:
    """The statements of the examples by name, over this directory; the first ones have no name."""
    text = (ROOT / "examples" / "analytics" / "queries.sql").read_text("utf-8")
    text = text.replace("/srv/topics-data", str(data_dir))
    found: dict[str, str] = {}
    for number, each in enumerate(text.split(";\n")):
        name = re.search(r"-- name: (\w+)", each)
        code = "\n".join(line for line in each.splitlines() if not line.startswith("--"))
        if code.strip():
            found[name[1] if name else f"statement {number}"] = code
    return found


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_queries_say_what_the_jobs_say(spark: Any, events: Path) -> None:
    made = statements(events)
    for name, code in made.items():
        if name.startswith("statement"):
            spark.sql(code)
    table = spark.table("events")
    for name, wanted in (
        ("topic_volume", topic_volume.transform(table)),
        ("tag_activity", tag_activity.transform(table).drop("rank")),
        ("sessions", sessions.transform(table)),
    ):
        got = spark.sql(made[name])
        assert sorted(got.columns) == sorted(wanted.columns), name
        rows = [row.asDict() for row in got.select(*sorted(got.columns)).collect()]
        assert rows == [row.asDict() for row in wanted.select(*sorted(got.columns)).collect()]
        assert rows, name
    (row,) = spark.sql(made["revenue"]).collect()
    assert (row.topic, row.amount) == ("orders.eu", 4.5)


def test_a_table_is_read_by_each_statement_and_dropped_alone(spark: Any, events: Path) -> None:
    options = f"OPTIONS (path '{events}', topics 'a', columns 'topic,seq,tag')"
    spark.sql(f"CREATE TABLE events USING topics {options}")
    assert spark.table("events").columns == ["topic", "seq", "tag"]
    assert spark.sql("SELECT count(*) FROM events WHERE tag = 't1' AND seq > 2").first()[0] == 2
    files = sorted(events.rglob("*.data"))
    spark.sql("DROP TABLE events")
    assert sorted(events.rglob("*.data")) == files
    assert files
