"""Bytes that two servers in a row could read differently, and how our server reads them.

A client sends the bytes of a `Case` before an honest request on the same connection. `answers` are
the statuses that it gets, in order; `stays` tells whether the honest request after them then gets
its own answer, or finds the connection closed. No request may ever get the answer to another one,
and none of these bytes may append to `SMUGGLED`. Used by `test_framing`, and through a proxy, where
another server parses first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

TOPIC: Final = "framing"
# The topic to which a hidden second request would append.
SMUGGLED: Final = "smuggled"
BODY: Final = b'{"records":[{"data":1}]}'
HIDDEN: Final = (
    b"POST /v0/topics/smuggled HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
    b"Content-Length: 24\r\n\r\n" + BODY
)
_POST: Final = b"POST /v0/topics/framing HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
_GET: Final = b"GET /v0/health HTTP/1.1\r\nHost: h\r\n"
_SIZED: Final = b"Content-Length: 24\r\n"
_CHUNKED: Final = b"Transfer-Encoding: chunked\r\n"
_CHUNKS: Final = b"18\r\n" + BODY + b"\r\n0\r\n\r\n"
_END: Final = b"\r\n"


@dataclass(frozen=True, slots=True)
class Case:
    """Some bytes, the statuses of their answers, and whether the connection stays open.

    `may_end`: if the bytes come in pieces, the connection may end, because the answer came before
    the last piece.
    """

    name: str
    raw: bytes
    answers: tuple[int, ...]
    stays: bool = False
    may_end: bool = False


def _refused(name: str, raw: bytes, status: int = 400) -> Case:
    return Case(name, raw, (status,))


def _one(name: str, raw: bytes, status: int = 200, *, stays: bool = True) -> Case:
    return Case(name, raw, (status,), stays)


def _head(*lines: bytes, start: bytes = b"GET /v0/health HTTP/1.1") -> bytes:
    return b"\r\n".join((start, *lines)) + b"\r\n\r\n"


_LENGTHS: Final = (
    _one("a length", _POST + _SIZED + _END + BODY),
    _one("a length with leading zeros", _POST + b"Content-Length: 0024\r\n\r\n" + BODY),
    _refused("two lengths that differ", _POST + _SIZED + b"Content-Length: 3\r\n\r\n" + BODY),
    _refused("two lengths that agree", _POST + _SIZED + _SIZED + _END + BODY),
    _refused("a list of lengths", _POST + b"Content-Length: 24, 24\r\n\r\n" + BODY),
    _refused("a length with a sign", _POST + b"Content-Length: +24\r\n\r\n" + BODY),
    _refused("a negative length", _POST + b"Content-Length: -24\r\n\r\n" + BODY),
    _refused("a hexadecimal length", _POST + b"Content-Length: 0x18\r\n\r\n" + BODY),
    _refused("a length with a blank inside", _POST + b"Content-Length: 2 4\r\n\r\n" + BODY),
    _refused("a length that is a word", _POST + b"Content-Length: many\r\n\r\n" + BODY),
    _refused("an empty length", _POST + b"Content-Length:\r\n\r\n" + BODY),
    _refused("a length over 64 bits", _POST + b"Content-Length: 18446744073709551640\r\n\r\n"),
    _refused("a length with a fraction", _POST + b"Content-Length: 24.0\r\n\r\n" + BODY),
    _one("a GET with a body", _GET + b"Content-Length: %d\r\n\r\n" % len(HIDDEN) + HIDDEN),
)

_CODINGS: Final = (
    _one("chunks", _POST + _CHUNKED + _END + _CHUNKS),
    _one("chunks, in capitals", _POST + b"TRANSFER-ENCODING: CHUNKED\r\n\r\n" + _CHUNKS),
    _refused("a length, then chunks", _POST + _SIZED + _CHUNKED + _END + _CHUNKS),
    _refused("chunks, then a length", _POST + _CHUNKED + _SIZED + _END + _CHUNKS),
    _refused(
        "a length of the chunks and a request behind",
        _POST + b"Content-Length: 5\r\n" + _CHUNKED + b"\r\n0\r\n\r\n" + HIDDEN,
    ),
    _refused("chunked twice", _POST + _CHUNKED + _CHUNKED + _END + _CHUNKS),
    _refused("chunked twice in a list", _POST + b"Transfer-Encoding: chunked, chunked\r\n\r\n"),
    _refused("another coding", _POST + b"Transfer-Encoding: gzip\r\n\r\n"),
    _refused("identity", _POST + b"Transfer-Encoding: identity\r\n" + _SIZED + _END + BODY),
    _refused("another coding, then chunked", _POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n"),
    _refused("chunked, then another", _POST + b"Transfer-Encoding: chunked, identity\r\n\r\n"),
    _refused("almost chunked", _POST + b"Transfer-Encoding: xchunked\r\n\r\n" + _CHUNKS),
    _refused("chunked with a parameter", _POST + b"Transfer-Encoding: chunked;q=1\r\n\r\n"),
    _refused("quoted chunked", _POST + b'Transfer-Encoding: "chunked"\r\n\r\n'),
    _refused("chunked behind a vertical tab", _POST + b"Transfer-Encoding: \x0bchunked\r\n\r\n"),
    _refused("an empty coding", _POST + b"Transfer-Encoding:\r\n" + _SIZED + _END + BODY),
    _refused(
        "a folded coding", _POST + b"Transfer-Encoding:\r\n chunked\r\n\r\n" + _CHUNKS + HIDDEN
    ),
    _refused(
        "chunks of HTTP/1.0",
        (_POST + _CHUNKED + _END + _CHUNKS).replace(b"HTTP/1.1", b"HTTP/1.0"),
    ),
)


def _chunks(name: str, chunks: bytes) -> Case:
    return _refused(name, _POST + _CHUNKED + _END + chunks)


_CHUNK_SIZES: Final = (
    _one("a chunk size in capitals", _POST + _CHUNKED + _END + _CHUNKS.replace(b"18", b"0018")),
    _one("a chunk extension", _POST + _CHUNKED + _END + _CHUNKS.replace(b"18\r", b"18;a=b\r")),
    _chunks("a chunk extension with a bare LF", b"18;a\n" + BODY + b"\r\n0\r\n\r\n"),
    _chunks("a chunk size with a bare LF", b"18\n" + BODY + b"\r\n0\r\n\r\n"),
    _chunks("a chunk that ends with a bare LF", b"18\r\n" + BODY + b"\n0\r\n\r\n"),
    _chunks("a chunk without its line end", b"18\r\n" + BODY + b"0\r\n\r\n"),
    _chunks("a chunk longer than its size", b"17\r\n" + BODY + b"\r\n0\r\n\r\n"),
    _chunks("a chunk size with 0x", b"0x18\r\n" + BODY + b"\r\n0\r\n\r\n"),
    _chunks("a chunk size with a sign", b"+18\r\n" + BODY + b"\r\n0\r\n\r\n"),
    _chunks("a negative chunk size", b"-18\r\n" + BODY + b"\r\n0\r\n\r\n"),
    _chunks("a chunk size behind a blank", b" 18\r\n" + BODY + b"\r\n0\r\n\r\n"),
    _chunks("a chunk size before a blank", b"18 \r\n" + BODY + b"\r\n0\r\n\r\n"),
    _chunks("a chunk size over 64 bits", b"1" + b"0" * 16 + b"18\r\n" + BODY + b"\r\n0\r\n\r\n"),
    _chunks("an empty chunk size", b"\r\n" + BODY + b"\r\n0\r\n\r\n"),
    _one(
        "a trailer that would be a header",
        _POST + _CHUNKED + _END + b"18\r\n" + BODY + b"\r\n0\r\nIdempotency-Key: x\r\n\r\n",
    ),
    _refused(
        "a trailer that would be a length",
        _POST + _CHUNKED + _END + b"18\r\n" + BODY + b"\r\n0\r\nContent-Length: 5\r\n\r\n",
    ),
)

_LINES: Final = (
    _refused("a bare LF behind the request line", b"GET /v0/health HTTP/1.1\nHost: h\r\n\r\n"),
    _refused("a bare LF behind a header", b"GET /v0/health HTTP/1.1\r\nHost: h\nA: b\r\n\r\n"),
    _refused("a bare LF at the end of the head", b"GET /v0/health HTTP/1.1\r\nHost: h\r\n\n"),
    _refused("bare LF alone", b"GET /v0/health HTTP/1.1\nHost: h\n\n"),
    _refused("a bare CR in a header", _GET + b"A: b\rTransfer-Encoding: chunked\r\n\r\n"),
    _refused("a bare CR behind the request line", b"GET /v0/health HTTP/1.1\rHost: h\r\n\r\n"),
    _refused("a NUL in a header", _GET + b"A: b\0c\r\n\r\n"),
    _refused("a NUL in a name", _GET + b"A\0: b\r\n\r\n"),
    _refused("a control character in a header", _GET + b"A: b\x01c\r\n\r\n"),
    _refused("a folded header", _GET + b"A: b\r\n c\r\n\r\n"),
    _refused("a header folded by a tab", _GET + b"A: b\r\n\tc\r\n\r\n"),
    _refused("a first header that is folded", b"GET /v0/health HTTP/1.1\r\n Host: h\r\n\r\n"),
    _refused("a blank before the colon", _POST + b"Content-Length : 24\r\n\r\n" + BODY),
    _refused("a tab before the colon", _POST + b"Transfer-Encoding\t: chunked\r\n\r\n" + _CHUNKS),
    _refused("a header without a colon", _GET + b"Content-Length 24\r\n\r\n"),
    _refused("a header without a name", _GET + b": b\r\n\r\n"),
    _refused("a name that is no token", _GET + b"A(b): c\r\n\r\n"),
    _one("an empty header", _GET + b"A:\r\n\r\n"),
    _one("a name with an underscore", _POST + b"Content_Length: 3\r\n" + _SIZED + _END + BODY),
    _one("bytes above ASCII in a header", _GET + b"A: \xc3\xa4\xff\r\n\r\n"),
    _one("empty lines before a request", b"\r\n\r\n" + _GET + _END),
)

_HOSTS: Final = (
    _refused("no Host", b"GET /v0/health HTTP/1.1\r\nA: b\r\n\r\n"),
    _refused("two Hosts", _GET + b"Host: other\r\n\r\n"),
    _refused("two Hosts that agree", _GET + b"Host: h\r\n\r\n"),
    _refused("a list of Hosts", _head(b"Host: h, other")),
    _refused("a Host with a path", _head(b"Host: h/v0")),
    _refused("a Host with a user", _head(b"Host: a@h")),
    _refused("a Host with a blank", _head(b"Host: h other")),
    _one(
        "an absolute URI", _head(b"Host: h", start=b"GET http://h/v0/health HTTP/1.1"), stays=True
    ),
    _refused(
        "an absolute URI of another host",
        _head(b"Host: h", start=b"GET http://other/v0/health HTTP/1.1"),
    ),
    _refused("an absolute URI with a user", _head(b"Host: h", start=b"GET http://a@h/ HTTP/1.1")),
    _refused("another scheme", _head(b"Host: h", start=b"GET ftp://h/v0/health HTTP/1.1")),
    _refused("two contents' types", _POST + b"Content-Type: text/plain\r\n" + _SIZED + _END + BODY),
    _refused("two keys", _GET + b"Authorization: Bearer a\r\nAuthorization: Bearer b\r\n\r\n"),
)


def _target(name: str, target: bytes, status: int = 404, *, stays: bool = True) -> Case:
    return Case(name, _head(b"Host: h", start=b"GET " + target + b" HTTP/1.1"), (status,), stays)


_TARGETS: Final = (
    _target("a NUL in a name of the path", b"/v0/topics/a%00", 400),
    _target("a line end in a name of the path", b"/v0/topics/a%0d%0aHost:%20x", 400),
    _target("dot segments", b"/v0/topics/../health"),
    _target("escaped dot segments", b"/v0/topics/%2e%2e/health"),
    _target("an escaped slash", b"/v0%2fhealth"),
    _target("a doubled slash", b"/v0//health"),
    _target("a leading double slash", b"//v0/health"),
    _target("a backslash", b"/v0\\health"),
    _target("a doubly escaped name", b"/v0/topics/%252e%252e", 400),
    _target("a broken escape", b"/v0/topics/%zz", 400),
    _target("a semicolon", b"/v0/health;a=b"),
    _target("an empty query", b"/v0/health?", 200),
    _target("a fragment", b"/v0/health#a", 400, stays=False),
    _target("a target without a slash", b"v0/health", 400, stays=False),
    _target("bytes above ASCII", b"/v0/\xc3\xa4", 400, stays=False),
    _target("a tab", b"/v0/health\tx", 400, stays=False),
    _target("a NUL", b"/v0/health\0", 400, stays=False),
    _target("an asterisk", b"*", 400, stays=False),
    _refused("no target", b"GET HTTP/1.1\r\nHost: h\r\n\r\n"),
    _refused("a target with a blank", b"GET /v0/health /v0 HTTP/1.1\r\nHost: h\r\n\r\n"),
    _refused("a tunnel", b"CONNECT h:80 HTTP/1.1\r\nHost: h:80\r\n\r\n"),
)

_VERSIONS: Final = (
    _one("HTTP/1.0", b"GET /v0/health HTTP/1.0\r\n\r\n", stays=False),
    _one(
        "HTTP/1.0 kept alive",
        b"GET /v0/health HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
        stays=False,
    ),
    _refused("HTTP/0.9", b"GET /v0/health\r\n\r\n"),
    _refused("HTTP/0.9, named", b"GET /v0/health HTTP/0.9\r\nHost: h\r\n\r\n"),
    _refused("HTTP/2.0", b"GET /v0/health HTTP/2.0\r\nHost: h\r\n\r\n"),
    _refused("HTTP/1.2", b"GET /v0/health HTTP/1.2\r\nHost: h\r\n\r\n"),
    _refused("HTTP/1.10", b"GET /v0/health HTTP/1.10\r\nHost: h\r\n\r\n"),
    _refused("a version in small letters", b"GET /v0/health http/1.1\r\nHost: h\r\n\r\n"),
    _refused("HTTP/2 with prior knowledge", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    _refused("a TLS greeting", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"a" * 64),
    _refused("a method of our own", b"BREW /v0/health HTTP/1.1\r\nHost: h\r\n\r\n"),
    _refused("a method in small letters", b"get /v0/health HTTP/1.1\r\nHost: h\r\n\r\n"),
    _refused("a blank before the method", b" GET /v0/health HTTP/1.1\r\nHost: h\r\n\r\n"),
    _refused("a protocol that is not HTTP", b"OPTIONS rtsp://h/ RTSP/1.0\r\nHost: h\r\n\r\n"),
    _refused("something else", b"\x00\x01\x02\x03\r\n\r\n"),
)

_UPGRADES: Final = (
    _one(
        "HTTP/2 by upgrade",
        _GET + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n\r\n",
        stays=False,
    ),
    _one(
        "an upgrade with a request behind",
        _GET + b"Connection: upgrade\r\nUpgrade: foo\r\n\r\n" + HIDDEN,
        stays=False,
    ),
    _one("an upgrade that is not asked for", _GET + b"Upgrade: websocket\r\n\r\n"),
    _refused(
        "a WebSocket with a body",
        b"GET /v0/ws HTTP/1.1\r\nHost: h\r\nConnection: upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
        b"Content-Length: %d\r\n\r\n" % len(HIDDEN) + HIDDEN,
    ),
    _refused(
        "a WebSocket by POST",
        b"POST /v0/ws HTTP/1.1\r\nHost: h\r\nConnection: upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n",
    ),
    _refused(
        "a WebSocket of another version",
        b"GET /v0/ws HTTP/1.1\r\nHost: h\r\nConnection: upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 8\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n",
    ),
    _refused(
        "a WebSocket with half a key",
        b"GET /v0/ws HTTP/1.1\r\nHost: h\r\nConnection: upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAA\r\n\r\n",
    ),
    _one(
        "the end, with a request behind",
        _GET + b"Connection: close\r\n\r\n" + HIDDEN,
        stays=False,
    ),
    Case(
        "expected to go on, and refused",
        b"POST /v0/topics/framing HTTP/1.1\r\nHost: h\r\nContent-Type: text/plain\r\n"
        b"Content-Length: %d\r\nExpect: 100-continue\r\n\r\n" % len(HIDDEN) + HIDDEN,
        (415,),
        True,
        may_end=True,
    ),
    _refused(
        "expected to go on, and refused before the body",
        b"POST /v0/topics/framing HTTP/1.1\r\nHost: h\r\nContent-Type: text/plain\r\n"
        b"Content-Length: %d\r\nExpect: 100-continue\r\n\r\n" % len(HIDDEN),
        415,
    ),
    Case(
        "expected to go on",
        _POST + _SIZED + b"Expect: 100-continue\r\n\r\n" + BODY,
        (100, 200),
        True,
    ),
    _one("something else expected", _POST + _SIZED + b"Expect: tea\r\n\r\n" + BODY),
)

_SEVERAL: Final = (
    Case("two requests at once", _GET + _END + _POST + _SIZED + _END + BODY, (200, 200), True),
    Case("three, the first with chunks", (_POST + _CHUNKED + _END + _CHUNKS) * 3, (200,) * 3, True),
    Case("a request, then garbage", _GET + _END + b"garbage\r\n\r\n", (200, 400)),
    Case("a body, then garbage", _POST + _SIZED + _END + BODY + b"!!!!\r\n\r\n", (200, 400)),
    Case("a body, then its end again", _POST + _SIZED + _END + BODY + b"\r\n", (200,), True),
    Case(
        "two, the second unclear",
        _POST + _SIZED + _END + BODY + _POST + _SIZED + _CHUNKED + _END + _CHUNKS,
        (200, 400),
    ),
    Case("a refusal, then a request", _head(b"A: b") + HIDDEN, (400,)),
    Case(
        "an unknown path with a body",
        _GET.replace(b"GET", b"POST").replace(b"health", b"no")
        + b"Content-Length: %d\r\n\r\n" % len(HIDDEN)
        + HIDDEN,
        (404,),
        True,
    ),
)

_SIZES: Final = (
    _refused("a long target", _head(b"Host: h", start=b"GET /" + b"a" * 9000 + b" HTTP/1.1"), 414),
    _refused("a long header", _GET + b"A: " + b"b" * 70_000 + b"\r\n\r\n", 431),
    _refused("a long name", _GET + b"A" * 70_000 + b": b\r\n\r\n", 431),
    _refused("many headers", _GET + b"A: b\r\n" * 300 + _END, 431),
    _refused("a header without an end", _GET + b"A: " + b"b" * 1_000_000, 431),
    _refused("a body over the limit", _POST + b"Content-Length: 99999999999\r\n\r\n", 413),
    _refused("a chunk over the limit", _POST + _CHUNKED + b"\r\nfffffff\r\n" + b" " * 100_000, 413),
)

CASES: Final = (
    *_LENGTHS,
    *_CODINGS,
    *_CHUNK_SIZES,
    *_LINES,
    *_HOSTS,
    *_TARGETS,
    *_VERSIONS,
    *_UPGRADES,
    *_SEVERAL,
    *_SIZES,
)

assert len({case.name for case in CASES}) == len(CASES), "a case has its name to itself"
