"""Malformed requests: each gets its status, code and field, and leaves nothing behind.

Tests §0.3, §0.5, §0.6, §1-§5 on their refusals, and the settled points on verbatim bytes, names,
numbers and queries. Requests are sent as bytes. `{t}` is a topic with three records, `{a}` one that
does not exist; after each request the first is unchanged and the second is still absent.
"""

from __future__ import annotations

import gzip
import json
import socket
import zlib
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

import pytest

from tests.contract.conftest import new_name
from tests.contract.driver import Api, Json, refused
from tests.contract.malformed import MEDIA, Bad, Table, as_json, sent

MIB: Final = 1024 * 1024


def _append(record: bytes, rest: bytes = b"") -> bytes:
    return b'{"records":[{"data":0},' + record + b"]" + rest + b"}"


CASES = Table()
_add = CASES.add


# --- text that is no JSON, sent to every endpoint that takes a body -------------------------------
NOT_JSON: Final[dict[str, bytes]] = {
    "one space": b" ",
    "a word": b"records",
    "half an object": b'{"records":[{"data":1}]',
    "half a string": b'{"records":[{"data":"x',
    "two values": b'{"records":[{"data":1}],"before_seq":1} {}',
    "text behind": b'{"records":[{"data":1}],"before_seq":1}x',
    "a trailing comma": b'{"records":[{"data":1}],"before_seq":1,}',
    "single quotes": b"{'records':[{'data':1}],'before_seq':1}",
    "bare keys": b"{records:[{data:1}],before_seq:1}",
    "a comment": b'{"records":[{"data":1}],"before_seq":1 /* x */}',
    "NaN": b'{"records":[{"data":NaN}],"before_seq":NaN,"from_seq":NaN,"ttl_ms":NaN}',
    "a control character": b'{"records":[{"data":"a\nb"}],"node":"a\nb","dead_letter":"a\nb"}',
    "invalid UTF-8": b'{"records":[{"data":"\xff"}],"x":"\xff","before_seq":1}',
    "UTF-16": '{"records":[{"data":1}],"before_seq":1}'.encode("utf-16"),
    "a byte order mark": b'\xef\xbb\xbf{"records":[{"data":1}],"before_seq":1}',
    "null characters": b"\x00\x00\x00\x00",
    "a million brackets": b"[" * 1_000_000,
    "an array": b"[]",
    "a number": b"7",
    "null": b"null",
    "a string": b'"{}"',
}
for _what, _body in NOT_JSON.items():
    _add(f"append: {_what}", Bad("POST", "/v0/topics/{a}", _body))
    _add(f"append to existing: {_what}", Bad("POST", "/v0/topics/{t}", _body))
    _add(f"put: {_what}", Bad("PUT", "/v0/topics/{a}", _body))
    _add(f"diff: {_what}", Bad("POST", "/v0/topics/{t}/diff", _body))
    _add(f"delete: {_what}", Bad("POST", "/v0/topics/{t}/delete", _body))

# # --- data and meta: the server checks the grammar, and nothing else
# -------------------------------
BAD_VALUES: Final[dict[str, bytes]] = {
    "a leading zero": b"01",
    "a leading plus": b"+1",
    "a bare minus": b"-",
    "a point without digits": b"1.",
    "a point first": b".5",
    "an empty exponent": b"1e",
    "hex": b"0x10",
    "an underscore": b"1_000",
    "infinity": b"Infinity",
    "minus infinity": b"-Infinity",
    "nan": b"NaN",
    "a capital literal": b"True",
    "a cut literal": b"nul",
    "a long literal": b"nulll",
    "undefined": b"undefined",
    "nothing at all": b"",
    "an unknown escape": rb'"\x41"',
    "a cut escape": rb'"\u12"',
    "an escape of no hex": rb'"\u12g4"',
    "a raw tab": b'"a\tb"',
    "a raw null": b'"a\x00b"',
    "a lone high surrogate": rb'"\ud800"',
    "a lone low surrogate": rb'"\udfff"',
    "surrogates the wrong way round": rb'"\udc00\ud800"',
    "a lone surrogate as key": rb'{"\ud800":1}',
    "overlong UTF-8": b'"\xc0\x80"',
    "a UTF-8 surrogate": b'"\xed\xa0\x80"',
    "UTF-8 beyond Unicode": b'"\xf4\x90\x80\x80"',
    "cut UTF-8": b'"\xf0\x9f\x98"',
    "a stray continuation": b'"\x80"',
    "latin-1": b'"\xe4"',
    "a missing comma": b"[1 2]",
    "a missing colon": b'{"a" 1}',
    "a number as key": b"{1:2}",
    "a comma alone": b"[,]",
    "a bracket too many": b"[]]",
    "brackets crossed": b"[{]}",
    "nesting of 513 arrays": b"[" * 513 + b"]" * 513,
    "nesting of 513 objects": b'{"a":' * 512 + b"{}" + b"}" * 512,
}
for _what, _value in BAD_VALUES.items():
    _add(f"data: {_what}", Bad("POST", "/v0/topics/{t}", _append(b'{"data":' + _value + b"}")))
    _add(
        f"meta: {_what}",
        Bad("POST", "/v0/topics/{t}", _append(b'{"data":0,"meta":{"k":' + _value + b"}}")),
    )
_add(
    "an unknown field: invalid UTF-8",
    Bad("POST", "/v0/topics/{t}", b'{"records":[{"data":0}],"later":"\xff"}'),
)
_add(
    "an unknown field: broken JSON",
    Bad("POST", "/v0/topics/{t}", b'{"records":[{"data":0}],"later":01}'),
)

# --- types and ranges of an append ----------------------------------------------------------------
APPEND_FIELDS: Final[list[tuple[str, object]]] = [
    ("node", 1),
    ("node", True),
    ("node", ["a"]),
    ("node", {}),
    ("node", "n" * 129),
    ("node", "ä" * 65),
    ("idempotency_key", 5),
    ("idempotency_key", []),
    ("idempotency_key", "k" * 257),
    ("idempotency", "per_call"),
    ("idempotency", "per_record" * 10),
    ("idempotency", True),
    ("idempotency", {}),
    ("create", 1),
    ("create", "true"),
    ("create", []),
    ("disable_backpressure", 0),
    ("disable_backpressure", "false"),
]
for _name, _wrong in APPEND_FIELDS:
    for _target in ("{t}", "{a}"):
        _add(
            f"append {_target} {_name}={str(_wrong)[:20]!r}",
            Bad(
                "POST",
                f"/v0/topics/{_target}",
                as_json({"records": [{"data": 1}], _name: _wrong}),
                where=_name,
            ),
        )
RECORDS: Final[list[tuple[str, object, str]]] = [
    ("no records", {}, "records"),
    ("records null", {"records": None}, "records"),
    ("records an object", {"records": {"data": 1}}, "records"),
    ("records a number", {"records": 1}, "records"),
    ("records empty", {"records": []}, "records"),
    ("a record null", {"records": [None]}, "records[0]"),
    ("a record a number", {"records": [{"data": 1}, 2]}, "records[1]"),
    ("a record an array", {"records": [["data", 1]]}, "records[0]"),
    ("no data", {"records": [{}]}, "records[0].data"),
    ("no data in the third", {"records": [{"data": 1}] * 2 + [{"meta": {}}]}, "records[2].data"),
    ("data in capitals", {"records": [{"Data": 1}]}, "records[0].data"),
    ("tag a number", {"records": [{"data": 1, "tag": 1}]}, "records[0].tag"),
    ("tag a list", {"records": [{"data": 1, "tag": []}]}, "records[0].tag"),
    ("tag true", {"records": [{"data": 1, "tag": True}]}, "records[0].tag"),
    ("tag too long", {"records": [{"data": 1, "tag": "t" * 257}]}, "records[0].tag"),
    ("tag too many bytes", {"records": [{"data": 1, "tag": "水" * 86}]}, "records[0].tag"),
    ("node a number", {"records": [{"data": 1, "node": 1}]}, "records[0].node"),
    ("node an object", {"records": [{"data": 1, "node": {}}]}, "records[0].node"),
    ("node too long", {"records": [{"data": 1, "node": "n" * 129}]}, "records[0].node"),
    ("meta a list", {"records": [{"data": 1, "meta": []}]}, "records[0].meta"),
    ("meta a string", {"records": [{"data": 1, "meta": "{}"}]}, "records[0].meta"),
    ("meta a number", {"records": [{"data": 1, "meta": 1}]}, "records[0].meta"),
    (
        "meta with 65 keys",
        {"records": [{"data": 1, "meta": {f"k{n}": 0 for n in range(65)}}]},
        "records[0].meta",
    ),
    (
        "meta too long",
        {"records": [{"data": 1, "meta": {"k": "v" * 17_000}}]},
        "records[0].meta",
    ),
]
for _what, _value_, _where in RECORDS:
    for _target in ("{t}", "{a}"):
        _add(
            f"append {_target} {_what}",
            Bad("POST", f"/v0/topics/{_target}", as_json(_value_), where=_where),
        )
_add(
    "append a record too large",
    Bad(
        "POST",
        "/v0/topics/{a}",
        as_json({"records": [{"data": "x" * MIB}]}),
        code="record_too_large",
    ),
)
_add(
    "append 10,001 records",
    Bad(
        "POST",
        "/v0/topics/{a}",
        as_json({"records": [{"data": 0}] * 10_001}),
        code="batch_too_large",
    ),
)
for _what, _config, _where in (
    ("ttl_ms=-1", {"ttl_ms": -1}, "config.ttl_ms"),
    ("ttl_ms=1.0", {"ttl_ms": 1.0}, "config.ttl_ms"),
    ("durability=never", {"durability": "never"}, "config.durability"),
    ("a list", [], "config"),
):
    _add(
        f"append with config {_what}",
        Bad(
            "POST",
            "/v0/topics/{a}",
            as_json({"records": [{"data": 1}], "config": _config}),
            where=_where,
        ),
    )

# --- numbers --------------------------------------------------------------------------------------
NUMBERS: Final[dict[str, bytes]] = {
    "-1": b"-1",
    "1.0": b"1.0",
    "1e3": b"1e3",
    "a string": b'"1"',
    "true": b"true",
    "2**64": b"18446744073709551616",
    "a huge number": b"9" * 5000,
    "a list": b"[1]",
    "1e400": b"1e400",
}
# The refusal need not name their field: a JSON reader may give up on them before it knows the
# position.
UNREADABLE: Final = ("a huge number", "1e400")
for _what, _value in NUMBERS.items():
    _named = _what not in UNREADABLE
    for _suffix, _name in (
        ("/diff", "from_seq"),
        ("/diff", "limit"),
        ("/diff", "wait_ms"),
        ("/delete", "before_seq"),
    ):
        _add(
            f"{_name}: {_what}",
            Bad(
                "POST",
                "/v0/topics/{t}" + _suffix,
                b'{"' + _name.encode() + b'":' + _value + b"}",
                where=_name if _named else None,
            ),
        )
    for _name in ("ttl_ms", "cap_records", "cap_bytes", "idempotency_window_ms", "lease_ms"):
        _add(
            f"put {_name}: {_what}",
            Bad(
                "PUT",
                "/v0/topics/{a}",
                b'{"' + _name.encode() + b'":' + _value + b"}",
                where=_name if _named else None,
            ),
        )
_add("priority above i32", Bad("PUT", "/v0/topics/{a}", b'{"priority":2147483648}'))
_add("priority below i32", Bad("PUT", "/v0/topics/{a}", b'{"priority":-2147483649}'))
_add("priority a fraction", Bad("PUT", "/v0/topics/{a}", b'{"priority":1.5}', where="priority"))

# --- other types of diff, delete, PUT -------------------------------------------------------------
FIELDS: Final[list[tuple[str, str, str, object]]] = [
    ("POST", "/v0/topics/{t}/diff", "node", 1),
    ("POST", "/v0/topics/{t}/diff", "node", {}),
    ("POST", "/v0/topics/{t}/diff", "node", [1]),
    ("POST", "/v0/topics/{t}/diff", "node", [["a"]]),
    ("POST", "/v0/topics/{t}/diff", "include_tags", 1),
    ("POST", "/v0/topics/{t}/diff", "include_meta", "no"),
    ("POST", "/v0/topics/{t}/diff", "from_seq", {}),
    ("POST", "/v0/topics/{t}/delete", "match", 1),
    ("POST", "/v0/topics/{t}/delete", "match", {}),
    ("POST", "/v0/topics/{t}/delete", "match", []),
    ("POST", "/v0/topics/{t}/delete", "match", ["tag", "Eq"]),
    ("POST", "/v0/topics/{t}/delete", "match", ["tag", "Eq", 5]),
    ("POST", "/v0/topics/{t}/delete", "match", ["tag", "Like", "a"]),
    ("POST", "/v0/topics/{t}/delete", "match", ["seq", "Eq", "a"]),
    ("POST", "/v0/topics/{t}/delete", "match", ["tag", "Glob", "a"]),
    ("POST", "/v0/topics/{t}/delete", "match", ["tag", "Glob", "*a"]),
    ("POST", "/v0/topics/{t}/delete", "match", ["tag", "Glob", "a*a*"]),
    ("PUT", "/v0/topics/{a}", "type", "topic"),
    ("PUT", "/v0/topics/{a}", "type", 1),
    ("PUT", "/v0/topics/{a}", "discard", "newest"),
    ("PUT", "/v0/topics/{a}", "durability", "safe"),
    ("PUT", "/v0/topics/{a}", "durable", "yes"),
    ("PUT", "/v0/topics/{a}", "auto_priority", 1),
    ("PUT", "/v0/topics/{a}", "auto_create", "x"),
    ("PUT", "/v0/topics/{a}", "dedupe_node", []),
    ("PUT", "/v0/topics/{a}", "leases_durable", 0),
    ("PUT", "/v0/topics/{a}", "max_deliveries", -1),
    ("PUT", "/v0/topics/{a}", "claim_jitter_ms", -1),
    ("PUT", "/v0/topics/{a}", "dead_letter", "not a name"),
    ("PUT", "/v0/topics/{a}", "dead_letter", "../etc"),
    ("PUT", "/v0/topics/{a}", "dead_letter", 1),
    ("PUT", "/v0/topics/{t}", "durability", "safe"),
    ("PUT", "/v0/topics/{t}", "cap_records", "1"),
]
for _method, _target, _name, _wrong in FIELDS:
    _add(
        f"{_method} {_target} {_name}={json.dumps(_wrong)}",
        Bad(_method, _target, as_json({_name: _wrong}), where=_name),
    )
_add("delete with neither", Bad("POST", "/v0/topics/{t}/delete", b"{}"))

# --- encodings ------------------------------------------------------------------------------------
GOOD_APPEND: Final = b'{"records":[{"data":1}]}'
_packed: Final = gzip.compress(GOOD_APPEND)
ENCODED: Final[dict[str, tuple[str, bytes]]] = {
    "gzip that is none": ("gzip", GOOD_APPEND),
    "gzip cut short": ("gzip", _packed[:-9]),
    "gzip without its checksum": ("gzip", _packed[:-8]),
    "gzip with a wrong checksum": ("gzip", _packed[:-8] + b"\0" * 8),
    "gzip with text behind": ("gzip", _packed + b"tail"),
    "gzip of no JSON": ("gzip", gzip.compress(b"{")),
    "an empty gzip body": ("gzip", gzip.compress(b"")),
    "a zlib body called gzip": ("gzip", zlib.compress(GOOD_APPEND)),
}
for _what, (_coding, _body) in ENCODED.items():
    _add(
        f"encoding: {_what}",
        Bad("POST", "/v0/topics/{a}", _body, headers=(MEDIA, f"Content-Encoding: {_coding}")),
    )
for _coding in ("br", "deflate", "zstd", "compress", "gzip, br", "nonsense"):
    _add(
        f"encoding {_coding}",
        Bad(
            "POST",
            "/v0/topics/{a}",
            GOOD_APPEND,
            headers=(MEDIA, f"Content-Encoding: {_coding}"),
            other=(415, "unsupported_media_type"),
        ),
    )

# --- media types ----------------------------------------------------------------------------------
for _media in (
    "application/x-www-form-urlencoded",
    "text/json",
    "application/x-ndjson",
    "application/octet-stream",
    "application/vnd.api+json",
    "json",
    "application/json, text/plain",
    "",
):
    for _method, _target in (
        ("POST", "/v0/topics/{a}"),
        ("PUT", "/v0/topics/{a}"),
        ("POST", "/v0/topics/{t}/diff"),
        ("POST", "/v0/topics/{t}/delete"),
    ):
        _add(
            f"media type {_media!r} {_method} {_target}",
            Bad(
                _method,
                _target,
                b'{"records":[{"data":1}],"before_seq":9}',
                415,
                "unsupported_media_type",
                headers=(f"Content-Type: {_media}",),
            ),
        )
_add(
    "no media type at all",
    Bad("POST", "/v0/topics/{a}", GOOD_APPEND, 415, "unsupported_media_type", headers=()),
)

# --- sizes ----------------------------------------------------------------------------------------
_add(
    "a declared body of 64 MiB and a byte",
    Bad(
        "POST",
        "/v0/topics/{a}",
        status=413,
        code="payload_too_large",
        headers=(MEDIA, f"Content-Length: {64 * MIB + 1}"),
    ),
)
_add(
    "a declared body of 2**62 bytes",
    Bad(
        "POST",
        "/v0/topics/{a}",
        status=413,
        code="payload_too_large",
        headers=(MEDIA, f"Content-Length: {2**62}"),
    ),
)
_add(
    "an inflated body over 64 MiB",
    Bad(
        "POST",
        "/v0/topics/{a}",
        gzip.compress(b" " * (65 * MIB), 1),
        413,
        "payload_too_large",
        headers=(MEDIA, "Content-Encoding: gzip"),
    ),
)

# --- names ----------------------------------------------------------------------------------------
NAMES: Final[dict[str, str]] = {
    "a slash escaped": "{a}%2Fb",
    "a slash escaped small": "{a}%2fb",
    "a slash escaped twice": "{a}%252Fb",
    "a backslash": "{a}%5Cb",
    "dots escaped": "%2E%2E",
    "a way out": "%2E%2E%2F%2E%2E%2Fetc%2Fpasswd",
    "a null": "{a}%00",
    "a newline": "{a}%0A",
    "carriage return and newline": "{a}%0D%0AX-Header:%201",
    "a space": "{a}%20b",
    "a plus": "{a}+b",
    "a percent": "{a}%25",
    "a cut escape": "{a}%4",
    "an escape of no hex": "{a}%zz",
    "a tilde": "{a}~",
    "a star": "{a}*",
    "an arrow": "{a}->b",
    "a question mark escaped": "{a}%3Fx",
    "a hash escaped": "{a}%23x",
    "UTF-8": "{a}%C3%A4",
    "invalid UTF-8": "{a}%FF",
    "overlong UTF-8": "{a}%C0%AF",
    "a leading dot": ".{a}",
    "a leading dash": "-{a}",
    "a leading colon": ":{a}",
    "a leading underscore": "_{a}",
    "256 characters": "n" * 256,
    "8000 characters": "n" * 8000,
    "quotes": "%22{a}%22",
    "a fullwidth letter": "%EF%BC%A1",
    "a delete character": "{a}%7F",
    "a semicolon": "{a};v=1",
    "an equals sign": "{a}=b",
    "an at sign": "user@{a}",
    "brackets": "{a}%5B0%5D",
}
for _what, _name in NAMES.items():
    _add(f"name: {_what}: PUT", Bad("PUT", f"/v0/topics/{_name}", b"{}"))
    _add(f"name: {_what}: append", Bad("POST", f"/v0/topics/{_name}", GOOD_APPEND))
    _add(f"name: {_what}: diff", Bad("POST", f"/v0/topics/{_name}/diff", b"{}"))
    _add(f"name: {_what}: delete", Bad("POST", f"/v0/topics/{_name}/delete", b'{"before_seq":1}'))
    _add(f"name: {_what}: GET", Bad("GET", f"/v0/topics/{_name}", headers=()))
    _add(f"name: {_what}: DELETE", Bad("DELETE", f"/v0/topics/{_name}", headers=()))
for _method, _target in (
    ("POST", "/v0/topics/{a}/b"),
    ("GET", "/v0/topics/{a}/b"),
    ("PUT", "/v0/topics/{a}/b/c"),
    ("POST", "/v0/topics/{a}/diff/x"),
    ("POST", "/v0/topic/{a}"),
    ("POST", "/V0/topics/{a}"),
    ("POST", "/v00/topics/{a}"),
):
    _add(
        f"unknown path {_method} {_target}",
        Bad(_method, _target, GOOD_APPEND if _method != "GET" else b"", 404, "not_found"),
    )
_add("an empty name", Bad("POST", "/v0/topics//diff", GOOD_APPEND, 400, "invalid_request"))
for _target in ("/v0/topics/", "//v0/topics/{a}", "/v0//topics/{a}"):
    _add(
        f"an empty part {_target}",
        Bad("POST", _target, GOOD_APPEND, 404, "not_found", other=(400, "invalid_request")),
    )

# --- query values ---------------------------------------------------------------------------------
for _target in (
    "/v0/topics?page_size=x",
    "/v0/topics?page_size=-1",
    "/v0/topics?page_size=1.5",
    "/v0/topics?page_size=",
    "/v0/topics?touch=maybe",
    "/v0/topics?touch=",
    "/v0/topics?touch=1.0",
    "/v0/topics?cursor=%",
    "/v0/topics?cursor=nonsense",
    "/v0/topics?cursor=e30%3D",
    "/v0/topics?cursor=AAAA",
    "/v0/topics?cursor=%FF",
    "/v0/topics/{t}?touch=perhaps",
    "/v0/topics/{t}?touch=TRUE%00",
    "/v0/topics/{t}?touch=2",
):
    _add(f"query GET {_target}", Bad("GET", _target, headers=()))
for _target in ("/v0/topics/{t}?if_empty=maybe", "/v0/topics/{t}?if_empty="):
    _add(f"query DELETE {_target}", Bad("DELETE", _target, headers=()))
for _target in ("/v0/topics/{t}?return_seqs=maybe", "/v0/topics/{a}?return_seqs=-1"):
    _add(f"query POST {_target}", Bad("POST", _target, GOOD_APPEND))

# --- headers --------------------------------------------------------------------------------------
_add(
    "an idempotency key of 257 characters in the header",
    Bad("POST", "/v0/topics/{a}", GOOD_APPEND, headers=(MEDIA, f"Idempotency-Key: {'k' * 257}")),
)
_add(
    "PATCH of a list",
    Bad("PATCH", "/v0/topics", b"{}", 405, "method_not_allowed"),
)
_add("a method for the list", Bad("POST", "/v0/topics", b"{}", 405, "method_not_allowed"))
_add("GET of diff", Bad("GET", "/v0/topics/{t}/diff", status=405, code="method_not_allowed"))
_add("PUT of delete", Bad("PUT", "/v0/topics/{t}/delete", b"{}", 405, "method_not_allowed"))
_add("DELETE of diff", Bad("DELETE", "/v0/topics/{t}/diff", status=405, code="method_not_allowed"))

# --- conflicts and absences -----------------------------------------------------------------------
_add(
    "a changed type",
    Bad("PUT", "/v0/topics/{t}", b'{"type":"queue"}', 409, "topic_exists_incompatible"),
)
_add(
    "if_empty on records",
    Bad("DELETE", "/v0/topics/{t}?if_empty=true", status=409, code="topic_not_empty"),
)
_add(
    "append without creation",
    Bad(
        "POST",
        "/v0/topics/{a}",
        b'{"records":[{"data":1}],"create":false}',
        404,
        "topic_not_found",
    ),
)
_add("diff of nothing", Bad("POST", "/v0/topics/{a}/diff", b"{}", 404, "topic_not_found"))
_add(
    "delete in nothing",
    Bad("POST", "/v0/topics/{a}/delete", b'{"before_seq":1}', 404, "topic_not_found"),
)
_add("state of nothing", Bad("GET", "/v0/topics/{a}", status=404, code="topic_not_found"))
_add("dead letter to itself", Bad("PUT", "/v0/topics/{a}", b'{"dead_letter":"{a}"}'))


@pytest.fixture(scope="module")
def standing(api: Api) -> str:
    """A topic with three records that no case may change."""
    name = new_name("standing")
    api.append(name, [{"data": n, "tag": f"a{n}", "node": "n"} for n in range(3)])
    return name


def _facts(api: Api, topic: str) -> Json:
    moving = ("performance", "last_read_ts", "effective_priority", "disk_bytes")
    return {key: value for key, value in api.get_state(topic).items() if key not in moving}


# --- plain reads ------------------------------------------------------------------------------
for _query, _field in {
    "from_seq=x": "from_seq",
    "from_seq=-1": "from_seq",
    "from_seq=18446744073709551616": "from_seq",
    "before_seq=1.5": "before_seq",
    "limit=ten": "limit",
    "last=0": "last",
    "last=": "last",
    "last=2&order=desc": "last",
    "last=2&from_seq=1": "last",
    "last=2&since=1h": "last",
    "since=1h&from_seq=1": "since",
    "since=yesterday": "since",
    "since=2026-13-01T00:00:00Z": "since",
    "since=2026-01-01T00:00:00": "since",
    "until=-1h": "until",
    "order=random": "order",
    "include_tags=1": "include_tags",
    "include_meta=yes": "include_meta",
    "wait_ms=1s": "wait_ms",
    "max_batch_bytes=1KB": "max_batch_bytes",
    "filter=k1": "filter",
    "filter=%5B%5D": "filter",
    "filter=%7B%7D": "filter",
    "filter=%5B%22Not%22%5D": "filter",
    f"tag={'x' * 70_000}": None,
}.items():
    _target = f"/v0/topics/{{t}}/records?{_query}"
    if _field is None:
        _name = f"records: {_query[:40]}"
        _add(_name, Bad("GET", _target, status=414, code="uri_too_long"))
        CASES.marked[_name] = pytest.mark.connection(
            reason="uvicorn's protocol refuses a target of over 64 KiB in words of its own"
        )
    else:
        _add(f"records: {_query}", Bad("GET", _target, where=_field))
for _seq in ("0", "-1", "1.5", "x", "1e3", "99999999999999999999999"):
    _add(f"record {_seq}", Bad("GET", f"/v0/topics/{{t}}/records/{_seq}", where="seq"))
_add(
    "a record that is not there",
    Bad("GET", "/v0/topics/{t}/records/99", status=404, code="record_not_found"),
)
_DEEP: object = "a"
for _ in range(8):
    _DEEP = ["Not", _DEEP]
for _what, _filter, _at in (
    ("a number", 7, "filter"),
    ("an object", {"tag": "a"}, "filter"),
    ("a word", ["Xor", "a", "b"], "filter"),
    ("an empty Or", ["Or"], "filter"),
    ("Not of two", ["Not", "a", "b"], "filter"),
    ("a field", ["data", "Eq", "a"], "filter"),
    ("an operator", ["tag", "Like", "a"], "filter"),
    ("Eq of a number", ["tag", "Eq", 1], "filter"),
    ("an empty In", ["tag", "In", []], "filter"),
    ("In of a number", ["tag", "In", ["a", 1]], "filter[2][1]"),
    ("a Glob without a star", ["tag", "Glob", "a"], "filter[2]"),
    ("a Glob of two stars", ["tag", "Glob", "a*b*"], "filter[2]"),
    ("a Glob of nodes", ["node", "Glob", "a*"], "filter"),
    ("a part of Or", ["Or", "a", ["tag", "Eq", None]], "filter[2]"),
    ("too deep", _DEEP, "filter" + "[1]" * 8),
    ("too many leaves", ["Or", *["a"] * 257], "filter"),
    ("too many in two lists", ["Or", ["tag", "In", ["a"] * 200], ["tag", "In", ["a"] * 200]], None),
    ("a long tag", ["tag", "Eq", "x" * 70_000], "filter[2]"),
    ("too many bytes", ["tag", "In", ["x" * 65_000] * 5], "filter"),
):
    _add(
        f"diff: filter: {_what}",
        Bad("POST", "/v0/topics/{t}/diff", as_json({"filter": _filter}), where=_at),
    )
for _what, _start, _where in (
    ("two starts", {"from_seq": 1, "last": 1}, "last"),
    ("three starts", {"since": "1h", "last": 1}, "last"),
    ("last 0", {"last": 0}, "last"),
    ("last as text", {"last": "1"}, "last"),
    ("a wrong time", {"since": "noon"}, "since"),
    ("a time below 0", {"since": -1}, "since"),
):
    _add(f"diff: {_what}", Bad("POST", "/v0/topics/{t}/diff", as_json(_start), where=_where))


for _name in CASES:
    if _name.startswith(
        ("name: a newline: diff", "name: a newline: delete", "name: carriage return and newline")
    ):
        CASES.marked[_name] = pytest.mark.connection(
            "mounted", reason="a mount of Starlette matches no path with a line break"
        )


@pytest.mark.parametrize("name", CASES.params())
def test_a_malformed_request_is_refused_and_leaves_nothing(
    api: Api, standing: str, names: Callable[[str], str], name: str
) -> None:
    """Contract §0.5, §0.6, settled rules [0.5-01, 0.6-03, 0.6-12, 0.3-08, 1-03, 1.1-10, 2-17, S-05,
    S-06, S-20, S-21, S-22, S-24, S-35, S-45, S-84, 1.2-08, 1.4-08, 12-03]
    """
    absent = names("absent")
    before = _facts(api, standing)
    topics_before = api.http.get("/v0/ready").json()["topics"]
    sent(api, CASES[name], {"t": standing, "a": absent})
    assert _facts(api, standing) == before
    refused(api.state(absent), 404, "topic_not_found")
    assert api.http.get("/v0/ready").json()["topics"] == topics_before


def test_the_table_is_long_enough() -> None:
    """There are at least 150 malformed requests, each of another kind. [0.6-12]"""
    CASES.check(150)


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x00\x00\x00\x00\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /v0/topics HTTP/9.9\r\n\r\n",
        b"POST /v0/topics/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: abc\r\n\r\n",
        b"POST /v0/topics/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /v0/topics/x HTTP/1.1\r\nHost: localhost\r\n"
        b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /v0/topics HTTP/1.1\r\nHost: localhost\r\nBad Header: x\r\n\r\n",
        b"GET /v0/topics HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 50_000 + b"\r\n",
    ],
)
def test_bytes_that_are_no_http_get_no_500_and_harm_no_client(
    api: Api, request_bytes: bytes
) -> None:
    """§0.6: the parser refuses these bytes itself, and the server continues. [0.6-12]"""
    parts = urlsplit(api.url)
    assert parts.hostname is not None
    assert parts.port is not None
    received = b""
    with socket.create_connection((parts.hostname, parts.port), timeout=5) as sock:
        try:
            sock.sendall(request_bytes)
            sock.settimeout(1.0)
            received = sock.recv(1000)
        except (TimeoutError, ConnectionResetError, BrokenPipeError):
            pass
    assert not received.startswith(b"HTTP/1.1 5")
    refused(api.state("x-never-made"), 404, "topic_not_found")


def test_a_body_that_never_comes_whole_stores_nothing(api: Api, topic: str) -> None:
    """§2: the client disconnects in the middle of its request. [2-17]"""
    parts = urlsplit(api.url)
    assert parts.hostname is not None
    assert parts.port is not None
    head = (
        f"POST /v0/topics/{topic} HTTP/1.1\r\nHost: localhost\r\n{MEDIA}\r\n"
        "Content-Length: 500\r\n\r\n"
    )
    with socket.create_connection((parts.hostname, parts.port), timeout=5) as sock:
        sock.sendall(head.encode() + GOOD_APPEND)
    refused(api.state(topic), 404, "topic_not_found")
