"""Almost valid requests: valid requests with random changes from a seed. `Mutator` makes them; the
same seed gives the same requests. `problems` checks the answers. Used by `test_fuzz`.
"""

from __future__ import annotations

import json
import random
import re
from typing import Final

from tests.api.framing import CASES
from topics_server.http.error_responses import STATUS_OF
from topics_server.values.errors import Code

JSON: Final = b"Content-Type: application/json\r\n"
HONEST: Final = b"GET /v0/health HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
_STATUS: Final = re.compile(rb"HTTP/1\.1 (\d{3}) [A-Za-z' -]*\r\n")
_CODES: Final = {code.value: STATUS_OF[code] for code in Code}


def request(method: str, path: str, body: object = None, *fields: bytes) -> bytes:
    """A valid request."""
    head = f"{method} {path} HTTP/1.1\r\nHost: h\r\n".encode() + b"".join(fields)
    if body is None:
        return head + b"\r\n"
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return head + JSON + b"Content-Length: %d\r\n\r\n" % len(data) + data


_RECORD: Final = {"data": {"a": [1, 2.5, None, "é"]}, "tag": "t:1", "node": "n", "meta": {"k": "v"}}
SEEDS: Final = (
    request("POST", "/v0/topics/a", {"records": [_RECORD, {"data": 1}], "node": "n"}),
    request("POST", "/v0/topics/a?return_seqs=false", {"records": [_RECORD], "create": True}),
    request("POST", "/v0/topics/b", {"records": [_RECORD], "idempotency_key": "k", "config": {}}),
    request("POST", "/v0/topics/a/diff", {"from_seq": 0, "limit": 5, "node": ["n"]}),
    request("POST", "/v0/topics/a/delete", {"match": ["t:*"], "before_seq": 3}),
    request("PUT", "/v0/topics/a", {"ttl_ms": 60000, "cap_records": 100, "durability": "memory"}),
    request("PUT", "/v0/topics/q", {"type": "queue", "lease_ms": 1000, "dead_letter": "d"}),
    request("GET", "/v0/topics/a?touch=false"),
    request("GET", "/v0/topics?prefix=a&page_size=3"),
    request("DELETE", "/v0/topics/gone?if_empty=true"),
    request("POST", "/v0/topics/q/claim", {"node": "w", "max": 3, "lease_ms": 1000}),
    request("POST", "/v0/topics/q/ack", {"node": "w", "seqs": [1, 2]}),
    request("POST", "/v0/topics/q/nack", {"node": "w", "seqs": [1], "delay_ms": 5}),
    request("POST", "/v0/topics/q/extend", {"node": "w", "seqs": [1], "lease_ms": 500}),
    request("GET", "/v0/topics/q/work?node=w&max=2", None, b"Accept: text/event-stream\r\n"),
    request("PUT", "/v0/routers/r", {"source": "a", "dest": "c", "filter": {"tag": "t:*"}}),
    request("GET", "/v0/routers?page_size=2"),
    request("DELETE", "/v0/routers/r"),
    request("POST", "/v0/watch", {"topics": {"a": {"from_seq": 0}, "b": {"tail": True}}}),
    request("GET", "/v0/watch/wid_AAAAAAAAAAAAAAAAAAAAAA", None, b"Last-Event-ID: e30\r\n"),
    request("GET", "/v0/metrics", None, b"Accept: application/json\r\n"),
    request("GET", "/v0/ready"),
    request(
        "GET",
        "/v0/ws",
        None,
        b"Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n",
        b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n",
    ),
    *(case.raw for case in CASES if len(case.raw) < 2000),
)
_TOKENS: Final = (
    *(b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b";", b"%00", b"%2e%2e", b"\xff", b"\xc3"),
    *(b'"', b"\\", b"{", b"}", b"[", b"]", b",", b"null", b"-1", b"1e999", b"18446744073709551616"),
    *(b"\\ud800", b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"0\r\n\r\n"),
    *(b"Content-Encoding: gzip\r\n", b"Expect: 100-continue\r\n", b"Connection: close\r\n"),
    *(b"Accept-Encoding: gzip\r\n", b"HTTP/1.0", b"HTTP/1.1", b"POST ", b"a" * 300, b"[" * 600),
)


class Mutator:
    """An endless series of requests."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)

    def next(self) -> bytes:
        """The next request, which may be several, or none."""
        chance = self._chance
        raw = chance.choice(SEEDS)
        head, end, body = raw.partition(b"\r\n\r\n")
        if end and body and chance.random() < 0.5:
            # Change only the body and correct its length, so that the server reads it.
            body = self._changed(body)
            head = re.sub(rb"Content-Length: \d+", b"Content-Length: %d" % len(body), head)
            return head + end + body
        if chance.random() < 0.1:
            raw += chance.choice(SEEDS)
        return self._changed(raw)

    def _changed(self, raw: bytes) -> bytes:
        chance = self._chance
        data = bytearray(raw)
        for _ in range(1 + int(chance.expovariate(0.7))):
            at = chance.randrange(len(data) + 1)
            to = min(len(data), at + chance.randrange(1, 20))
            match chance.randrange(7):
                case 0 if at < len(data):
                    data[at] ^= 1 << chance.randrange(8)
                case 1:
                    data[at:at] = chance.choice(_TOKENS)
                case 2:
                    del data[at:to]
                case 3:
                    data[at:at] = data[at:to] * chance.randrange(1, 4)
                case 4:
                    data[at:to] = chance.choice(_TOKENS)
                case 5:
                    data[at:at] = chance.randbytes(chance.randrange(1, 8))
                case _:
                    numbers = list(re.finditer(rb"\d+", data))
                    if numbers:
                        start, stop = chance.choice(numbers).span()
                        number = chance.choice((0, 1, -1, 2**31, 2**63, 2**64, 10**30))
                        data[start:stop] = b"%d" % number
        return bytes(data)


def problems(got: bytes) -> str | None:
    """The problem in the answers, of which the last may be incomplete; None without a problem."""
    for _ in range(1000):
        if not got:
            return None
        match = _STATUS.match(got)
        head, end, rest = got.partition(b"\r\n\r\n")
        if not end:
            return None if got.startswith(b"HTTP/1.1 "[: len(got)]) else f"no answer: {got[:200]!r}"
        if match is None:
            return f"no status: {got[:200]!r}"
        status = int(match[1])
        if status == 101 or b"text/event-stream" in head:
            return None
        length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
        size = 0 if length is None else int(length[1])
        if status < 200 or status == 204 or rest.startswith(b"HTTP/1.1 "):
            size = 0
        elif length is None:
            return f"without a length: {head!r}"
        body, got = rest[:size], rest[size:]
        if len(body) < size:
            return None
        if status >= 400 and size and (wrong := _wrong_refusal(status, head, body)):
            return wrong
    return "endless answers"


def _wrong_refusal(status: int, head: bytes, body: bytes) -> str | None:
    if b"content-encoding: gzip" in head:
        return None
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return f"{status} without an envelope: {body[:300]!r}"
    if status == 500:
        return f"a defect: {body[:300]!r}"
    if _CODES.get(error.get("code")) != status or not isinstance(error.get("message"), str):
        return f"{status} with another code: {body[:300]!r}"
    return None
