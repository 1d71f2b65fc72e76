"""A server that follows the producers' rules, and an unreliable network between it and a client's
batches.

`ModelServer` is the contract in a few lines. `Network` carries requests: it loses requests and
answers, reorders them, and delivers copies of requests much later, when no caller waits for the
answer. Time is a number that the test increases.
"""

from __future__ import annotations

import dataclasses
import itertools
from random import Random
from typing import Any

from topics_server.client.errors import Throttled, Unavailable, Undelivered, Unreachable
from topics_server.client.producing.batches import (
    Outgoing,
    ProducerBatches,
    RecordBatch,
    SendTerms,
    Stored,
)
from topics_server.client.producing.targets import Accepted, Beaten, Repeated, StampGap, Verdict


@dataclasses.dataclass
class ModelServer:
    """One topic or stream and one producer id."""

    knows_keys: bool
    log: list[bytes] = dataclasses.field(default_factory=list)
    state: tuple[int, int] | None = None
    keys: dict[str, int] = dataclasses.field(default_factory=dict)

    def append(self, records: list[bytes], epoch: int, seq: int, key: str = "") -> Verdict:
        """Handle one request by the rules of the producer headers."""
        if self.state is None:
            if seq:
                return StampGap(0)
        else:
            known, last = self.state
            if epoch < known:
                return Beaten(known)
            if epoch > known and seq:
                raise AssertionError("a new epoch begins with seq 0")
            if epoch == known and seq <= last:
                return Repeated(last)
            if epoch == known and seq > last + 1:
                return StampGap(last + 1)
        self.state = (epoch, seq)
        if self.knows_keys and key in self.keys:
            return Accepted(self.keys[key])
        self.keys[key] = len(self.log) + 1
        self.log += records
        return Accepted(len(self.log) - len(records) + 1)

    def rival(self) -> None:
        """Another process claims the next epoch and writes."""
        epoch = 0 if self.state is None else self.state[0] + 1
        assert isinstance(self.append([b"rival"], epoch, 0, f"rival-{epoch}"), Accepted)


class Client:
    """A client's batches and the results of its records."""

    def __init__(self, terms: SendTerms, epoch: int | None = None, seq: int | None = None) -> None:
        self.book = ProducerBatches(terms, self._settle, epoch, seq)
        self.fates: dict[bytes, Stored | Undelivered] = {}
        self.sent: list[bytes] = []
        self._keys = itertools.count()

    def _settle(self, batch: RecordBatch, outcome: Stored | Undelivered) -> None:
        for record in batch.records:
            assert record not in self.fates, "settled once"
            self.fates[record] = outcome
        if isinstance(outcome, Stored):
            batch.delivery.set_result(outcome)
        else:
            batch.delivery.set_exception(outcome)

    def send(self, record: bytes, now_ms: float) -> None:
        self.book.add(record, lambda: f"k{next(self._keys)}", now_ms)
        self.sent.append(record)


class Network:
    """The network between a client and a server; `chance` decides its faults."""

    def __init__(self, client: Client, server: ModelServer, chance: Random) -> None:
        self.client = client
        self.server = server
        self.now_ms = 0.0
        self.chance = chance
        self.flying: list[Outgoing] = []
        self.answers: list[tuple[Outgoing, Verdict]] = []
        self.strays: list[Outgoing] = []
        self.most_flying = 0

    def take(self) -> None:
        """Let the client send what it wants to send."""
        found = self.client.book.take(self.now_ms)
        self.flying += found
        self.most_flying = max(self.most_flying, len(self.flying) + len(self.answers))
        assert not self.client.book.take(self.now_ms), "all at once"
        next_ms = self.client.book.next_ms()
        assert next_ms is None or next_ms > self.now_ms, "no reason to ask again at once"

    def arrive(self, out: Outgoing) -> Verdict:
        key = "" if out.is_probe else out.batch.key
        return self.server.append(list(out.batch.records), out.epoch, out.seq, key)

    def answer(self, out: Outgoing, verdict: Verdict) -> None:
        self.client.book.answered(out, verdict, self.now_ms, self.chance.random())

    def step(self) -> None:
        """One event for a message in flight."""
        what = self.chance.choice(
            "arrive arrive arrive back back back lose stray fail time".split()
        )
        pick: Any = self.chance.choice
        if what == "arrive" and self.flying:
            self.flying.remove(out := pick(self.flying))
            self.answers.append((out, self.arrive(out)))
        elif what == "back" and self.answers:
            self.answers.remove(back := pick(self.answers))
            self.answer(*back)
        elif what == "lose" and self.answers:
            self.answers.remove(back := pick(self.answers))
            self.answer(back[0], Unreachable("lost", sent=True))
        elif what == "lose" and self.flying:
            self.flying.remove(out := pick(self.flying))
            if self.chance.random() < 0.5:
                self.strays.append(out)  # it may arrive at any time, though no caller waits for it
                self.answer(out, Unreachable("late", sent=True))
            else:
                self.answer(out, Unreachable("no connection", sent=False))
        elif what == "stray" and self.strays:
            self.strays.remove(out := pick(self.strays))
            self.arrive(out)
        elif what == "fail" and self.flying:
            self.flying.remove(out := pick(self.flying))
            if self.chance.random() < 0.5:
                self.answer(out, Throttled(429, "throttled", "later", None, 10))
            else:
                if self.chance.random() < 0.5:
                    self.arrive(out)
                self.answer(out, Unavailable(503, "unavailable", "sorry"))
        elif what == "time":
            self.now_ms += self.chance.randrange(1, 200)
        self.take()

    def heal(self) -> None:
        """Everything arrives and returns from now on."""
        self.client.book.flush()
        for _ in range(10_000):
            self.take()
            if self.flying:
                self.answers.append((out := self.flying.pop(0), self.arrive(out)))
            elif self.answers:
                self.answer(*self.answers.pop(0))
            elif self.client.book.is_idle or self.client.book.failure is not None:
                return
            else:
                next_ms = self.client.book.next_ms()
                assert next_ms is not None, "nothing is under way, and nothing is to come"
                self.now_ms = max(self.now_ms + 1, next_ms)
        raise AssertionError("it does not come to an end")

    def check(self) -> None:
        """Compare the reported results with the server's records."""
        ours = [record for record in self.server.log if record != b"rival"]
        assert len(set(ours)) == len(ours), "nothing is doubled"
        assert ours == [record for record in self.client.sent if record in set(ours)], "in order"
        for record in self.client.sent:
            fate = self.client.fates[record]
            if isinstance(fate, Stored):
                assert record in ours, "nothing that is acknowledged is lost"
            elif not fate.in_doubt:
                assert record not in ours, "what is told to be lost is lost"
