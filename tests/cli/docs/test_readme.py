"""The README and the map of the documentation: commands print what is shown, and links work."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import document, overview
from benchmarks.report.figures import report_from_json
from tests.contract.driver import ROOT, Server

README = (ROOT / "README.md").read_text()
# The parts of an answer that differ from run to run.
VARYING = re.compile(r'"(?:\$ts|deadline)":\d+|"lease_id":"lease_[0-9a-f]+"')


def shown() -> list[tuple[list[str], str]]:
    """Each curl line of the README with the answer shown after it."""
    (block,) = re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    found = []
    for part in block.strip().split("\n\n"):
        line, answer = part.splitlines()
        found.append((shlex.split(line.removeprefix("$ ")), answer))
    return found


def test_the_answers_are_those_that_the_readme_shows(tmp_path: Path) -> None:
    server = Server(tmp_path)
    api = server.start()
    try:
        for words, answer in shown():
            assert words[:2] == ["curl", "--json"]
            path = words[3].removeprefix("localhost:4000")
            headers = {"content-type": "application/json", "prefer": "return=minimal"}
            got = api.http.post(path, content=words[2], headers=headers)
            assert VARYING.sub("", got.text) == VARYING.sub("", answer)
    finally:
        server.stop()


def test_its_first_answers_fit_on_a_line_of_a_wide_terminal() -> None:
    assert max(len(answer) for _, answer in shown()) <= 200


def test_the_chart_and_table_of_speed_are_drawn_from_the_kept_report() -> None:
    report = report_from_json(
        json.loads((ROOT / "benchmarks" / "results" / "overview.json").read_text())
    )
    assert (ROOT / "docs" / "images" / "speed.svg").read_text() == overview.picture(report)
    page = (ROOT / "docs" / "PERFORMANCE.md").read_text()
    assert page == document.replaced(page, overview.table(report))
    assert "](docs/images/speed.svg)" in README
    assert "](images/speed.svg)" in page


def test_a_report_without_peers_leaves_their_columns_empty() -> None:
    kept = json.loads((ROOT / "benchmarks" / "results" / "overview.json").read_text())
    report = report_from_json(kept)
    peers = ("redis", "postgres")
    alone = [figure for figure in report.figures if figure.case not in peers]
    table = overview.table(replace(report, figures=alone))
    (line,) = [line for line in table.splitlines() if "append one record, 16" in line]
    assert line.endswith(" |  |  |  |")
    with pytest.raises(ValueError, match="append of one record, 1 connection"):
        overview.table(replace(report, figures=alone[1:]))


DOCUMENTS = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "performance").glob("*.md")),
]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files_and_headings_that_exist(document: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if "://" in target:
            continue
        name, _, heading = target.partition("#")
        path = (document.parent / name).resolve() if name else document
        if not path.exists() or (heading and heading not in anchors(path)):
            broken.append(target)
    assert broken == []


def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings, made from their words."""
    headings: list[Any] = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


def test_the_map_names_every_document() -> None:
    text = "".join((ROOT / "docs" / name).read_text() for name in ("README.md", "PERFORMANCE.md"))
    missing = [path.name for path in DOCUMENTS[1:] if path.name not in text]
    assert [name for name in missing if name != "README.md"] == []
    assert json.loads((ROOT / "docs" / "openapi.json").read_text())["openapi"].startswith("3.")
