"""A client in the background: it runs only when the server and the measured client are idle.

Real clients of this kind run on other machines, so here they must not take the server's processor
time. Called by `crowd` and `stalled`.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from typing import Any


def answer_jobs(run: Callable[[Any], dict[str, Any]]) -> None:
    """Read jobs from standard input and write the answers of `run`, until the input ends."""
    gc.disable()
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    for line in sys.stdin:
        try:
            answer = run(json.loads(line))
        except Exception as error:
            answer = {"failed": repr(error)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
