"""Builds one operation of the OpenAPI document. Pure.

Adds what holds for every request: 401 and 403 where keys are required, 429 and 500, the headers of
errors, the request id. Used by `api/openapi/document`.
"""

from __future__ import annotations

from typing import Final

from topics_server.api.openapi.examples import BODIES, IN_PATH, IN_QUERY
from topics_server.api.openapi.schemas import Schema, boolean, ref, text
from topics_server.http.error_responses import PRODUCER_HEADERS, RETRY_AFTER_S, STATUS_OF
from topics_server.values.errors import Code
from topics_server.values.limits import PAGE_SIZE_DEFAULT, PAGE_SIZE_MAX

JSON: Final = "application/json"
STREAM: Final = "text/event-stream"

ALWAYS: Final = (Code.INTERNAL, Code.NOT_READY, Code.SHUTTING_DOWN)
READS: Final = (Code.INVALID_REQUEST, *ALWAYS)
TAKES_BODY: Final = (Code.PAYLOAD_TOO_LARGE, Code.UNSUPPORTED_MEDIA_TYPE)
WRITES: Final = (*READS, Code.STORAGE_READ_ONLY)
# Errors of every request: those of its connection, before routing.
_CONNECTION: Final = (
    Code.INVALID_REQUEST,
    Code.REQUEST_TIMEOUT,
    Code.URI_TOO_LONG,
    Code.HEADERS_TOO_LARGE,
    Code.THROTTLED,
)
# Errors of every request that is not a probe: keys, scopes and caps are checked before its handler.
_GUARDED: Final = (Code.UNAUTHORIZED, Code.FORBIDDEN)

# Other ways to send a key than the header; for streams only (§7.1, §10.8).
_IN_URL: Final = {
    "token": "A key, only for development: URLs end up in logs and histories.",
    "ticket": "A ticket of `POST /v0/watch?ticket=true`: opens one stream once, within a minute. "
    "Or one of `POST …/live`: opens that stream, as often as needed, for an hour.",
}


def components() -> Schema:
    """Headers, parameters, the answer to a wrong method, and security schemes."""
    url_keys = {
        name: {"type": "apiKey", "in": "query", "name": name, "description": about}
        for name, about in _IN_URL.items()
    }
    return {
        "headers": {
            "Request-Id": {
                "description": "The request's id: the caller's if it is well-formed.",
                "required": True,
                "schema": text(),
            },
            "Retry-After": {
                "description": "Seconds to wait before a retry.",
                "required": True,
                "schema": {"type": "integer", "minimum": 1},
            },
            "WWW-Authenticate": {
                "description": "The authentication scheme that the server accepts.",
                "required": True,
                "schema": text(pattern="^Bearer"),
            },
            "Producer-Number": {
                "description": "For a refused producer: the current epoch, or the expected seq.",
                "schema": {"type": "integer", "minimum": 0},
            },
            "Stream-Closed": {
                "description": "For a closed stream: it accepts no more appends.",
                "schema": {"type": "string", "const": "true"},
            },
            "Stream-Next-Offset": {
                "description": "For a closed stream: its end.",
                "schema": text(),
            },
            "Allow": {
                "description": "The methods of this path.",
                "required": True,
                "schema": text(),
            },
        },
        "parameters": {
            "X-Request-Id": {
                "name": "X-Request-Id",
                "in": "header",
                "description": "An id chosen by the caller, for logs. A malformed one is replaced.",
                "schema": text(),
            }
        },
        "responses": {
            "MethodNotAllowed": {
                "description": "`method_not_allowed`: a path without the requested method.",
                "headers": {"Allow": _header("Allow"), "X-Request-Id": _header("Request-Id")},
                "content": {JSON: {"schema": ref("Error")}},
            },
            "NotFound": {
                "description": "`not_found`: a path that is not listed here.",
                "headers": {"X-Request-Id": _header("Request-Id")},
                "content": {JSON: {"schema": ref("Error")}},
            },
        },
        "securitySchemes": {
            "bearer": {
                "type": "http",
                "scheme": "bearer",
                "description": "A key of `TOPICS_API_KEYS`; its scopes are the role names. "
                "A server without keys needs none.",
            },
            **url_keys,
        },
    }


def _header(name: str) -> Schema:
    return {"$ref": f"#/components/headers/{name}"}


def query(name: str, schema: Schema, about: str) -> Schema:
    """A query parameter."""
    return {"name": name, "in": "query", "schema": schema, "description": about}


def page_queries() -> tuple[Schema, Schema]:
    """The two parameters of every list."""
    size: Schema = {"type": "integer", "minimum": 0, "default": PAGE_SIZE_DEFAULT}
    return (
        query("page_size", size, f"At most {PAGE_SIZE_MAX}; 0 is the default."),
        query("cursor", text(), "`next_cursor` of the previous page."),
    )


def switch(name: str, default: bool, about: str) -> Schema:
    """A query parameter that is true or false."""
    return query(name, boolean(default), about)


def in_path(name: str, pattern: str, about: str) -> Schema:
    """A path parameter."""
    schema = text(pattern=pattern)
    return {
        "name": name,
        "in": "path",
        "required": True,
        "schema": schema,
        "description": about,
        "example": IN_PATH[name],
    }


def answer(about: str, schema: Schema, media: str = JSON) -> Schema:
    """A response with a body."""
    return {"description": about, "content": {media: {"schema": schema}}}


def operation(
    operation_id: str,
    summary: str,
    answers: dict[str, Schema],
    *,
    tag: str,
    scopes: tuple[str, ...] | None = (),
    codes: tuple[Code, ...] = (),
    body: Schema | None = None,
    is_body_required: bool = True,
    parameters: tuple[Schema, ...] = (),
    in_url: tuple[str, ...] = (),
) -> Schema:
    """One operation; its errors are grouped by status, with their codes.

    `scopes`: the scopes that a key needs; None if only `TOPICS_PROBE_AUTH` requires a key.
    `in_url`: other ways to send the key.
    """
    # Every caller may get this error: a server without keys accepts only its own names (`Host`).
    guarded = (Code.UNAUTHORIZED, Code.FORBIDDEN) if scopes is None else _GUARDED
    described: Schema = {
        "operationId": operation_id,
        "summary": summary,
        "tags": [tag],
        "responses": _with_id(
            answers | _error_answers({Code.INTERNAL, *_CONNECTION, *codes, *guarded})
        ),
    }
    filled = IN_QUERY.get(operation_id, {})
    described["parameters"] = [
        *(
            parameter | {"example": filled[parameter["name"]]}
            if parameter.get("name") in filled
            else parameter
            for parameter in parameters
        ),
        {"$ref": "#/components/parameters/X-Request-Id"},
    ]
    if body is not None:
        described["requestBody"] = {
            "required": is_body_required,
            "content": {JSON: {"schema": body, "example": BODIES[operation_id]}},
        }
    if scopes is not None:
        asked = [{"bearer": list(scopes)}, *({name: []} for name in in_url)]
        described["security"] = [*asked, {}]
    else:
        described["security"] = [{}, {"bearer": []}]
    return described


def _error_answers(codes: set[Code]) -> Schema:
    by_status: dict[int, list[Code]] = {}
    for code in Code:
        if code in codes:
            by_status.setdefault(STATUS_OF[code], []).append(code)
    error_answers: Schema = {}
    for status, named in sorted(by_status.items()):
        response = answer(", ".join(f"`{code.value}`" for code in named), refusal_of(named))
        if any(code in RETRY_AFTER_S for code in named):
            response["headers"] = {"Retry-After": _header("Retry-After")}
        elif status == 401:
            response["headers"] = {"WWW-Authenticate": _header("WWW-Authenticate")}
        for name in (name for code in named for name, _ in PRODUCER_HEADERS.get(code, ())):
            shown = name.decode("ascii").title()
            response.setdefault("headers", {})[shown] = _header("Producer-Number")
        if Code.STREAM_CLOSED in named:
            for shown in ("Stream-Closed", "Stream-Next-Offset"):
                response.setdefault("headers", {})[shown] = _header(shown)
        error_answers[str(status)] = response
    return error_answers


def refusal_of(codes: list[Code]) -> Schema:
    """The envelope of an error with one of these codes."""
    named = {"properties": {"code": {"enum": [code.value for code in codes]}}}
    return {"allOf": [ref("Error"), {"type": "object", "properties": {"error": named}}]}


def _with_id(answers: Schema) -> Schema:
    response = {"X-Request-Id": _header("Request-Id")}
    return {
        status: found | {"headers": {**found.get("headers", {}), **response}}
        for status, found in answers.items()
    }
