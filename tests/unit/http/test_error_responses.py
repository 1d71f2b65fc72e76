"""The table from codes to HTTP, and the envelope."""

from __future__ import annotations

import json

import pytest

from topics_server.http.error_responses import (
    envelope,
    from_storage,
    headers_of,
    method_not_allowed,
    no_json,
    not_found,
    status_of,
    too_large,
)
from topics_server.values.errors import Code, Corrupt, DiskFull, ReadOnly, TopicsError


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("invalid_request", 400),
        ("batch_too_large", 400),
        ("record_too_large", 400),
        ("unauthorized", 401),
        ("forbidden", 403),
        ("not_found", 404),
        ("topic_not_found", 404),
        ("method_not_allowed", 405),
        ("not_acceptable", 406),
        ("topic_exists_incompatible", 409),
        ("topic_not_empty", 409),
        ("payload_too_large", 413),
        ("unsupported_media_type", 415),
        ("topic_full", 422),
        ("throttled", 429),
        ("stream_not_found", 404),
        ("stream_gone", 410),
        ("stream_conflict", 409),
        ("stream_closed", 409),
        ("internal", 500),
        ("not_ready", 503),
        ("shutting_down", 503),
        ("storage_read_only", 503),
        ("request_timeout", 408),
        ("uri_too_long", 414),
        ("headers_too_large", 431),
    ],
)
def test_every_code_has_the_status_of_the_contract(code: str, status: int) -> None:
    assert status_of(TopicsError(Code(code), "")) == status


def test_the_envelope_has_code_message_and_detail() -> None:
    error = TopicsError(Code.TOPIC_NOT_FOUND, 'topic "jobs" does not exist', {"topic": "jobs"})
    assert json.loads(envelope(error)) == {
        "error": {
            "code": "topic_not_found",
            "message": 'topic "jobs" does not exist',
            "detail": {"topic": "jobs"},
        }
    }


def test_detail_is_absent_when_there_is_none() -> None:
    told = json.loads(envelope(TopicsError(Code.INTERNAL, "x")))
    assert set(told["error"]) == {"code", "message"}


def test_only_429_and_503_say_when_to_try_again() -> None:
    for code in Code:
        error = TopicsError(code, "", dict.fromkeys(("epoch", "expected_seq", "received_seq"), 1))
        assert (b"retry-after" in dict(headers_of(error))) == (status_of(error) in (429, 503))


def test_a_closed_stream_tells_where_it_ends_in_headers_too() -> None:
    error = TopicsError(Code.STREAM_CLOSED, "", {"next_offset": "2_7"})
    assert headers_of(error) == ((b"stream-closed", b"true"), (b"stream-next-offset", b"2_7"))
    assert headers_of(TopicsError(Code.STREAM_CLOSED, "")) == ((b"stream-closed", b"true"),)


@pytest.mark.parametrize(("ms", "seconds"), [(1, b"1"), (1000, b"1"), (1001, b"2"), (0, b"1")])
def test_retry_after_rounds_a_measured_wait_up(ms: int, seconds: bytes) -> None:
    error = TopicsError(Code.THROTTLED, "", {"retry_after_ms": ms})
    assert headers_of(error) == ((b"retry-after", seconds),)


def test_a_refusing_disk_is_told_without_its_file_names() -> None:
    told = from_storage(DiskFull("no space", "/secret/path"))
    assert (told.code, told.detail) == (Code.THROTTLED, {"limit": "disk"})
    assert from_storage(ReadOnly("sync", "/secret/path")).code is Code.STORAGE_READ_ONLY
    assert from_storage(Corrupt("bad", "/secret/path")).code is Code.INTERNAL
    for error in (DiskFull("x", "/secret"), ReadOnly("x", "/secret"), Corrupt("x", "/secret")):
        assert "secret" not in from_storage(error).message


def test_refusals_name_what_would_work() -> None:
    assert "content-type: application/json" in no_json().message
    assert too_large(100).detail == {"limit": "max_body_bytes", "max": 100}
    assert "GET, PUT" in method_not_allowed("BREW", "GET, PUT").message
    assert not_found("/v0/" + "x" * 1000).detail["path"] == "/v0/" + "x" * 252
