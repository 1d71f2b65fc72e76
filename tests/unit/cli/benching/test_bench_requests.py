"""The bytes that `topics bench` sends, and how it reads the answers."""

from __future__ import annotations

import json

import msgspec
import pytest

from topics_server.cli.benching.requests import (
    DATA_BYTES,
    ClaimScript,
    RepeatedScript,
    append_body,
    target_of,
)


@pytest.mark.parametrize(
    ("url", "host", "line"),
    [
        ("http://127.0.0.1:4000", "127.0.0.1:4000", "GET /v0/x HTTP/1.1"),
        ("https://host/a/b/", "host", "GET /a/b/v0/x HTTP/1.1"),
        ("http://[::1]:4000", "[::1]:4000", "GET /v0/x HTTP/1.1"),
        ("http://büro.example:80", "xn--bro-hoa.example:80", "GET /v0/x HTTP/1.1"),
    ],
)
def test_a_request_names_its_host_and_keeps_the_path_of_the_url(
    url: str, host: str, line: str
) -> None:
    lines = target_of(url, {}).request("GET", "/v0/x").decode().split("\r\n")
    assert lines[0] == line
    assert f"Host: {host}" in lines
    assert lines[-2:] == ["", ""]


def test_a_request_has_the_key_and_the_length_of_its_body() -> None:
    request = target_of("http://h", {"Authorization": "Bearer k"}).request("POST", "/p", b"12345")
    head, body = request.split(b"\r\n\r\n")
    assert body == b"12345"
    assert b"\r\nAuthorization: Bearer k\r\n" in head
    assert b"\r\nContent-Length: 5" in head


@pytest.mark.parametrize("records", [1, 64, 100])
def test_records_have_the_same_size_and_differ(records: int) -> None:
    found = json.loads(append_body(bytes(range(64)), records))["records"]
    assert len(found) == records
    sizes = {len(json.dumps(record["data"], separators=(",", ":"))) for record in found}
    assert sizes == {DATA_BYTES}
    assert len({record["data"]["pad"] for record in found}) >= min(records, 64)


def test_bodies_of_other_padding_differ() -> None:
    assert append_body(bytes(64), 1) != append_body(bytes(range(64)), 1)


def test_repeated_requests_take_turns() -> None:
    script = RepeatedScript([b"a", b"b"], 7)
    assert [script.next() for _ in range(3)] == [b"a", b"b", b"a"]
    assert script.took(b"") == 7


def test_claims_end_with_the_first_that_finds_no_job_and_become_acks() -> None:
    target = target_of("http://h", {})
    claims = ClaimScript(target, "/v0/topics/q", 2)
    assert claims.next() is not None
    leases = [{"$seq": 4, "lease_id": "l4", "data": 1}, {"$seq": 5, "lease_id": "l5", "data": 2}]
    assert claims.took(json.dumps({"claimed": leases}).encode()) == 2
    assert claims.next() is not None
    assert claims.took(b'{"claimed":[]}') == 0
    assert claims.next() is None
    acks = claims.acks(target, "/v0/topics/q")
    request = acks.next()
    assert request is not None
    assert request.startswith(b"POST /v0/topics/q/ack ")
    body = json.loads(request.partition(b"\r\n\r\n")[2])
    assert (body["seqs"], body["lease_ids"]) == ([4, 5], ["l4", "l5"])
    assert acks.took(b'{"acked":2}') == 2
    assert acks.next() is None


def test_an_answer_of_another_server_is_an_error() -> None:
    claims = ClaimScript(target_of("http://h", {}), "/v0/topics/q", 2)
    with pytest.raises(msgspec.DecodeError, match="claimed"):
        claims.took(b"{}")
