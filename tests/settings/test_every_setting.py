"""Every setting has a test of its effect and a line for a bad value."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

import pytest
from click.testing import CliRunner

from tests.contract.conftest import NewServer
from tests.contract.driver import ROOT
from tests.settings.rows import ROWS
from topics_server.cli.server.serve import command as serve
from topics_server.settings import Settings, variable

TESTS: Final = ROOT / "tests"


def test_every_setting_has_a_row_and_every_row_a_setting() -> None:
    fields = list(Settings.model_fields)
    missing = [name for name in fields if name not in ROWS]
    assert not missing, (
        f"tests/settings/rows.py has no row for {', '.join(missing)}: add one with a value that "
        "refuses the start and the test (FILE::TEST) that shows the setting's effect"
    )
    gone = [name for name in ROWS if name not in fields]
    assert not gone, f"tests/settings/rows.py has rows for {', '.join(gone)}: no such setting"
    named = re.findall(r"^# (TOPICS_[A-Z_]+)=", (ROOT / ".env.example").read_text(), re.MULTILINE)
    assert named == [variable(name) for name in fields]


@pytest.mark.parametrize("name", ROWS)
def test_the_test_of_its_effect_exists_and_sets_it(name: str) -> None:
    file, _, test = ROWS[name].effect.partition("::")
    text = (TESTS / file).read_text()
    assert re.search(rf"^(async )?def {test}\(", text, re.MULTILINE), f"{file} has no {test}"
    assert variable(name) in text, f"{file} does not set {variable(name)}"


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if not row.is_path])
def test_a_bad_value_refuses_the_start_with_one_line(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in list(os.environ):
        if each.startswith("TOPICS_"):
            monkeypatch.delenv(each)
    monkeypatch.setenv(variable(name), ROWS[name].bad)
    ran = CliRunner().invoke(serve, [])
    assert ran.exit_code == 2
    (line,) = ran.output.splitlines()
    assert line.startswith(variable(name)), line


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.is_path])
def test_a_path_that_cannot_be_used_refuses_the_start_with_one_line(
    own: NewServer, name: str
) -> None:
    server = own(**{variable(name): ROWS[name].bad})
    server.directory.mkdir(parents=True)
    (server.directory / "file").write_text("in the way")
    lines = server.refusal().splitlines()
    errors = [line for line in lines if " ERROR " in line]
    assert len(errors) == 1, lines
    assert Path(ROWS[name].bad).parts[0] in errors[0]
    assert "Traceback" not in "".join(lines)
