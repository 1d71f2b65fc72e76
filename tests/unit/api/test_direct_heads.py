"""Answers to a head that came before: their first lines are kept, and must not get old."""

from __future__ import annotations

import pytest

from tests.unit.api.test_direct import APPEND, DIFF, JSON, SETTINGS, Side, request
from tests.unit.http.exchange.test_joined_writes import turns
from topics_server.http.connection import HttpConnection

pytestmark = pytest.mark.anyio

LISTED = b"origin: http://a.example\r\n"
# The second has the head of the first.
NO_RECORDS = request(b'{"records":[%b]}' % (b" " * (len(APPEND) - 14)))
UNLISTED = request(APPEND, headers=JSON + b"origin: http://b.example\r\n")
REQUESTS = (
    request(APPEND),
    NO_RECORDS,
    request(DIFF, b"/v0/topics/t/diff"),
    request(APPEND, headers=JSON + b"accept-encoding: gzip\r\n"),
    request(DIFF, b"/v0/topics/t/diff", JSON + b"accept-encoding: gzip\r\n"),
    request(APPEND, headers=JSON + LISTED),
    UNLISTED,
    request(None, headers=b"", method=b"GET"),
)


async def test_each_answer_has_the_servers_own_headers_of_its_time() -> None:
    side = Side(HttpConnection, **SETTINGS)
    await side.create()
    for second in range(4):
        # uvicorn makes a new list each second.
        side.uvicorn.default_headers = [(b"date", b"second %d" % second)]
        for _ in range(2):
            for sent in REQUESTS:
                side.wire.pieces.clear()
                side.protocol.data_received(sent)
                await turns(30)
                lines = side.sent.split(b"\r\n\r\n")[0].split(b"\r\n")
                is_wrong = sent in (NO_RECORDS, UNLISTED)
                assert lines[0].startswith(b"HTTP/1.1 4" if is_wrong else b"HTTP/1.1 200")
                dates = [line for line in lines if line.startswith(b"date:")]
                assert dates == [b"date: second %d" % second]
                allowed = [line for line in lines if line.startswith(b"access-control-allow-o")]
                assert len(allowed) == (LISTED in sent)


async def test_connections_share_heads_and_not_ids() -> None:
    side = Side(HttpConnection)
    await side.create()
    side.uvicorn.default_headers = [(b"date", b"now")]
    other, wire = side.connect()
    for _ in range(3):
        side.protocol.data_received(REQUESTS[0])
        other.data_received(REQUESTS[0])
        await turns(30)
    answers = b"".join(side.wire.pieces + wire.pieces).split(b"HTTP/1.1 200")[1:]
    ids = {line for each in answers for line in each.split(b"\r\n") if b"x-request-id" in line}
    assert len(answers) == len(ids) == 6
