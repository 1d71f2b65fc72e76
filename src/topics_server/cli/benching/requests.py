"""The requests of `topics bench` as bytes, and which one comes next. Pure.

A `Script` gives the next request and reads a successful answer; loads call it. Requests are encoded
before the time of a load begins where that is possible: what the client spends, a server on the
same machine lacks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import quote, urlsplit

import msgspec

DATA_BYTES: Final = 200
# Requests that a load repeats in turn, so that neighbouring records differ.
VARIANTS: Final = 16
# Longer than the longest load, so that no job is delivered twice.
LEASE_MS: Final = 600_000
NODE: Final = "bench"


class Script(Protocol):
    """Gives requests until there are no more, and counts the records of an answer."""

    keeps_bodies: bool

    def next(self) -> bytes | None:
        """The next request; None if there is none."""

    def took(self, body: bytes) -> int:
        """The number of records, or jobs, of a successful answer.

        Raises `msgspec.DecodeError` for an answer of another server.
        """


class RequestTarget(NamedTuple):
    """The parts of the requests that a server wants in each: its path, its host, the key."""

    host: str
    base: str
    headers: Mapping[str, str]

    def request(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """The bytes of a request on a connection that is kept."""
        lines = [f"{method} {self.base}{path} HTTP/1.1", f"Host: {self.host}"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + (body or b"")


def target_of(url: str, authorization: Mapping[str, str]) -> RequestTarget:
    """The target of a checked URL."""
    parts = urlsplit(url)
    host = parts.netloc
    if not host.isascii():
        port = "" if parts.port is None else f":{parts.port}"
        host = (parts.hostname or "").encode("idna").decode("ascii") + port
    headers = {"Accept-Encoding": "identity", **authorization}
    return RequestTarget(host, quote(parts.path.rstrip("/"), safe="/%"), headers)


def append_body(padding: bytes, records: int) -> bytes:
    """An append of `records` records of 200 bytes; `padding` makes them differ."""
    texts = []
    for number in range(records):
        head = f'{{"n":{number},"kind":"bench","pad":"'
        at = (number * 7) % len(padding)
        text = (padding[at:] + padding * (DATA_BYTES // len(padding) + 1)).hex()
        texts.append(f'{{"data":{head}{text[: DATA_BYTES - len(head) - 2]}"}}}}')
    return f'{{"records":[{",".join(texts)}]}}'.encode()


class RepeatedScript:
    """Sends requests in turn, without an end; each answer counts the same number of records."""

    keeps_bodies = False

    def __init__(self, requests: Sequence[bytes], records: int) -> None:
        self._requests = cycle(requests)
        self._records = records

    def next(self) -> bytes | None:
        """The next request; there always is one."""
        return next(self._requests)

    def took(self, body: bytes) -> int:
        """The records of a request."""
        return self._records


class _Lease(msgspec.Struct):
    seq: int = msgspec.field(name="$seq")
    lease_id: str = ""


class _Claimed(msgspec.Struct):
    claimed: list[_Lease]


class _Acked(msgspec.Struct):
    acked: int


class ClaimScript:
    """Claims jobs until the queue has none; keeps an ack request for each answer."""

    keeps_bodies = True

    def __init__(self, target: RequestTarget, path: str, most: int) -> None:
        body = {"node": NODE, "max": most, "lease_ms": LEASE_MS}
        self._request = target.request("POST", f"{path}/claim", msgspec.json.encode(body))
        self._read = msgspec.json.Decoder(_Claimed).decode
        self._is_empty = False
        self.leases: list[list[_Lease]] = []

    def next(self) -> bytes | None:
        """A claim; None once one found no job."""
        return None if self._is_empty else self._request

    def took(self, body: bytes) -> int:
        """The number of claimed jobs."""
        found = self._read(body).claimed
        if found:
            self.leases.append(found)
        else:
            self._is_empty = True
        return len(found)

    def acks(self, target: RequestTarget, path: str) -> AckScript:
        """The acks of all claimed jobs, as many a call as a claim got."""
        return AckScript(
            [target.request("POST", f"{path}/ack", _ack(each)) for each in self.leases]
        )


def _ack(leases: Sequence[_Lease]) -> bytes:
    body: dict[str, Any] = {
        "node": NODE,
        "seqs": [lease.seq for lease in leases],
        "lease_ids": [lease.lease_id for lease in leases],
    }
    return msgspec.json.encode(body)


class AckScript:
    """Sends each request once."""

    keeps_bodies = True

    def __init__(self, requests: list[bytes]) -> None:
        self._left = iter(requests)
        self._read = msgspec.json.Decoder(_Acked).decode

    def next(self) -> bytes | None:
        """The next ack; None after the last."""
        return next(self._left, None)

    def took(self, body: bytes) -> int:
        """The number of acked jobs."""
        return self._read(body).acked
