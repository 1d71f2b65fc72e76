"""Compares answers with `docs/openapi.json`: status, media type, headers, body.

Every client of the contract tests calls `check` for every answer of our servers, so each of these
tests also tests the description. Answers must satisfy more than readers need: a member that no
schema names fails too.
"""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any, Final

import httpx
import jsonschema_rs

Json = dict[str, Any]
FILE: Final = Path(__file__).resolve().parents[2] / "docs" / "openapi.json"
_JSON: Final = "application/json"
# Status and code of answers that no operation describes: an unknown path, a method that a path
# lacks.
_ELSEWHERE: Final = {404: "not_found", 405: "method_not_allowed"}


@cache
def document() -> Json:
    """The parsed description."""
    found: Json = json.loads(FILE.read_bytes())
    return found


def template_of(path: str) -> str | None:
    """The template of a path without its query."""
    segments = path.split("/")
    for template in document()["paths"]:
        parts = template.split("/")
        if parts[-1] == "{path}" and segments[: len(parts) - 1] == parts[:-1]:
            # The path of a stream may have any number of segments.
            return str(template)
        if len(parts) == len(segments) and all(
            part == segment or (part[:1] == "{" and segment)
            for part, segment in zip(parts, segments, strict=True)
        ):
            found: str = template
            if found == path or "{" in found:
                return found
    return None


def check(response: httpx.Response) -> None:
    """Fail if an answer is not described."""
    request = response.request
    path = request.url.raw_path.decode("ascii").partition("?")[0]
    media = response.headers.get("content-type", "").partition(";")[0]
    is_stream = media == "text/event-stream"
    body = b"" if is_stream else response.read()
    where = f"{request.method} {path}: {response.status_code}"
    try:
        check_answer(request.method, path, response.status_code, response.headers, body)
    except jsonschema_rs.ValidationError as error:
        raise AssertionError(f"{where}: {error}\n{body[:2000]!r}") from None


def check_raw(method: str, target: str, status: int, headers: Any, body: bytes) -> None:
    """Fail if the answer to a request of any form is neither described nor 400."""
    if status == 101:
        return
    if headers.get("content-encoding") == "gzip":
        body = gzip.decompress(body)
    path = target.partition("?")[0]
    item = document()["paths"].get(template_of(path) or "", {})
    is_odd = method.lower() not in {*item, "head", "options"} or status in _ELSEWHERE
    if is_odd and status in (400, *_ELSEWHERE) and method != "HEAD":
        # The server refused the request before it read the path, or as a WebSocket on a path
        # without one.
        code = _ELSEWHERE.get(status, "invalid_request")
        if json.loads(body)["error"]["code"] == code:
            return
    check_answer(method, path, status, headers, body)


def check_answer(method: str, path: str, status: int, headers: Any, body: bytes) -> None:
    """Fail if the answer to this method of this path is not described."""
    where = f"{method} {path}: {status}"
    template = template_of(path)
    item: Json = {} if template is None else document()["paths"][template]
    if method == "OPTIONS" and template is not None:
        assert status == 204, where
        assert "allow" in headers, where
        return
    operation = item.get("get" if method == "HEAD" else method.lower())
    if operation is None:
        status_there = 404 if template is None else 405
        assert status == status_there, where
        assert template is None or "allow" in headers, where
        if method != "HEAD":
            assert json.loads(body)["error"]["code"] == _ELSEWHERE[status], where
        return
    described = operation["responses"].get(str(status))
    assert described is not None, f"{where} is not among {list(operation['responses'])}"
    for name, header in described.get("headers", {}).items():
        header = _resolved(header)
        assert name.lower() in headers or not header.get("required"), f"{where} without {name}"
    if method == "HEAD" or "content" not in described or "*/*" in described["content"]:
        assert not body or method != "HEAD", where
        return
    media = headers.get("content-type", "").partition(";")[0]
    assert media in described["content"], f"{where}: {media}"
    if media == _JSON:
        value = json.loads(body)
        if headers.get("preference-applied") == "return=minimal":
            # The answer lacks this member because the client asked for that: everything else is as
            # described.
            assert "performance" not in value, where
            value["performance"] = {"server_total_ms": 0.0}
        _validator(str(template), method, str(status)).validate(value)


def _resolved(schema: Json) -> Json:
    found: Json = schema
    while "$ref" in found:
        _, *steps = found["$ref"].split("/")
        found = document()
        for step in steps:
            found = found[step]
    return found


@cache
def _validator(template: str, method: str, status: str) -> Any:
    operation = document()["paths"][template]["get" if method == "HEAD" else method.lower()]
    schema = operation["responses"][status]["content"][_JSON]["schema"]
    schemas = {name: _closed(found) for name, found in document()["components"]["schemas"].items()}
    return jsonschema_rs.Draft202012Validator({**schema, "components": {"schemas": schemas}})


def _closed(schema: Any) -> Any:
    """The schema without additional members."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(part) for name, part in schema.items()}
    if "properties" in schema and "additionalProperties" not in schema:
        closed["additionalProperties"] = False
    return closed
