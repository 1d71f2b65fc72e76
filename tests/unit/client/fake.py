"""A queue server in a thread that follows §10's rules and fails when a case asks for it.

Jobs, leases and fences are real, times are the wall clock's; `faults` holds the replacements for
the next calls of an operation. `asked` has the requests in order. Used through `conftest`.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import select
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

RETRY = b"retry: 2000\n\n: hb 1\n\n"


def now_ms() -> int:
    """The wall clock."""
    return int(time.time() * 1000)


@dataclass
class Refusal:
    """Send this answer instead."""

    status: int
    code: str = "c"
    headers: dict[str, str] = field(default_factory=dict)
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass
class Broken:
    """Close the connection: before or after executing the request."""

    done: bool = False


@dataclass
class Held:
    """Wait for the event, then execute the request."""

    event: threading.Event


Fault = Refusal | Broken | Held


@dataclass
class Entry:
    """One job."""

    seq: int
    record: dict[str, Any]
    ready_ms: int
    deliveries: int = 0
    lease_id: str = ""
    node: str = ""
    ends_ms: int = 0
    stream: int = 0

    def is_leased(self) -> bool:
        return bool(self.lease_id) and now_ms() <= self.ends_ms

    def release(self, delay_ms: int = 0) -> None:
        self.lease_id, self.stream, self.ready_ms = "", 0, now_ms() + delay_ms


class FakeQueue:
    """The state behind the handler; every access under `changed`."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.jobs: dict[int, Entry] = {}
        self.head = 0
        self.leases = 0
        self.keys: dict[str, tuple[int, int]] = {}
        self.config: dict[str, Any] = {"type": "queue", "lease_ms": 30_000}
        self.faults: dict[str, deque[Fault]] = defaultdict(deque)
        self.asked: list[tuple[str, Any]] = []
        self.tokens: set[str | None] = set()
        self.has_stream = True
        self.is_page = False  # a page in place of a stream
        self.is_silent = False  # a stream that is opened and held back
        self.streams = 0
        self.held_back: set[int] = set()  # streams that send nothing more
        self.cut = 0  # streams up to this number are broken
        self.batch_max: int | None = None  # a longer batch is refused, as in §11
        self.frames: deque[bytes] = deque()  # sent at the next opportunity, on any stream
        self.has_wait = True
        # Whether a claim takes an ack, as older servers do not.
        self.has_rounds = True
        self.is_closing = False

    # -- for tests -------------------------------------------------------------------------------

    def add(self, *datas: Any, **record: Any) -> None:
        with self.changed:
            for data in datas:
                self.head += 1
                self.jobs[self.head] = Entry(self.head, {"data": data, **record}, now_ms())
            self.changed.notify_all()

    def calls(self, op: str) -> list[Any]:
        """The bodies of the calls of one operation."""
        with self.changed:
            return [body for name, body in self.asked if name == op]

    def steal(self, seq: int, node: str = "thief") -> None:
        """Let another worker take a leased job."""
        with self.changed:
            self.leases += 1
            entry = self.jobs[seq]
            entry.lease_id, entry.node, entry.stream = f"lease_{self.leases:x}", node, 0
            entry.ends_ms = now_ms() + 60_000

    def cut_streams(self) -> None:
        with self.changed:
            self.cut = self.streams
            self.changed.notify_all()

    def wait_for(self, what: Any, within_s: float = 10.0) -> None:
        """Wait until `what()` is true."""
        with self.changed:
            assert self.changed.wait_for(what, within_s), "it did not happen"

    @property
    def leased(self) -> list[int]:
        with self.changed:
            return [seq for seq, entry in self.jobs.items() if entry.is_leased()]

    # -- the rules -------------------------------------------------------------------------------

    def lease(self, node: str, count: int, lease_ms: int, stream: int = 0) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for entry in self.jobs.values():
            if len(rows) == count:
                break
            if entry.is_leased() or entry.ready_ms > now_ms():
                continue
            self.leases += 1
            entry.deliveries += 1
            entry.lease_id, entry.node, entry.stream = f"lease_{self.leases:x}", node, stream
            entry.ends_ms = now_ms() + lease_ms
            row = {"$seq": entry.seq, "$ts": 1, "lease_id": entry.lease_id}
            row |= {"deadline": entry.ends_ms, "deliveries": entry.deliveries}
            names = {"tag": "$tag", "data": "data", "meta": "meta"}
            row |= {names[k]: v for k, v in entry.record.items() if k in names}
            rows.append(row)
        if rows:
            self.changed.notify_all()
        return rows

    def fenced(self, body: dict[str, Any]) -> tuple[list[Entry], list[int]]:
        found, skipped = [], []
        assert len(body["seqs"]) == len(body["lease_ids"])
        for seq, lease_id in zip(body["seqs"], body["lease_ids"], strict=True):
            entry = self.jobs.get(seq)
            if entry is None or entry.lease_id != lease_id or entry.node != body["node"]:
                skipped.append(seq)
            else:
                found.append(entry)
        return found, skipped

    def do(self, op: str, body: dict[str, Any]) -> dict[str, Any]:
        """Execute one call of §10 or §2."""
        answer: dict[str, Any] = {"topic": "q", "performance": {}}
        with self.changed:
            if op == "append":
                return answer | self._append(body)
            if op == "claim":
                if "ack" in body and self.has_rounds:
                    found, skipped = self.fenced({"node": body["node"], **body["ack"]})
                    for entry in found:
                        del self.jobs[entry.seq]
                    answer["ack"] = {"acked": len(found), "skipped": skipped}
                rows = self._claim(body)
                return answer | {"claimed": rows, "count": len(rows), "ready": 0}
            found, skipped = self.fenced(body)
            for entry in found:
                if op == "ack":
                    del self.jobs[entry.seq]
                elif op == "nack":
                    entry.release(body["delay_ms"])
                else:
                    entry.ends_ms = now_ms() + body["lease_ms"]
                    if body.get("no_more"):
                        self.held_back.add(entry.stream)
            answer[{"ack": "acked", "nack": "nacked", "extend": "extended"}[op]] = len(found)
            if op == "extend":
                answer["deadlines"] = {str(entry.seq): entry.ends_ms for entry in found}
            self.changed.notify_all()
            return answer | {"skipped": skipped}

    def _append(self, body: dict[str, Any]) -> dict[str, Any]:
        known = self.keys.get(body["idempotency_key"])
        if known is None:
            first = self.head + 1
            for record in body["records"]:
                self.add(record["data"], **{k: v for k, v in record.items() if k != "data"})
                self.jobs[self.head].ready_ms += record.get("delay_ms", 0)
            self.keys[body["idempotency_key"]] = (first, self.head)
        first, last = known or self.keys[body["idempotency_key"]]
        return {"first_seq": first, "last_seq": last, "deduped": known is not None}

    def _claim(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        until = now_ms() + (body.get("wait_ms", 0) if self.has_wait else 0)
        while True:
            rows = self.lease(body["node"], body["max"], body.get("lease_ms", 30_000))
            left_ms = until - now_ms()
            if rows or left_ms <= 0 or self.is_closing:
                return rows
            self.changed.wait(min(left_ms, 10) / 1000)


class Handler(http.server.BaseHTTPRequestHandler):
    """The HTTP side of `FakeQueue`."""

    protocol_version = "HTTP/1.1"

    @property
    def queue(self) -> FakeQueue:
        found: FakeQueue = self.server.queue  # type: ignore[attr-defined]
        return found

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        rest = urlsplit(self.path).path.removeprefix("/v0/topics/").split("/")
        self._serve(rest[1] if len(rest) > 1 else "append", body)

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        op = "work" if parts.path.endswith("/work") else "state"
        op = "list" if parts.path == "/v0/topics" else op
        self._serve(op, {k: v[0] for k, v in parse_qs(parts.query).items()})

    def _serve(self, op: str, body: dict[str, Any]) -> None:
        queue = self.queue
        with queue.changed:
            queue.asked.append((op, body))
            queue.tokens.add(self.headers["Authorization"])
            fault = queue.faults[op].popleft() if queue.faults[op] else None
            if queue.batch_max is not None and len(body.get("seqs", ())) > queue.batch_max:
                fault = Refusal(400, "batch_too_large", detail={"max_claim": queue.batch_max})
            queue.changed.notify_all()
        if isinstance(fault, Refusal):
            self._refuse(fault)
            return
        if isinstance(fault, Held):
            fault.event.wait(20)
        if isinstance(fault, Broken):
            if fault.done:
                queue.do(op, body)
            self.close_connection = True
            return
        if op == "work":
            self._work(body)
        elif op == "list":
            self._answer(200, {"topics": [{"topic": "q"}]})
        elif op == "state":
            self._answer(200, self._state())
        else:
            self._answer(200, queue.do(op, body))

    def _state(self) -> dict[str, Any]:
        queue = self.queue
        with queue.changed:
            leased = len(queue.leased)
            count = len(queue.jobs)
            state = {"topic": "q", "head_seq": queue.head, "count": count, "config": queue.config}
            if queue.config["type"] == "queue":
                ready = count - leased
                state["queue"] = {"ready": ready, "in_flight": leased, "dead_lettered": 0}
            return state

    def _work(self, query: dict[str, str]) -> None:
        queue = self.queue
        if not queue.has_stream:
            self._refuse(Refusal(404, "not_found"))
            return
        if queue.is_page:
            self._answer(200, {})
            return
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        with queue.changed:
            queue.streams += 1
            number = queue.streams
            queue.changed.notify_all()
        try:
            if queue.is_silent:
                self._until_gone()
                return
            self.wfile.write(RETRY)
            self._push(number, query)
        except OSError:
            pass
        finally:
            with queue.changed:
                for entry in queue.jobs.values():
                    if entry.stream == number:
                        entry.release()
                queue.changed.notify_all()

    def _push(self, number: int, query: dict[str, str]) -> None:
        queue = self.queue
        lease_ms = int(query.get("lease_ms", "30000"))
        while not self._is_gone():
            with queue.changed:
                if number <= queue.cut or queue.is_closing:
                    return
                mine = sum(e.stream == number for e in queue.jobs.values())
                room = 0 if number in queue.held_back else int(query["max"]) - mine
                rows = queue.lease(query["node"], room, lease_ms, number)
                frames = [
                    b"id: %d\nevent: job\ndata: %s\n\n" % (r["$seq"], json.dumps(r).encode())
                    for r in rows
                ]
                frames += queue.frames
                if queue.frames:
                    queue.frames.clear()
                    queue.changed.notify_all()
                if not frames:
                    queue.changed.wait(0.005)
            self.wfile.write(b"".join(frames))

    def _is_gone(self) -> bool:
        readable, _, _ = select.select([self.connection], [], [], 0)
        return bool(readable)

    def _until_gone(self) -> None:
        while not self._is_gone() and not self.queue.is_closing:
            select.select([self.connection], [], [], 0.01)

    def _refuse(self, refusal: Refusal) -> None:
        error = {"code": refusal.code, "message": "m", "detail": refusal.detail}
        self._answer(refusal.status, {"error": error}, refusal.headers)

    def _answer(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(value).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            for name, text in (headers or {}).items():
                self.send_header(name, text)
            self.end_headers()
            self.wfile.write(body)
        except OSError:
            self.close_connection = True  # the client has disconnected


class _Server(http.server.ThreadingHTTPServer):
    """Does not print that a client has reset its connection: a test may read what is printed."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextlib.contextmanager
def serving() -> Iterator[tuple[str, FakeQueue]]:
    """The fake server's URL and state, while it runs."""
    server = _Server(("127.0.0.1", 0), Handler)
    queue = server.queue = FakeQueue()  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", queue
    finally:
        with queue.changed:
            queue.is_closing = True
            queue.changed.notify_all()
        server.shutdown()
        thread.join()
        server.server_close()
