"""Ctrl-C ends a verb wherever it lands."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from topics_server.cli import stopping

# The interrupt is raised in a destructor, where Python prints exceptions and continues.
_LOST = """
import signal, sys
from topics_server.cli.stopping import stopped_by_user

class Cleanup:
    def __del__(self):
        sys.stdout.write("cleaning\\n")
        sys.stdout.flush()
        signal.pause()

with stopped_by_user():
    Cleanup()
    while True:
        signal.pause()
"""


def test_an_interrupt_that_lands_in_a_clean_up_ends_the_verb() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _LOST], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as verb:
        assert verb.stdout is not None
        assert verb.stdout.readline() == b"cleaning\n"
        verb.send_signal(signal.SIGINT)
        assert verb.wait(30) == 0


def test_code_after_the_verb_is_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr("os._exit", ended.append)
    monkeypatch.setattr(stopping, "_END_S", 0.05)
    with stopping.stopped_by_user():
        signal.raise_signal(signal.SIGINT)
    with stopping.stopped_by_reader():
        pass
    time.sleep(0.2)
    assert ended == []
