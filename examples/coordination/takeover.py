"""Take over a task whose owner is silent. If the owner was only slow, its report is refused.

    python takeover.py http://127.0.0.1:4000/v1/stream/tasks ada resize-7 --timeout 30

Each task has its own producer. A claim is epoch 0 and seq 0 of this producer; a report is the next
seq. A worker that finds a claim older than the timeout overrides the claim with the next epoch: if
several workers try, one append is stored (200), the others count as repeats (204). From then on the
server refuses every append in the old epoch (403).
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from streams import Answer, Stream

_claims: dict[str, dict[str, Any]] = {}


def claim_of(stream: Stream, task: str) -> dict[str, Any] | None:
    """The current claim of a task."""
    for message in stream.news():
        if message["kind"] == "claim":
            _claims[message["task"]] = message
    return _claims.get(task)


def take(stream: Stream, me: str, task: str, timeout_ms: int = 30_000) -> dict[str, Any]:
    """Claim a task, or override a claim that is too old; return its owner and epoch.

    `status` is None if there was no try, because the current claim is recent.
    """
    held = claim_of(stream, task)
    # Owners write the time of their own clocks, so choose a timeout well above the difference of
    # the clocks.
    now_ms = int(time.time() * 1000)
    if held is not None and (held["owner"] == me or now_ms - held["at_ms"] < timeout_ms):
        won = held["owner"] == me
        return {"won": won, "owner": held["owner"], "epoch": held["epoch"], "status": None}
    epoch = 0 if held is None else held["epoch"] + 1
    message = {"kind": "claim", "task": task, "owner": me, "epoch": epoch, "at_ms": now_ms}
    answer = stream.append(f"task:{task}", epoch, 0, message)
    assert answer.status in (200, 204, 403), answer
    held = claim_of(stream, task)
    assert held is not None, "somebody's claim is stored"
    won = held["owner"] == me
    return {"won": won, "owner": held["owner"], "epoch": held["epoch"], "status": answer.status}


def report(stream: Stream, me: str, task: str, epoch: int, seq: int, text: str) -> Answer:
    """Write the result of a task as its owner since `epoch`. Returns 403 if the task has another
    owner now.
    """
    message = {"kind": "report", "task": task, "owner": me, "epoch": epoch, "text": text}
    return stream.append(f"task:{task}", epoch, seq, message)


def main() -> None:
    """Take one task, work on it, and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("me")
    parser.add_argument("task")
    parser.add_argument("--timeout", type=float, default=30, help="seconds")
    parser.add_argument("--works", type=float, default=5, help="seconds")
    options = parser.parse_args()
    stream = Stream(options.url)
    found = take(stream, options.me, options.task, int(options.timeout * 1000))
    if not found["won"]:
        print(f"{found['owner']} has it since epoch {found['epoch']}")
        return
    print(f"mine since epoch {found['epoch']}; working")
    time.sleep(options.works)
    answer = report(stream, options.me, options.task, found["epoch"], 1, "done")
    if answer.status == 403:
        print(f"too late: it was taken over in epoch {answer.epoch}")
    else:
        print("done")


if __name__ == "__main__":
    main()
