"""`client.errors`: each answer that is no success becomes one type, with the server's message."""

from __future__ import annotations

import json

import pytest

from topics_server.client import errors
from topics_server.client.errors import passes, refusal

CASES = [
    (400, "invalid_request", errors.InvalidRequest, False),
    (401, "unauthorized", errors.Unauthorized, False),
    (403, "forbidden", errors.Unauthorized, False),
    (404, "topic_not_found", errors.NotFound, False),
    (409, "not_a_queue", errors.NotAQueue, False),
    (409, "topic_exists_incompatible", errors.Refused, False),
    (413, "payload_too_large", errors.InvalidRequest, False),
    (415, "unsupported_media_type", errors.InvalidRequest, False),
    (422, "topic_full", errors.QueueFull, False),
    (422, "other", errors.InvalidRequest, False),
    (429, "throttled", errors.Throttled, True),
    (500, "internal", errors.Unavailable, True),
    (503, "not_ready", errors.Unavailable, True),
]


@pytest.mark.parametrize(("status", "code", "kind", "is_passing"), CASES)
def test_kinds(status: int, code: str, kind: type[errors.Refused], is_passing: bool) -> None:
    answer = json.dumps({"error": {"code": code, "message": "m", "detail": {"field": "f"}}})
    error = refusal(status, None, answer.encode())
    assert type(error) is kind
    assert (error.status, error.code, error.detail) == (status, code, {"field": "f"})
    assert str(error) == f"{code}: m"
    assert passes(error) is is_passing


@pytest.mark.parametrize("answer", [b"", b"<html>", b'{"error":1}', b"\xff"])
def test_an_answer_that_is_not_ours_keeps_its_status(answer: bytes) -> None:
    error = refusal(502, None, answer)
    assert (type(error), error.code) == (errors.Unavailable, "http_502")


def test_how_long_to_wait_comes_from_the_detail_or_the_header() -> None:
    precise = b'{"error":{"code":"throttled","message":"m","detail":{"retry_after_ms":250}}}'
    plain = b'{"error":{"code":"throttled","message":"m"}}'
    assert refusal(429, "1", precise).retry_after_ms == 250
    assert refusal(429, "2", plain).retry_after_ms == 2000
    assert refusal(429, "Wed, 21 Oct 2026 07:28:00 GMT", plain).retry_after_ms is None
    assert refusal(429, None, plain).retry_after_ms is None
