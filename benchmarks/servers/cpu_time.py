"""CPU time of processes as the kernel counts it, to the nanosecond. Linux only.

Standard library only, because the load generator imports it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
# The lower bits of a clock id: the scheduler's account of a whole process, ended threads included
# (clock_getcpuclockid).
_PROCESS_CLOCK = 2


def read_proc(name: str) -> str:
    """A file of `/proc`; empty if the process has ended."""
    try:
        return Path(f"/proc/{name}").read_text()
    except OSError:
        return ""


def family(pid: int) -> list[int]:
    """A process and all its descendants."""
    found = [pid]
    for member in found:  # the list grows during the loop
        found += map(int, read_proc(f"{member}/task/{member}/children").split())
    return found


def cpu_seconds(pid: int) -> float:
    """CPU time so far of a process and all its descendants, user and system.

    The time of ended children is known in ticks of 10 ms only.
    """
    used = 0.0
    for member in family(pid):
        fields = read_proc(f"{member}/stat").rpartition(")")[2].split()
        used += sum(map(int, fields[13:15])) / TICKS_PER_SECOND  # of ended children
        try:
            used += time.clock_gettime((~member << 3) | _PROCESS_CLOCK)
        except OSError:  # ended after it was listed
            continue
    return used
