"""The CPU time of a server's process, as the benchmarks read it."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from benchmarks.servers.cpu_time import cpu_seconds

BURN = """
import sys, time
print("ready", flush=True)
sys.stdin.readline()
end = time.process_time() + {seconds}
while time.process_time() < end:
    pass
print("burned", flush=True)
sys.stdin.readline()
"""


def test_it_is_the_kernel_s_own_account_of_this_process() -> None:
    before, began = time.process_time(), cpu_seconds(os.getpid())
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    used, counted = time.process_time() - before, cpu_seconds(os.getpid()) - began
    assert counted == pytest.approx(used, abs=0.02)


def test_less_than_a_tick_is_counted() -> None:
    """A tick is 10 ms, longer than many measured slices."""
    with subprocess.Popen(
        [sys.executable, "-c", BURN.format(seconds=0.002)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        before = cpu_seconds(child.pid)
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "burned\n"
        assert 0.002 <= cpu_seconds(child.pid) - before < 0.01
        child.stdin.write("\n")


def test_a_process_that_has_ended_has_none() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    assert cpu_seconds(child.pid) == 0
