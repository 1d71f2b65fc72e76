"""The fixtures for pytest, as the tests of another project use them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import httpx
import pytest

from tests.contract.driver import ROOT

CONFTEST: Final = 'pytest_plugins = ["topics_server.testing"]\n'
TESTS: Final = """
import pathlib

import httpx

from topics_server.client import Queue
from topics_server.testing import RunningServer


def test_enqueue(topics_server: RunningServer) -> None:
    pathlib.Path("url").write_text(topics_server.url)
    with Queue("mails", url=topics_server.url, create=True) as mails:
        assert mails.enqueue("a").first_seq == 1


def test_again_from_the_beginning(topics_server: RunningServer) -> None:
    assert pathlib.Path("url").read_text() == topics_server.url
    listed = httpx.get(f"{topics_server.url}/v0/topics", trust_env=False)
    assert listed.json()["topics"] == []
    with Queue("mails", url=topics_server.url, create=True) as mails:
        assert mails.enqueue("b").first_seq == 1
"""


@pytest.mark.slow
def test_each_test_gets_the_server_without_topics_and_it_ends_with_the_session(
    tmp_path: Path,
) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_mails.py").write_text(TESTS)
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "TOPICS_API_KEYS": "of-another-server"}
    words = ["-q", "-n", "0", "-W", "error", "-p", "no:cacheprovider", "-p", "no:schemathesis"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, "."],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
    with pytest.raises(httpx.ConnectError):
        httpx.get((tmp_path / "url").read_text(), trust_env=False)
