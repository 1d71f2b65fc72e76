"""PostgreSQL's wire protocol, version 3: messages as bytes, and a small session for the set-up.

Only the parts that the benchmarks need: a connection without a password, prepared statements,
parameters as text or as binary arrays, results as text. Shared by `load`, `watchers`,
`postgres_queue` and the cases; standard library only, because the load generator starts with it.

A measured connection sends `greeting` once: the start-up, a Parse for each statement and calls that
warm the connection's caches. Every later request is one `call`, and its answer ends with `READY`.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Mapping, Sequence

USER = "topics"
DATABASE = "postgres"
# ReadyForQuery outside a transaction: the last message of every answer.
READY = b"Z\x00\x00\x00\x05I"
SYNC = b"S\x00\x00\x00\x04"
PARSED = b"1\x00\x00\x00\x04"
BOUND = b"2\x00\x00\x00\x04"
JSON, TEXT, INT4, INT8 = 114, 25, 23, 20  # the numbers of these types
_VERSION = 3 << 16
_PROTOCOL_HEAD = struct.Struct(">cI")
_READ_BYTES = 1 << 16

Setting = Mapping[str, str]


class PostgresError(Exception):
    """The server refused a request, or its answer does not follow this protocol."""


def message(kind: bytes, body: bytes) -> bytes:
    """One message: its kind, its length, its body."""
    return kind + struct.pack(">I", len(body) + 4) + body


def text(value: bytes | str) -> bytes:
    """A text that ends with a zero byte."""
    return (value.encode() if isinstance(value, str) else value) + b"\x00"


def startup(settings: Setting | None = None) -> bytes:
    """The first message of a connection; `settings` apply to this connection."""
    pairs = {"user": USER, "database": DATABASE, **(settings or {})}
    body = struct.pack(">I", _VERSION)
    body += b"".join(text(name) + text(value) for name, value in pairs.items()) + b"\x00"
    return struct.pack(">I", len(body) + 4) + body


def query(sql: str) -> bytes:
    """A statement as text, in one message with its own end."""
    return message(b"Q", text(sql))


def parse(name: bytes, sql: str, *types: int) -> bytes:
    """Prepare a statement; `types` are the types of its parameters."""
    body = text(name) + text(sql) + struct.pack(">H", len(types))
    return message(b"P", body + struct.pack(f">{len(types)}I", *types))


def bind(name: bytes, *parameters: bytes, binary: bool = False) -> bytes:
    """Bind a prepared statement's parameters, all as text or all binary; results come as text."""
    values = b"".join(struct.pack(">I", len(value)) + value for value in parameters)
    formats = struct.pack(">HH", 1, binary)
    count = struct.pack(">H", len(parameters))
    return message(b"B", text(b"") + text(name) + formats + count + values + struct.pack(">H", 0))


def execute() -> bytes:
    """Run the bound statement completely."""
    return message(b"E", text(b"") + struct.pack(">I", 0))


def call(name: bytes, *parameters: bytes, binary: bool = False) -> bytes:
    """A request that runs a prepared statement: Bind, Execute, Sync."""
    return bind(name, *parameters, binary=binary) + execute() + SYNC


def array(kind: int, values: Sequence[bytes]) -> bytes:
    """An array of one dimension in the binary format; `values` are binary, too."""
    if not values:
        return struct.pack(">III", 0, 0, kind)
    head = struct.pack(">IIIII", 1, 0, kind, len(values), 1)
    return head + b"".join(struct.pack(">I", len(value)) + value for value in values)


def greeting(settings: Setting, *requests: bytes) -> bytes:
    """The first bytes of a measured connection; `READY` comes twice in the answer."""
    return startup(settings) + b"".join(requests) + SYNC


def is_greeted(data: bytes) -> bool:
    """Whether the answer to `greeting` is complete; raises `PostgresError` for a refusal."""
    if data.endswith(READY) and data.count(READY) >= 2:
        rows(data)
        return True
    if data.startswith(b"E"):
        rows(data)
    return False


def ending(tag: bytes) -> bytes:
    """The last bytes of a successful answer; `tag` is for example `INSERT 0 1`."""
    return message(b"C", text(tag)) + READY


def messages(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Kind and body of each complete message."""
    at = 0
    while at + 5 <= len(data):
        kind, size = _PROTOCOL_HEAD.unpack_from(data, at)
        if size < 4:
            raise PostgresError(f"no message of PostgreSQL: {data[at : at + 40]!r}")
        if at + 1 + size > len(data):
            return
        yield kind, data[at + 5 : at + 1 + size]
        at += 1 + size


def columns(body: bytes) -> list[bytes]:
    """The columns of one row; NULL is empty."""
    (count,) = struct.unpack_from(">H", body)
    found, at = [], 2
    for _ in range(count):
        (size,) = struct.unpack_from(">i", body, at)
        found.append(body[at + 4 : at + 4 + max(0, size)])
        at += 4 + max(0, size)
    return found


def refusal(body: bytes) -> str:
    """The text of an error: its severity and message."""
    fields = {field[:1]: field[1:].decode("utf-8", "replace") for field in body.split(b"\x00")}
    return f"{fields.get(b'S', 'ERROR')}: {fields.get(b'M', '')}"


def rows(data: bytes) -> list[list[bytes]]:
    """The rows of an answer; raises `PostgresError` if it has an error."""
    found = []
    for kind, body in messages(data):
        if kind == b"D":
            found.append(columns(body))
        elif kind == b"E":
            raise PostgresError(refusal(body))
        elif kind == b"R" and body != b"\x00\x00\x00\x00":
            raise PostgresError("the server wants a password; the benchmarks send none")
    return found


class Session:
    """One connection for statements before and after a measurement."""

    def __init__(self, sock: socket.socket, settings: Setting | None = None) -> None:
        self._sock = sock
        self._ask(startup(settings))

    def run(self, sql: str) -> list[list[bytes]]:
        """Run one statement, or several with `;` between them; return the rows."""
        return self._ask(query(sql))

    def _ask(self, request: bytes) -> list[list[bytes]]:
        self._sock.sendall(request)
        data = b""
        while not data.endswith(READY):
            piece = self._sock.recv(_READ_BYTES)
            if not piece:
                rows(data)
                raise PostgresError(f"the server closed the connection after {data[-200:]!r}")
            data += piece
            if data.startswith((b"E", b"R")):
                rows(data)
        return rows(data)
