"""A topic whose only writer drops and recreates it: what must be gone after a drop, and what must
not.

The topic has one writer, so at a kill at most the last call is unknown: the history has two
possible ends. The ids of records, which never repeat, tell incarnations apart.
"""

from __future__ import annotations

import http.client
import random
import threading
from typing import Final

from tests.crash.kills.ledger import View
from tests.crash.kills.writers import Connection, Moments, until_taken

_BREAKS: Final = (OSError, http.client.HTTPException)


class Turnover:
    """The topic as its writer knows it: `state` acknowledged, `maybe` if the last call succeeded.

    A state is the list of ids by seq (None for deleted ones), or None if there is no topic.
    """

    def __init__(self, name: str, moments: Moments) -> None:
        self.name = name
        self.moments = moments
        self.state: list[str | None] | None = None
        self.maybe: list[str | None] | None = None

    def writer(self, port: int, seed: str) -> TurnoverWriter:
        """The writer of the next cycle."""
        return TurnoverWriter(self, port, seed)

    def settle(self) -> None:
        """Note that the last call is acknowledged."""
        self.state = self.maybe

    def check(self, view: View | None) -> list[str]:
        """The problems in a reader's view; the state starts anew from it."""
        allowed = (self.state, self.maybe)
        seen: list[str | None] | None = None
        if view is not None:
            seen = [None] * view.head_seq
            for record in view.records:
                seen[record["$seq"] - 1] = record["data"]["id"]
            if view.tombstones:
                return [f"{self.name}: unexpected tombstones {view.tombstones}"]
        self.state = self.maybe = seen
        if seen in allowed:
            return []
        return [f"{self.name}: {_short(seen)} is neither of {[_short(s) for s in allowed]}"]


def _short(state: list[str | None] | None) -> str:
    if state is None:
        return "no topic"
    live = [name for name in state if name is not None]
    return f"head {len(state)}, {len(live)} live, {live[:2]}..{live[-2:]}"


class TurnoverWriter(threading.Thread):
    """Appends to a topic, deletes its oldest records and drops it, until the connection breaks."""

    def __init__(self, topic: Turnover, port: int, seed: str) -> None:
        super().__init__(name="turnover", daemon=True)
        self._topic = topic
        self._connection = Connection(port)
        self._rng = random.Random(f"{seed}/turnover")
        self.stop = threading.Event()
        self.problems: list[str] = []

    def run(self) -> None:
        """Run one operation after the other."""
        try:
            while not self.stop.is_set() and not self.problems:
                self._one()
        except _BREAKS:
            pass
        finally:
            self._connection.close()

    def _one(self) -> None:
        dice = self._rng.random()
        state = self._topic.state
        if state is None or dice < 0.9:
            self._append(state or [])
        elif dice < 0.95:
            before_seq = self._rng.randint(1, len(state) + 1)
            kept = [None] * (before_seq - 1) + state[before_seq - 1 :]
            self._ask("POST", "/delete", {"before_seq": before_seq}, kept)
        else:
            self._ask("DELETE", "", None, None)

    def _append(self, state: list[str | None]) -> None:
        ids = [f"t{self._topic.moments.next()}" for _ in range(self._rng.choice((1, 1, 7)))]
        body = {"records": [{"data": {"id": name}} for name in ids]}
        self._ask("POST", "", body, [*state, *ids])

    def _ask(self, method: str, path: str, body: object, after: list[str | None] | None) -> None:
        topic = self._topic
        topic.maybe = after
        target = f"/v0/topics/{topic.name}{path}"
        status, answer = until_taken(lambda: self._connection.ask(method, target, body), self.stop)
        if status in (200, 201):
            topic.settle()
        else:
            self.problems.append(f"{topic.name}: {method} {path}: {status} {answer}")
