"""Dashboard and alerts use metrics that a real scrape has, and the docs explain each alert."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml  # type: ignore[import-untyped]

from tests.contract.conftest import NewServer
from tests.contract.driver import ROOT, good

ALERTS: Final = ROOT / "docker" / "prometheus" / "alerts.yml"
DASHBOARD: Final = ROOT / "docker" / "grafana" / "topics.json"
OPERATIONS: Final = ROOT / "docs" / "OPERATIONS.md"
# Words of the expression language that are no metric names.
WORDS: Final = frozenset("and or unless by on ignoring without group_left group_right bool".split())
# Labels that Prometheus adds to every target.
ITS_OWN: Final = frozenset({"up"})
NAME: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def expressions() -> Iterator[str]:
    for rule in rules():
        yield rule["expr"]
    dashboard = json.loads(DASHBOARD.read_text())
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            (found,) = re.findall(r"^label_values\((.+), instance\)$", variable["query"])
            yield found
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield target["expr"]


def parts_of(expression: str) -> tuple[set[str], set[tuple[str, str, str]]]:
    """Metric names in an expression; and (metric, label, value) of its exact matches."""
    matches = {
        (found[1], label, value)
        for found in re.finditer(r"(\w+)\{([^}]*)\}", expression)
        for label, value in re.findall(r'(\w+)="([^"]*)"', found[2])
    }
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]|\b(by|without|on|ignoring) *\([^)]*\)", " ", expression)
    assert not re.search(r"[{}\[\]\"]", bare), f"brackets do not match: {expression}"
    assert bare.count("(") == bare.count(")"), f"brackets do not match: {expression}"
    names = {
        name[0]
        for name in NAME.finditer(bare)
        # A name before a parenthesis is a function, one after a digit an exponent.
        if not bare[name.end() :].lstrip().startswith("(")
        and not (name.start() and bare[name.start() - 1].isdigit())
    }
    return names - WORDS, matches


@pytest.mark.parametrize("expression", sorted(set(expressions())))
def test_every_expression_names_something(expression: str) -> None:
    assert parts_of(expression)[0]


def test_names_are_found_where_they_stand() -> None:
    expression = 'sum by (a, le) (rate(x_total{b="c",d=~"e"}[5m])) > 3 * y and z == 1e3'
    assert parts_of(expression) == ({"x_total", "y", "z"}, {("x_total", "b", "c")})


@pytest.mark.connection(reason="some figures are of our connections")
def test_each_figure_they_name_is_in_a_real_scrape(own: NewServer, tmp_path: Path) -> None:
    (tmp_path / "backups").mkdir()
    (tmp_path / "archive").mkdir()
    server = own(
        TOPICS_BACKUP_DIR=str(tmp_path / "backups"),
        TOPICS_ARCHIVE_URL=f"file://{tmp_path / 'archive'}",
    )
    api = server.start()
    good(api.put("jobs", {"type": "queue", "durability": "fsync"}))
    api.add("jobs", 1)
    good(api.http.put("/v0/routers/r", json={"source": "jobs", "dest": "copies"}))
    good(api.http.put("/v0/topics/jobs/views/v", json={"shortcut": {"count_by_tag": True}}))
    good(api.diff("jobs"))
    api.http.get("/v0/metrics")
    text = api.http.get("/v0/metrics").text
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    shown = {re.split(r"[{ ]", line)[0] for line in lines}
    for expression in expressions():
        names, matches = parts_of(expression)
        assert names - ITS_OWN <= shown, f"{names - ITS_OWN - shown} of {expression}"
        for name, label, value in matches:
            # Prometheus adds the job; codes and routes appear with their first request.
            if label not in ("job", "instance", "code"):
                wanted = f'{label}="{value}"'
                assert any(line.startswith(f"{name}{{") and wanted in line for line in lines), (
                    f"{name} has no {wanted}"
                )
    server.stop()


def test_each_alert_is_whole_and_has_its_paragraph() -> None:
    manual = OPERATIONS.read_text()
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names)) > 10
    for rule in rules():
        assert rule["labels"]["severity"] in ("page", "ticket"), rule["alert"]
        assert rule["annotations"]["summary"], rule["alert"]
        found = re.search(rf"^- \*\*{rule['alert']}\*\*(.+?)(?=^- |^#|\Z)", manual, re.M | re.S)
        assert found, f"{rule['alert']} is not explained in {OPERATIONS.name}"
        assert len(found[1]) > 120, f"{rule['alert']}: what it means, and what to do"
    explained = re.findall(r"^- \*\*(Topics\w+)\*\*", manual, re.M)
    assert explained == names, "in the order of the rules, none that is gone"


def test_the_dashboard_asks_for_a_source_and_overlaps_nothing() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        assert panel["datasource"]["uid"] == "${source}"
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
