"""The steps of a first use, on this checkout; `./run first-use` times them on a fresh one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.browser import chromium
from tests.browser.newcomer.first_use import STEPS, FirstUse
from tests.contract.driver import ROOT

TOPICS = [sys.executable, "-m", "topics_server"]


@pytest.mark.slow
def test_the_pages_lead_from_an_append_to_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if chromium.program() is None:
        pytest.skip(chromium.INSTALL)
    use = FirstUse(ROOT, [*TOPICS, "serve"], [*TOPICS, "demo"], sys.executable)
    use.run(tmp_path)
    assert list(use.seconds) == [*STEPS[1:]]
    assert "pull_request" in use.picture
    told = capsys.readouterr().out
    assert [line.split()[0] for line in told.splitlines()] == [*STEPS[1:]]
