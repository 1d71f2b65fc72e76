"""One leader at a time: the server refuses a leader that was replaced but has not noticed.

    python leader.py http://127.0.0.1:4000/v1/stream/cluster ada     # some more of them, then kill

The leader is the process that wrote seq 0 of the newest epoch of the producer `leader`. It writes
everything under that epoch (the fencing token). If the leader is silent for too long, the others
try the next epoch: one of them gets it (200), the rest get 204. The server refuses later writes of
the old leader with 403, so it does no harm even if it wakes up late.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from streams import Answer, Stream

BEAT_S = 1.0
SILENCE_S = 5.0
PRODUCER = "leader"
_leaders: dict[int, str] = {}


def newest(stream: Stream) -> tuple[int, bool]:
    """The newest epoch (-1 if there was none), and whether its leader wrote since the last call."""
    was_heard = False
    for message in stream.news():
        _leaders.setdefault(message["epoch"], message["leader"])
        was_heard = True
    return max(_leaders, default=-1), was_heard


def lead(stream: Stream, me: str, epoch: int) -> dict[str, Any]:
    """Try to become the leader of `epoch`."""
    answer = stream.append(PRODUCER, epoch, 0, {"epoch": epoch, "leader": me, "says": "I lead"})
    assert answer.status in (200, 204, 403), answer
    newest(stream)
    leads = answer.status != 403 and _leaders[epoch] == me
    return {"leads": leads, "status": answer.status, "leader": _leaders[max(_leaders)]}


def say(stream: Stream, me: str, epoch: int, seq: int, text: str) -> Answer:
    """Write as the leader of `epoch`. Returns 403 once there is a later epoch."""
    return stream.append(PRODUCER, epoch, seq, {"epoch": epoch, "leader": me, "says": text})


def reign(stream: Stream, me: str, epoch: int) -> None:
    """Lead until another process becomes the leader."""
    seq = 1
    while True:
        answer = say(stream, me, epoch, seq, f"order {seq}")
        if answer.status == 403:
            print(f"{me}: replaced, epoch {answer.epoch}")
            return
        print(f"{me}: order {seq} of epoch {epoch}")
        seq += 1
        time.sleep(BEAT_S)


def main() -> None:
    """Watch the leader and replace it when it is silent."""
    url, me = sys.argv[1:]
    stream = Stream(url)
    heard_s = time.monotonic()
    while True:
        epoch, was_heard = newest(stream)
        if was_heard:
            heard_s = time.monotonic()
        if epoch == -1 or time.monotonic() - heard_s > SILENCE_S:
            if lead(stream, me, epoch + 1)["leads"]:
                reign(stream, me, epoch + 1)
            heard_s = time.monotonic()
        time.sleep(BEAT_S / 2)


if __name__ == "__main__":
    main()
