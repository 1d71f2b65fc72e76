"""Eight writers that load a server until it dies, each in a thread with its own connection.

They note every answer in the ledgers; a broken connection leaves its last call unknown. A writer
draws all random choices from its own seed. Any answer but success is a problem, kept in
`Writer.problems`.
"""

from __future__ import annotations

import http.client
import itertools
import json
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from tests.crash.kills.ledger import Call, Delete, Json, TopicLedger

_BREAKS: Final = (OSError, http.client.HTTPException)
# A group of records that share a tag; a delete by tag takes one such group.
# Between two tries of a request that the server was too busy for.
_THROTTLED_S: Final = 0.2
_GROUP_CALLS: Final = 12
_KEEP_SEQS: Final = 1500
PAD: Final = "abcdefghijklmnopqrstuvwxyz" * 6


class Connection:
    """One keep-alive connection; `ask` raises `OSError` or `HTTPException` when it breaks."""

    def __init__(self, port: int) -> None:
        self._http = http.client.HTTPConnection("127.0.0.1", port, timeout=20)

    def ask(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Json]:
        """Status and decoded body of one request; `body` bytes are sent unchanged."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **(headers or {})}
        self._http.request(method, path, raw if body is not None else None, sent)
        response = self._http.getresponse()
        answer: Json = json.loads(response.read())
        return response.status, answer

    def close(self) -> None:
        """Close the connection to the server."""
        self._http.close()


@dataclass(slots=True)
class Moments:
    """The only counter of a run: call numbers and times."""

    _count: Any = field(default_factory=lambda: itertools.count(1))

    def next(self) -> int:
        """A number larger than every one before; safe from any thread."""
        return int(next(self._count))


def make_call(
    moments: Moments, rng: random.Random, tags: list[str | None], how: str, key: str | None
) -> Call:
    """Make one append of `len(tags)` records; `how` says where the key goes: body or header."""
    number = moments.next()
    records: list[Json] = []
    for index, tag in enumerate(tags):
        data = {"id": f"{number}.{index}", "pad": PAD[: rng.randrange(len(PAD))]}
        records.append({"data": data} if tag is None else {"data": data, "tag": tag})
    body: Json = {"records": records}
    if key is not None and how == "body":
        body["idempotency_key"] = key
    raw = json.dumps(body).encode()
    in_header = key is not None and how == "header"
    return Call(number, tags, raw, key, in_header, moments.next())


def send(connection: Connection, topic: str, call: Call) -> tuple[int, Json]:
    """Send an append, with its key in that place."""
    assert call.key is None or not call.in_header or call.key.isascii()
    headers = {"Idempotency-Key": call.key} if call.in_header and call.key else {}
    return connection.ask("POST", f"/v0/topics/{topic}", call.body, headers)


def until_taken(ask: Callable[[], tuple[int, Json]], stop: threading.Event) -> tuple[int, Json]:
    """Repeat a request while the server is too busy, because nothing of a throttled request was
    stored.
    """
    while True:
        status, answer = ask()
        if status != 429 or answer["error"]["code"] != "throttled":
            return status, answer
        if stop.wait(_THROTTLED_S):
            raise ConnectionError("stopped while throttled")


class Writer(threading.Thread):
    """Works on `topics` until the connection breaks or `stop` is set."""

    def __init__(
        self, name: str, port: int, topics: list[TopicLedger], moments: Moments, seed: str
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._connection = Connection(port)
        self._topics = topics
        self._moments = moments
        self._rng = random.Random(f"{seed}/{name}")
        self._calls = 0
        self._last: dict[str, Call] = {}
        self.stop = threading.Event()
        self.problems: list[str] = []

    def run(self) -> None:
        """Run one operation after the other."""
        try:
            while not self.stop.is_set() and not self.problems:
                self._one(self._rng.choice(self._topics))
        except _BREAKS:
            pass
        finally:
            self._connection.close()

    def _one(self, topic: TopicLedger) -> None:
        dice = self._rng.random()
        if dice < 0.80:
            self._append(topic)
        elif dice < 0.86:
            self._retry(topic)
        elif dice < 0.97:
            self._delete_some(topic)
        else:
            body = {"from_seq": 0, "limit": 50}
            status, answer = self._asked(
                lambda: self._connection.ask("POST", f"/v0/topics/{topic.name}/diff", body)
            )
            self._expect(status == 200, topic, "diff", status, answer)

    def _asked(self, ask: Callable[[], tuple[int, Json]]) -> tuple[int, Json]:
        return until_taken(ask, self.stop)

    def _tag(self) -> str:
        return f"{self.name}:g{self._calls // _GROUP_CALLS}"

    def _append(self, topic: TopicLedger) -> None:
        rng = self._rng
        self._calls += 1
        count = 1 if rng.random() < 0.6 else rng.randint(2, 20)
        tags = [self._tag() if rng.random() < 0.8 else None for _ in range(count)]
        how = rng.choice(("", "", "body", "header"))
        key = f"{self.name}-{self._moments.next()}" if how else None
        call = make_call(self._moments, rng, tags, how, key)
        topic.calls.append(call)
        status, answer = self._asked(lambda: send(self._connection, topic.name, call))
        if self._expect(status in (200, 201), topic, "append", status, answer):
            call.first_seq = answer["first_seq"]
            call.acked = self._moments.next()
            spread = answer["last_seq"] - answer["first_seq"] + 1 == count
            self._expect(spread and not answer["deduped"], topic, "append", status, answer)
            if key is not None:
                self._last[topic.name] = call

    def _retry(self, topic: TopicLedger) -> None:
        call = self._last.get(topic.name)
        if call is None:
            return
        status, answer = self._asked(lambda: send(self._connection, topic.name, call))
        fits = status == 200 and answer["deduped"] and answer["first_seq"] == call.first_seq
        self._expect(fits, topic, f"retry of {call.number} at {call.first_seq}", status, answer)

    def _delete_some(self, topic: TopicLedger) -> None:
        rng = self._rng
        body: Json = {}
        before_seq = tag = prefix = None
        kind = rng.choice(("tag", "tag", "prefix", "before", "both"))
        if kind in ("tag", "both"):
            group = max(0, self._calls // _GROUP_CALLS - rng.randint(0, 6))
            tag = body["match"] = f"{self.name}:g{group}"
        if kind == "prefix":
            prefix = f"{self.name}:g{rng.randint(0, 9)}"
            body["match"] = ["tag", "Glob", prefix + "*"]
        if kind in ("before", "both"):
            newest = max((c.first_seq or 0 for c in topic.calls[-20:]), default=topic.head_seq)
            before_seq = body["before_seq"] = max(1, newest - _KEEP_SEQS)
        delete = Delete(before_seq, tag, prefix, self._moments.next())
        topic.deletes.append(delete)
        path = f"/v0/topics/{topic.name}/delete"
        status, answer = self._asked(lambda: self._connection.ask("POST", path, body))
        if self._expect(status == 200, topic, "delete", status, answer):
            delete.acked = self._moments.next()

    def _expect(
        self, holds: bool, topic: TopicLedger, what: str, status: int, answer: Json
    ) -> bool:
        if not holds:
            self.problems.append(f"{topic.name}: {what} by {self.name}: {status} {answer}")
        return holds
