"""The streams API: malformed requests; each gets its status, code and field, and changes nothing.

`{s}` is a stream of text with a message, `{j}` one of JSON, `{c}` a closed one, `{a}` a path
without a stream. After each request the three are unchanged, and the number of topics is too.
"""

from __future__ import annotations

import gzip
from typing import Any, Final

import pytest

from tests.contract.conftest import new_name
from tests.contract.driver import Api
from tests.contract.malformed import Bad, Table, sent

MOUNT: Final = "/v1/stream"
TEXT: Final = "Content-Type: text/plain"
JSON: Final = "Content-Type: application/json"
METHODS: Final = ("PUT", "POST", "GET", "DELETE")


CASES = Table()
_add = CASES.add


def _row(method: str, target: str, body: bytes = b"", **more: Any) -> Bad:
    """A row that names the content type that it sends: a stream takes any type."""
    return Bad(method, target, body, **{"headers": (), **more})


# --- paths ----------------------------------------------------------------------------------------

PATHS: Final = {
    "empty": "",
    "a slash only": "/",
    "a slash at the end": "x/",
    "a slash at the beginning": "/x",
    "an empty segment": "x//y",
    "a dot": ".",
    "two dots": "x/..",
    "two dots inside": "x/../y",
    "an escaped dot": "x/%2E",
    "escaped dots": "x/%2e%2E/y",
    "half escaped dots": "x/.%2e/y",
    "an escaped slash": "x%2Fy",
    "an escaped slash in lower case": "x%2fy",
    "an escaped slash at the end": "x%2F",
    "a stray percent": "x%",
    "half an escape": "x%4",
    "an escape that is none": "x%zz",
    "no UTF-8": "x%ff",
    "half a character": "x%c3",
    "an overlong slash": "x%c0%afy",
    "a surrogate": "x%ed%a0%80",
    "a NUL": "x%00",
    "a line break": "x%0Ay",
    "a carriage return": "x%0d",
    "a tab": "x%09",
    "a DEL": "x%7f",
    "a C1 control": "x%c2%85",
    "1,025 bytes": "x" * 1025,
    "1,026 bytes of two a character": "%c3%a4" * 513,
}
for _what, _path in PATHS.items():
    for _method in METHODS:
        _add(
            f"{_method}: a path with {_what}",
            _row(
                _method,
                f"{MOUNT}/{_path}",
                b"x" if _method == "POST" else b"",
                headers=(TEXT,),
                where="path",
            ),
        )

# --- conditions -----------------------------------------------------------------------------------

for _what, _method, _headers, _sent in (
    ("create", "PUT", (TEXT,), b""),
    ("append", "POST", (TEXT,), b"x"),
    ("close", "POST", ("Stream-Closed: true",), b""),
    ("delete", "DELETE", (), b""),
):
    for _tag in ("*", '"1-1"', ""):
        _add(
            f"{_what}: If-Match: {_tag}",
            _row(
                _method,
                f"{MOUNT}/{{s}}",
                _sent,
                headers=(*_headers, f"If-Match: {_tag}"),
                where="If-Match",
            ),
        )

# --- creating -------------------------------------------------------------------------------------


def _create(name: str, where: str | None, *headers: str, **more: Any) -> None:
    case = _row("PUT", f"{MOUNT}/{{a}}", headers=headers, where=where, **more)
    _add(f"create: {name}", case)


for _what, _value in {
    "empty": "",
    "a word": "abc",
    "negative": "-1",
    "with a plus": "+60",
    "with a zero in front": "060",
    "a fraction": "60.5",
    "scientific": "1e3",
    "hexadecimal": "0x10",
    "with a unit": "60s",
    "two": "60, 60",
    "2**53": "9007199254740992",
    "of 40 digits": "9" * 40,
}.items():
    _create(f"a TTL that is {_what}", "Stream-TTL", TEXT, f"Stream-TTL: {_value}")
for _what, _value in {
    "empty": "",
    "a word": "tomorrow",
    "a date": "2030-01-01",
    "without a zone": "2030-01-01T00:00:00",
    "a zone without a colon": "2030-01-01T00:00:00+0100",
    "month 13": "2030-13-01T00:00:00Z",
    "February 30": "2030-02-30T00:00:00Z",
    "hour 24": "2030-01-01T24:00:00Z",
    "year 0": "0000-01-01T00:00:00Z",
    "a number": "1893456000",
    "ten digits of a second": "2030-01-01T00:00:00.0123456789Z",
    "of RFC 1123": "Tue, 01 Jan 2030 00:00:00 GMT",
}.items():
    _create(f"an end that is {_what}", "Stream-Expires-At", TEXT, f"Stream-Expires-At: {_value}")
_create(
    "a TTL and an end",
    "Stream-Expires-At",
    TEXT,
    "Stream-TTL: 60",
    "Stream-Expires-At: 2030-01-01T00:00:00Z",
)
_create("a TTL twice", "header", TEXT, "Stream-TTL: 60", "Stream-TTL: 60")
_create("a type twice", "header", TEXT, TEXT)
_create("a type of 256 characters", None, "Content-Type: text/" + "x" * 251)
_create("JSON that is none", None, JSON, body=b"{")
_create("JSON with more behind it", None, JSON, body=b"{} {}")
_create("JSON that is no UTF-8", None, JSON, body=b'"\xff"')
_create(
    "a coding that is unknown",
    None,
    TEXT,
    "Content-Encoding: br",
    body=b"x",
    status=415,
    code="unsupported_media_type",
)
_create("gzip that is none", "Content-Encoding", TEXT, "Content-Encoding: gzip", body=b"x")
for _what, _value in {
    "empty": "",
    "a path only": "{s}",
    "of another mount": "/v2/stream/{s}",
    "the mount": MOUNT,
    "the mount and a slash": MOUNT + "/",
    "a URL": "http://localhost" + MOUNT + "/{s}",
    "with a query": MOUNT + "/{s}?x",
    "with dots": MOUNT + "/x/../{s}",
    "with an escaped slash": MOUNT + "/x%2F{s}",
    "with a stray percent": MOUNT + "/{s}%",
}.items():
    _create(f"a source that is {_what}", "Stream-Forked-From", f"Stream-Forked-From: {_value}")
SOURCE: Final = f"Stream-Forked-From: {MOUNT}/{{s}}"
for _what, _value in {
    "empty": "",
    "a word": "abc",
    "a number": "1",
    "-1": "-1",
    "now": "now",
    "negative": "-1_0",
    "of 21 digits": "0" * 21 + "_0",
    "2**64": "18446744073709551616_1",
    "three numbers": "1_2_3",
}.items():
    _create(
        f"a fork's offset that is {_what}",
        "Stream-Fork-Offset",
        SOURCE,
        f"Stream-Fork-Offset: {_value}",
    )
for _what, _value in {
    "empty": "",
    "a word": "abc",
    "negative": "-1",
    "a fraction": "1.0",
    "with a zero in front": "01",
    "of 40 digits": "9" * 40,
}.items():
    _create(
        f"a sub-offset that is {_what}",
        "Stream-Fork-Sub-Offset",
        SOURCE,
        f"Stream-Fork-Sub-Offset: {_value}",
    )
_create("an offset without a source", "Stream-Fork-Offset", "Stream-Fork-Offset: 0_0")
for _value in ("0", "1"):
    _create(
        f"sub-offset {_value} without a source",
        "Stream-Fork-Sub-Offset",
        f"Stream-Fork-Sub-Offset: {_value}",
    )
_create(
    "a sub-offset above 0 without an offset",
    "Stream-Fork-Sub-Offset",
    SOURCE,
    "Stream-Fork-Sub-Offset: 1",
)
_create(
    "a source that is not there",
    None,
    f"Stream-Forked-From: {MOUNT}/{{a}}-source",
    status=404,
    code="stream_not_found",
)
_add(
    "create: as another type",
    _row("PUT", f"{MOUNT}/{{s}}", headers=(JSON,), status=409, code="stream_conflict"),
)
_add(
    "create: with another TTL",
    _row(
        "PUT",
        f"{MOUNT}/{{s}}",
        headers=(TEXT, "Stream-TTL: 60"),
        status=409,
        code="stream_conflict",
    ),
)

# --- appending ------------------------------------------------------------------------------------


def _append(name: str, where: str | None, *headers: str, **more: Any) -> None:
    more = {"target": f"{MOUNT}/{{s}}", "body": b"more", **more}
    _add(f"append: {name}", _row("POST", headers=headers, where=where, **more))


_append("no body", None, TEXT, body=b"")
_append("no body, closed: false", None, TEXT, "Stream-Closed: false", body=b"")
_append("no type", "Content-Type")
_append("an empty type", "Content-Type", "Content-Type: ")
for _what in ("text", "text/", "/plain", "text/plain, text/html", "te xt/plain", "text plain"):
    _append(f"the type {_what}", "Content-Type", f"Content-Type: {_what}")
_append("a type of 256 characters", None, "Content-Type: text/" + "x" * 251)
_append("another type", "Content-Type", JSON, status=409, code="stream_conflict")
_append("an empty Stream-Seq", "Stream-Seq", TEXT, "Stream-Seq: ")
_append("a Stream-Seq of 1,025 bytes", "Stream-Seq", TEXT, "Stream-Seq: " + "x" * 1025)
_append("Stream-Seq twice", "header", TEXT, "Stream-Seq: 1", "Stream-Seq: 2")
_append("Stream-Closed twice", "header", TEXT, "Stream-Closed: true", "Stream-Closed: true")
_append("to nothing", None, TEXT, target=f"{MOUNT}/{{a}}", status=404, code="stream_not_found")
_append("to a closed one", None, TEXT, target=f"{MOUNT}/{{c}}", status=409, code="stream_closed")
_append(
    "a coding that is unknown",
    None,
    TEXT,
    "Content-Encoding: deflate",
    status=415,
    code="unsupported_media_type",
)
_append("gzip that is none", "Content-Encoding", TEXT, "Content-Encoding: gzip")
_append(
    "half of gzip",
    "Content-Encoding",
    TEXT,
    "Content-Encoding: gzip",
    body=gzip.compress(b"more" * 100)[:-9],
)
_append(
    "too large",
    None,
    TEXT,
    "Content-Length: 67108865",
    status=413,
    code="payload_too_large",
    body=b"x",
)
_append(
    "a message too large",
    None,
    TEXT,
    status=413,
    code="payload_too_large",
    body=b"x" * (1024 * 1024 + 1),
)
PRODUCER: Final = {"Id": "p", "Epoch": "0", "Seq": "0"}
for _name in PRODUCER:
    _append(
        f"no Producer-{_name}",
        f"Producer-{_name}",
        TEXT,
        *(f"Producer-{name}: {value}" for name, value in PRODUCER.items() if name != _name),
    )
for _name, _values in {
    "Id": {"empty": "", "of 257 characters": "p" * 257},
    **{
        number: {
            "empty": "",
            "a word": "one",
            "negative": "-1",
            "a fraction": "1.0",
            "scientific": "1e3",
            "2**53": "9007199254740992",
        }
        for number in ("Epoch", "Seq")
    },
}.items():
    for _what, _value in _values.items():
        _append(
            f"a Producer-{_name} that is {_what}",
            f"Producer-{_name}",
            TEXT,
            *(f"Producer-{name}: {old}" for name, old in (PRODUCER | {_name: _value}).items()),
        )
        _append(
            f"only closing, a Producer-{_name} that is {_what}",
            f"Producer-{_name}",
            "Stream-Closed: true",
            *(f"Producer-{name}: {old}" for name, old in (PRODUCER | {_name: _value}).items()),
            body=b"",
        )
_append(
    "a producer that begins with seq 1",
    None,
    TEXT,
    *(f"Producer-{name}: {value}" for name, value in (PRODUCER | {"Seq": "1"}).items()),
    status=409,
    code="producer_seq_conflict",
)
for _what, _body in {
    "that is none": b"{",
    "that is empty": b" ",
    "of no message": b"[]",
    "with a comma too many": b"[1,]",
    "with more behind it": b"[1] 2",
    "that is no UTF-8": b'["\xff"]',
    "with a lone surrogate": b'["\\ud800"]',
    "with a byte-order mark": b"\xef\xbb\xbf[1]",
    "with NaN": b"[NaN]",
    "a message of 513 levels": b"[" * 514 + b"]" * 514,
}.items():
    _append(f"JSON {_what}", None, JSON, target=f"{MOUNT}/{{j}}", body=_body)
_add(
    "close: nothing",
    _row(
        "POST",
        f"{MOUNT}/{{a}}",
        headers=("Stream-Closed: true",),
        status=404,
        code="stream_not_found",
    ),
)

# --- reading --------------------------------------------------------------------------------------

OFFSETS: Final = {
    "empty": "",
    "a word": "abc",
    "a number": "1",
    "-2": "-2",
    "Now": "Now",
    "with a sign": "%2B1_1",
    "negative": "-1_1",
    "with a blank": "1_1%20",
    "with a NUL": "1_1%00",
    "with a comma": "1,1",
    "with a slash": "../1_1",
    "of 21 digits": "0" * 21 + "_1",
    "2**64": "18446744073709551616_1",
    "three numbers": "1_2_3",
    "of other digits": "%D9%A1_%D9%A1",
    "no UTF-8": "%ff",
}
for _what, _value in OFFSETS.items():
    for _live in ("", "&live=long-poll", "&live=sse"):
        _add(
            f"read: an offset that is {_what}{_live}",
            _row(
                "GET",
                f"{MOUNT}/{{s}}?offset={_value}{_live}",
                where=None if _what == "no UTF-8" else "offset",
            ),
        )
for _what, _query, _field in (
    ("two offsets", "offset=-1&offset=-1", "offset"),
    ("two modes", "offset=-1&live=sse&live=sse", "live"),
    ("two cursors", "offset=-1&cursor=1&cursor=2", "cursor"),
    ("an empty mode", "offset=-1&live=", "live"),
    ("another mode", "offset=-1&live=poll", "live"),
    ("the mode true", "offset=-1&live=true", "live"),
    ("SSE in upper case", "offset=-1&live=SSE", "live"),
    ("a long-poll without an offset", "live=long-poll", "offset"),
    ("events without an offset", "live=sse", "offset"),
    ("a name that is no UTF-8", "%ff=1", None),
):
    _add(f"read: {_what}", _row("GET", f"{MOUNT}/{{s}}?{_query}", where=_field))
for _what, _query in (
    ("a page", ""),
    ("a poll", "?offset=-1&live=long-poll"),
    ("events", "?offset=-1&live=sse"),
    ("the end", "?offset=now"),
):
    _add(
        f"read: {_what} of nothing",
        _row("GET", f"{MOUNT}/{{a}}{_query}", status=404, code="stream_not_found"),
    )
for _what, _offset in (
    ("of another stream", "0000000000000001_0000000099999999"),
    ("behind the end", "0000000000000099_0000000000000001"),
):
    for _live in ("", "&live=long-poll", "&live=sse"):
        _add(
            f"read: an offset {_what}{_live}",
            _row("GET", f"{MOUNT}/{{s}}?offset={_offset}{_live}", status=410, code="stream_gone"),
        )
_add("delete: nothing", _row("DELETE", f"{MOUNT}/{{a}}", status=404, code="stream_not_found"))
_add("the mount itself", _row("GET", MOUNT, status=404, code="not_found"))
for _method in ("PATCH", "TRACE"):
    _add(
        f"the method {_method}",
        _row(_method, f"{MOUNT}/{{s}}", status=405, code="method_not_allowed"),
    )


@pytest.fixture(scope="module")
def paths(api: Api) -> dict[str, str]:
    """The requested streams, and a path without one."""
    made = {name: new_name(f"bad-{name}") for name in "sjca"}
    for name, headers, body in (
        ("s", {"content-type": "text/plain"}, b"kept"),
        ("j", {"content-type": "application/json"}, b'["kept"]'),
        ("c", {"content-type": "text/plain", "stream-closed": "true"}, b""),
    ):
        told = api.http.put(f"{MOUNT}/{made[name]}", headers=headers, content=body)
        assert told.status_code == 201, told.text
    return made


def _state(api: Api, paths: dict[str, str]) -> list[Any]:
    found: list[Any] = [api.http.get("/v0/ready").json()["topics"]]
    for name in "sjca":
        told = api.http.get(f"{MOUNT}/{paths[name]}")
        keys = ("stream-next-offset", "stream-closed", "content-type", "etag")
        body = told.content if told.status_code == 200 else b""
        found.append((told.status_code, body, [told.headers.get(key) for key in keys]))
    return found


def test_there_are_enough_cases() -> None:
    CASES.check(80)


for _method in METHODS:
    CASES.marked[f"{_method}: a path with a line break"] = pytest.mark.connection(
        "mounted", reason="a mount of Starlette matches no path with a line break"
    )


@pytest.mark.parametrize("name", CASES.params())
def test_it_is_refused_and_changes_nothing(api: Api, paths: dict[str, str], name: str) -> None:
    case = CASES[name]
    before = _state(api, paths)
    answer = sent(api, case, paths)
    if case.where is not None:
        assert answer.json()["error"]["detail"]["field"] == case.where
    assert answer.headers["x-content-type-options"] == "nosniff"
    if case.code == "stream_closed":
        assert answer.headers["stream-closed"] == "true"
        assert answer.headers["stream-next-offset"]
    assert _state(api, paths) == before
