"""Change a value that others also change, without losing a change: optimistic concurrency.

    python counter.py http://127.0.0.1:4000/v1/stream/counters visits 100

Read version N, compute, write as version N+1. The version is the Producer-Seq, so the server
accepts N+1 from one writer only. Other writers get 204 and read again. A write that skips a version
gets 409.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

from streams import Stream

_newest: dict[str, dict[str, Any]] = {}
_writers: dict[tuple[str, int], str] = {}


def state(stream: Stream, name: str) -> dict[str, Any]:
    """The newest version of a counter."""
    for message in stream.news():
        _newest[message["name"]] = message
        _writers[message["name"], message["version"]] = message["by"]
    return _newest.get(name, {"version": -1, "value": 0})


def add(stream: Stream, me: str, name: str, amount: int = 1) -> dict[str, Any]:
    """Add to a counter. The result lists each try as [version, status]."""
    tries: list[list[int]] = []
    while True:
        now = state(stream, name)
        version, value = now["version"] + 1, now["value"] + amount
        message = {"name": name, "version": version, "value": value, "by": me}
        answer = stream.append(f"row:{name}", 0, version, message)
        tries.append([version, answer.status])
        # 204: another writer stored this version. 409 cannot happen: no writer skips a version.
        assert answer.status in (200, 204), answer
        if answer.status == 204:
            state(stream, name)
        # Compare the writer, because the version may be ours although the answer to an earlier try
        # was lost.
        if answer.status == 200 or _writers[name, version] == me:
            return {"version": version, "value": value, "tries": tries}


def main() -> None:
    """Count up."""
    url, name, times = sys.argv[1:]
    stream = Stream(url)
    me = f"{socket.gethostname()}-{os.getpid()}"
    for _ in range(int(times)):
        found = add(stream, me, name)
        print(f"{name} = {found['value']} after {len(found['tries'])} tries")


if __name__ == "__main__":
    main()
