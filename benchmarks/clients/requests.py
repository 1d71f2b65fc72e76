"""Request bytes, built once before the timing starts, and the record texts in them.

Pure except for `write_requests`. Called by the cases; the format of a request file (u32 length,
then the bytes of one request) is shared with `load`, which must not import this module.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path

RECORD_BYTES = 200  # bytes of `data`, the size in all cases


def http_request(method: str, path: str, body: bytes | None = None) -> bytes:
    """The bytes of one keep-alive request."""
    head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n"
    if body is None:
        return head.encode() + b"\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def data_text(number: int, tag: str) -> bytes:
    """The `data` of record `number`: a JSON object of exactly RECORD_BYTES bytes."""
    text = b'{"id":%d,"tag":"%s","type":"push","pad":"' % (number, tag.encode())
    missing = RECORD_BYTES - len(text) - 2
    assert missing > 0, "tag too long for a record of this size"
    # The padding differs between records, as in real payloads.
    filler = (b"%010d" % (number * 2_654_435_761 % 10**10)) * (missing // 10 + 1)
    return text + filler[:missing] + b'"}'


def append_body(first: int, count: int, *, tagged: bool = True) -> bytes:
    """The body of an append of `count` records numbered from `first`; tags repeat after 1,000."""
    records = []
    for number in range(first, first + count):
        tag = f"t-{number % 1000:03d}"
        data = data_text(number, tag)
        if tagged:
            records.append(b'{"data":%s,"tag":"%s"}' % (data, tag.encode()))
        else:
            records.append(b'{"data":%s}' % data)
    return b'{"records":[%s]}' % b",".join(records)


def append_request(topic: str, first: int, count: int) -> bytes:
    """The bytes of an append request; answers for 100 records contain all seqs, as by default."""
    return http_request("POST", f"/v0/topics/{topic}", append_body(first, count))


def diff_request(topic: str, from_seq: int, limit: int = 1000) -> bytes:
    """The bytes of a diff request."""
    body = b'{"from_seq":%d,"limit":%d}' % (from_seq, limit)
    return http_request("POST", f"/v0/topics/{topic}/diff", body)


def write_requests(path: Path, requests: Iterable[bytes]) -> Path:
    """Write a request file for the load generator."""
    with path.open("wb") as file:
        for request in requests:
            file.write(struct.pack("<I", len(request)))
            file.write(request)
    return path
