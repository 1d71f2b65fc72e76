"""The streams of a golden data directory: made over HTTP, and read back the same way.

They have every stored form: facts of a creation, of a change and of an append's step; bytes,
messages and copies of both, in segments, in a snapshot and in the journal's tail; forks, one of
them of a stream that is gone.
"""

from __future__ import annotations

import base64
from typing import Any, Final

import httpx

from tests.contract.driver import Api

MOUNT: Final = "/v1/stream/"
BYTES: Final = "application/x-bytes"
# The parts of an answer that depend on the data.
_TOLD: Final = ("content-type", "stream-next-offset", "stream-closed", "stream-ttl")
_PATHS: Final = (
    *("s-json", "s/b y", "s-text", "s-fork", "s-fork-of-gone", "s-gone", "s-closed", "s-lasting"),
    *("s-tail", "s-tail/bytes", "s-late-fork"),
)


def _call(api: Api, method: str, path: str, body: bytes = b"", **headers: str) -> httpx.Response:
    """One request to the streams API, which must succeed."""
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = api.http.request(method, MOUNT + path, content=body, headers=sent)
    assert answer.status_code < 300, (method, path, answer.text)
    return answer


def first_streams(api: Api) -> None:
    """Streams for segments and snapshots."""
    _call(api, "PUT", "s-json", b"[1, 2.0]", content_type="application/json")
    _call(api, "PUT", "s/b y", content_type=BYTES)
    _call(api, "PUT", "s-text", content_type="text/plain; charset=utf-8", stream_ttl="31536000")
    _call(api, "PUT", "s-lasting", content_type="text/plain", stream_ttl="31536000")
    for number in range(60):
        body = b'[{"n": %d}, ["\xc3\xa9"]]' % number
        _call(api, "POST", "s-json", body, content_type="application/json")
        data = bytes(range(number, 256)) + b"\n"
        _call(api, "POST", "s/b y", data, content_type=BYTES, stream_seq=f"{number:03}")
        _call(api, "POST", "s-text", b"line %d\r\n" % number, content_type="text/plain")
    assert api.delete("s-json", before_seq=20).status_code == 200
    _call(api, "PUT", "s-fork", stream_forked_from=MOUNT + "s-json")
    _call(api, "PUT", "s-gone", b"first,", content_type="text/plain")
    tail = _call(api, "POST", "s-gone", b"second", content_type="text/plain")
    assert tail.headers["stream-next-offset"]
    _call(
        api,
        "PUT",
        "s-fork-of-gone",
        stream_forked_from=MOUNT + "s-gone",
        stream_fork_offset="0000000000000000_0000000000000000",
        stream_fork_sub_offset="3",
    )
    _call(api, "DELETE", "s-gone")
    _call(api, "PUT", "s-closed", content_type="text/plain")
    _call(
        api,
        "POST",
        "s-closed",
        b"the end",
        content_type="text/plain",
        stream_closed="true",
        producer_id="p",
        producer_epoch="1",
        producer_seq="0",
    )


def last_streams(api: Api) -> None:
    """Streams, and more messages of the first ones, for the journal's tail."""
    _call(api, "POST", "s-json", b'{"tail": 1e400}', content_type="application/json")
    _call(api, "POST", "s/b y", b"\x00tail", content_type=BYTES, stream_seq="tail")
    _call(api, "POST", "s-fork", b"[[]]", content_type="application/json")
    _call(api, "PUT", "s-tail", b'["only"]', content_type="application/json")
    _call(api, "POST", "s-tail", stream_closed="true")
    _call(api, "PUT", "s-tail/bytes", b"\xff\xfe", content_type=BYTES, stream_closed="true")
    _call(api, "PUT", "s-late-fork", b"!", stream_forked_from=MOUNT + "s/b%20y")


async def streams_of(http: httpx.AsyncClient) -> dict[str, Any]:
    """The answers about each stream: its life, and all its messages."""
    return {path: await _stream_of(http, path) for path in _PATHS}


async def _stream_of(http: httpx.AsyncClient, path: str) -> dict[str, Any]:
    target = MOUNT + path.replace(" ", "%20")
    head = await http.head(target)
    body, query = b"", ""
    for _ in range(100):
        page = await http.get(target + query)
        if page.status_code != 200:
            break
        body += page.content
        query = "?offset=" + page.headers["stream-next-offset"]
        if "stream-up-to-date" in page.headers:
            break
    headers = {name: head.headers[name] for name in _TOLD if name in head.headers}
    return {
        "status": head.status_code,
        "told": headers,
        "body": base64.b64encode(body).decode(),
    }
