"""The forks that tests start behave like processes of `topics`: streams, environment, end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import forks
from tests.contract.driver import Server

PIPES: dict[str, Any] = dict.fromkeys(forks.STREAMS, subprocess.PIPE)


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TOPICS_")}
    paths = [str(forks.ROOT / "src"), kept.get("PYTHONPATH", "")]
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | more


def said(words: list[str], cwd: Path, env: dict[str, str], stdin: bytes = b"") -> Any:
    with forks.start(words, env, cwd, **PIPES) as fork:
        assert isinstance(fork, forks.Forked)
        return (*fork.communicate(stdin, 30), fork.returncode)


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["config"],
        ["ls", "--url", "http://127.0.0.1:1"],
        ["ls", "--no-such-option"],
        ["append", "t", "\udcff"],
        ["append", "t", "ä"],
        ["load", "t", "-"],
        ["serve", "--port", "x"],
    ],
)
def test_a_fork_says_and_returns_what_a_process_does(tmp_path: Path, words: list[str]) -> None:
    env = environment(TOPICS_URL="http://127.0.0.1:1", TOPICS_DATA_DIR="here")
    process = subprocess.run(
        [sys.executable, "-m", "topics_server", *words],
        env=env,
        cwd=tmp_path,
        input=b"1\n2\n",
        capture_output=True,
        check=False,
    )
    whole = (process.stdout, process.stderr, process.returncode)
    assert said(words, tmp_path, env, b"1\n2\n") == whole


def test_a_server_is_killed_and_its_end_is_told(tmp_path: Path) -> None:
    server = Server(tmp_path)
    for number in (signal.SIGKILL, signal.SIGTERM):
        server.start()
        process = server.process
        assert isinstance(process, forks.Forked)
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        code = server.signal(number)
        assert code == (-number if number == signal.SIGKILL else 0)
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)


def test_what_python_reads_at_its_start_is_given_to_a_real_one(tmp_path: Path) -> None:
    process = forks.start(["--version"], environment(PYTHONUTF8="1"), tmp_path, **PIPES)
    with process:
        assert not isinstance(process, forks.Forked)
        assert process.communicate(timeout=30)[0].startswith(b"topics")
