"""Claim tasks: if many workers try to get the same task, exactly one gets it.

    seq 1 20 | python claim.py http://127.0.0.1:4000/v1/stream/claims ada

The producer has the name of the task, so all workers compete for the same epoch 0 and seq 0. The
first append is stored (200); all others count as repeats (204) and store nothing.
"""

from __future__ import annotations

import sys
from typing import Any

from streams import Stream


def claim(stream: Stream, me: str, task: str) -> dict[str, Any]:
    """Try to get a task; return the name of its owner."""
    answer = stream.append(f"task:{task}", 0, 0, {"task": task, "owner": me})
    if answer.status == 200:
        owner = me
    else:
        assert answer.status == 204, answer
        # Another worker was first; or this worker itself, if the answer to its earlier try was
        # lost.
        owner = owners(stream)[task]
    return {"won": owner == me, "owner": owner, "status": answer.status}


_owners: dict[str, str] = {}


def owners(stream: Stream) -> dict[str, str]:
    """The owner of each task: the writer of its first message."""
    for message in stream.news():
        _owners.setdefault(message["task"], message["owner"])
    return _owners


def main() -> None:
    """Work on the tasks named on standard input."""
    url, me = sys.argv[1:]
    stream = Stream(url)
    for line in sys.stdin:
        task = line.strip()
        found = claim(stream, me, task)
        print(f"{task}: mine, working" if found["won"] else f"{task}: {found['owner']} has it")


if __name__ == "__main__":
    main()
