"""§0.1-§0.9: paths, formats, `$` fields, errors, status codes, cursors, performance."""

from __future__ import annotations

import gzip
import json
import re
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.contract.conftest import NewServer
from tests.contract.driver import Api, good, refused

JSON = "Content-Type: application/json"


def test_unknown_fields_are_ignored_wherever_they_stand(api: Api, topic: str) -> None:
    """Contract §0.1 [0.1-02, S-20]"""
    put = good(api.put(topic, {"ttl_ms": 0, "from_the_future": {"a": [1]}}))
    assert "from_the_future" not in put["config"]
    record = {"data": 1, "colour": "red"}
    made = good(api.append(topic, [record], config={"new": 1}, later=True))
    assert made["last_seq"] == 1
    page = api.read(topic, from_seq=0, newer=[{}])
    assert set(page["records"][0]) == {"$seq", "$ts", "data"}
    assert good(api.delete(topic, before_seq=1, also=None))["deleted"] == 0


def test_only_the_path_routes_not_the_host(own: NewServer, topic: str) -> None:
    """Contract §0.1 [0.1-01, 0.1-03]"""
    # Without keys a server on loopback accepts only its own names, so that pages cannot call it by
    # another.
    api = own(TOPICS_ALLOWED_HOSTS="*").start()
    api.add(topic, 1)
    for host in ("eu-west-1.example", "anything.invalid:99"):
        answer = api.raw("GET", f"/v0/topics/{topic}", headers=[f"Host: {host}"])
        assert answer.status == 200
        assert answer.json()["head_seq"] == 1
    refused(api.raw("GET", f"/v1/topics/{topic}"), 404, "not_found")
    refused(api.raw("GET", f"/topics/{topic}"), 404, "not_found")


def test_a_name_with_a_tenant_part_is_one_plain_name(api: Api, names: Callable[[str], str]) -> None:
    """Contract §0.11 [0.11-01]"""
    name = names("tenant")
    api.add(f"{name}:a", 1)
    api.add(f"{name}:b", 1, 2)
    assert api.get_state(f"{name}:a")["head_seq"] == 1
    refused(api.state(name), 404, "topic_not_found")
    listed = good(api.topics(prefix=name))["topics"]
    assert [row["topic"] for row in listed] == [f"{name}:a", f"{name}:b"]


@pytest.mark.parametrize("escaped", ["%3A", "%3a"])
def test_an_escaped_colon_is_the_colon(api: Api, topic: str, escaped: str) -> None:
    """§1: a client that escapes reserved characters names the same topic. [1-01]"""
    api.add(f"{topic}:x", 1)
    assert api.raw("GET", f"/v0/topics/{topic}{escaped}x").json()["topic"] == f"{topic}:x"


@pytest.mark.parametrize(
    ("method", "suffix"), [("PUT", ""), ("POST", ""), ("POST", "/diff"), ("POST", "/delete")]
)
@pytest.mark.parametrize(
    "media",
    [
        "application/x-www-form-urlencoded",
        "text/plain",
        "application/jsonp",
        "application/json5",
        "multipart/form-data; boundary=x",
        "",
        None,
    ],
)
def test_a_body_without_the_json_media_type_is_415_and_says_what_to_add(
    api: Api, topic: str, method: str, suffix: str, media: str | None
) -> None:
    """§0.3, §0.6: the message names the header to send. [0.3-01, S-58, 2-24]"""
    good(api.put(topic))
    headers = [] if media is None else [f"Content-Type: {media}"]
    body = b'{"records":[{"data":1}],"from_seq":0,"before_seq":1}'
    answer = api.raw(method, f"/v0/topics/{topic}{suffix}", body, headers)
    refused(answer, 415, "unsupported_media_type")
    message = answer.json()["error"]["message"].lower()
    assert "content-type" in message
    assert "application/json" in message
    assert api.get_state(topic)["head_seq"] == 0


@pytest.mark.parametrize(
    "media",
    [
        "application/json",
        "Application/JSON",
        "application/json; charset=utf-8",
        "APPLICATION/JSON ;charset=UTF-8",
        'application/json;profile="a;b"',
    ],
)
def test_the_json_media_type_is_taken_in_any_case_with_any_parameters(
    api: Api, topic: str, media: str
) -> None:
    """Contract §0.3 [0.3-01, S-81]"""
    answer = api.raw(
        "POST", f"/v0/topics/{topic}", b'{"records":[{"data":1}]}', [f"Content-Type: {media}"]
    )
    assert answer.status == 201


def test_every_answer_of_the_data_plane_is_json(api: Api, topic: str) -> None:
    """Contract §0.3 [0.3-02, 0.5-02]"""
    answers = [
        api.put(topic),
        api.append(topic, [{"data": 1}]),
        api.diff(topic),
        api.delete(topic, before_seq=1),
        api.state(topic),
        api.topics(prefix=topic),
        api.drop(topic),
        api.state(topic),
    ]
    for answer in answers:
        assert answer.headers["content-type"].partition(";")[0] == "application/json"
        body = answer.json()
        assert isinstance(body, dict)
        assert ("error" in body) == (answer.status_code >= 400)
        assert "status" not in body


def test_data_of_every_json_type_comes_back_as_it_was(api: Api, topic: str) -> None:
    """Contract §0.3 [0.3-03, 0.4-07, 0.4-09]"""
    datas: list[Any] = [{"a": [1, None]}, [], {}, [[]], "text", "", 0, -1.5, True, False, None]
    api.add(topic, *datas)
    assert [record["data"] for record in api.read_all(topic)] == datas


def test_a_gzip_request_is_read(api: Api, topic: str) -> None:
    """Contract §0.3 [0.3-04]"""
    body = gzip.compress(json.dumps({"records": [{"data": "z" * 5000}]}).encode())
    headers = [JSON, "Content-Encoding: gzip"]
    assert api.raw("POST", f"/v0/topics/{topic}", body, headers).status == 201
    assert api.read_all(topic)[0]["data"] == "z" * 5000
    headers = [JSON, "Content-Encoding: GZIP"]
    assert api.raw("POST", f"/v0/topics/{topic}", body, headers).status == 200
    put = gzip.compress(b'{"ttl_ms":1000000}')
    assert api.raw("PUT", f"/v0/topics/{topic}", put, headers).status == 200
    assert api.get_state(topic)["config"]["ttl_ms"] == 1000000


def test_an_identity_encoding_is_no_encoding(api: Api, topic: str) -> None:
    """Contract §0.3 [0.3-08]"""
    headers = [JSON, "Content-Encoding: identity"]
    body = b'{"records":[{"data":1}]}'
    assert api.raw("POST", f"/v0/topics/{topic}", body, headers).status == 201


def test_a_response_is_gzipped_only_on_request(api: Api, topic: str) -> None:
    """Contract §0.3 [0.3-05]"""
    api.add(topic, *["compressible " * 100] * 20)
    target = f"/v0/topics/{topic}/diff"
    plain = api.raw("POST", target, b"{}", [JSON])
    assert "content-encoding" not in plain.headers
    packed = api.raw("POST", target, b"{}", [JSON, "Accept-Encoding: gzip"])
    assert packed.headers["content-encoding"] == "gzip"
    assert len(packed.body) < len(plain.body) // 4
    unpacked = json.loads(gzip.decompress(packed.body))
    assert unpacked["records"] == plain.json()["records"]
    refusing = api.raw("POST", target, b"{}", [JSON, "Accept-Encoding: gzip;q=0"])
    assert "content-encoding" not in refusing.headers


def test_times_are_integer_milliseconds(api: Api, topic: str) -> None:
    """Contract §0.3, §0.4 [0.3-06, 0.4-04]"""
    before = time.time() * 1000
    api.add(topic, 1)
    stamp = api.read(topic)["records"][0]["$ts"]
    state = api.get_state(topic)
    for value in (stamp, state["last_write_ts"], state["last_read_ts"]):
        assert type(value) is int
        assert before - 60_000 <= value <= time.time() * 1000 + 60_000


def test_seqs_are_plain_json_integers(api: Api, topic: str) -> None:
    """Contract §0.3, §0.4 [0.3-07, 0.4-03]"""
    made = api.append(topic, [{"data": 1}, {"data": 2}])
    assert re.search(rb'"seqs": ?\[1, ?2\]', made.content)
    assert re.findall(rb'"\$seq": ?(\d+)[,}]', api.diff(topic).content) == [b"1", b"2"]


def test_server_fields_carry_a_dollar_and_user_fields_do_not(api: Api, topic: str) -> None:
    """Contract §0.4 [0.4-01, 0.4-02, 0.4-07, 0.4-10]"""
    data = {"$seq": "mine", "$type": "mine"}
    meta = {"$ts": "mine"}
    api.append(topic, [{"data": data, "meta": meta, "node": "n", "tag": "t"}])
    record = api.read(topic, include_tags=True)["records"][0]
    assert record["data"] == data
    assert record["meta"] == meta
    assert record["$node"] == "n"
    assert record["$tag"] == "t"
    assert set(record) == {"$seq", "$ts", "$node", "$tag", "data", "meta"}


def test_absent_fields_of_a_record_are_absent_not_null(api: Api, topic: str) -> None:
    """Contract §0.4 [0.4-05, 0.4-06, 0.4-08, 0.4-09]"""
    api.append(topic, [{"data": None}])
    assert set(api.read(topic, include_tags=True)["records"][0]) == {"$seq", "$ts", "data"}


def test_errors_have_the_envelope_and_a_stable_code(api: Api, topic: str) -> None:
    """Contract §0.5 [0.5-01, 0.5-04, 0.6-03, 0.6-04]"""
    assert refused(api.state(topic), 404, "topic_not_found")["topic"] == topic
    refused(api.diff(topic), 404, "topic_not_found")
    refused(api.append(topic, []), 400, "invalid_request")
    refused(api.raw("POST", f"/v0/topics/{topic}", b"{", [JSON]), 400, "invalid_request")


def test_losing_data_is_a_200_with_a_tombstone(api: Api, topic: str) -> None:
    """Contract §0.5 [0.5-03]"""
    api.put(topic, {"cap_records": 2})
    for number in range(10):
        api.add(topic, number)
    answer = api.diff(topic)
    assert answer.status_code == 200
    assert answer.json()["tombstone"]["reason"] == "cap"


def test_200_and_201_tell_created_from_existing(api: Api, topic: str) -> None:
    """Contract §0.6 [0.6-01, 0.6-02, 2-20]"""
    assert api.put(topic).status_code == 201
    assert api.put(topic).status_code == 200
    assert api.append(topic, [{"data": 1}]).status_code == 200
    assert api.drop(topic).status_code == 200
    lazily = api.append(topic, [{"data": 1}])
    assert lazily.status_code == 201
    assert lazily.json()["created"] is True
    assert api.append(topic, [{"data": 1}]).json()["created"] is False


METHODS = {
    "/v0/topics/{t}": {"GET", "PUT", "PATCH", "POST", "DELETE"},
    "/v0/topics/{t}/diff": {"POST"},
    "/v0/topics/{t}/delete": {"POST"},
    "/v0/topics": {"GET"},
    "/v0/health": {"GET"},
    "/v0/ready": {"GET"},
    "/v0/metrics": {"GET"},
    "/healthz": {"GET"},
    "/readyz": {"GET"},
}


# The HTTP parser of a server refuses an unknown method with its own message.
OURS = pytest.mark.connection(reason="other parsers refuse unknown methods in their own words")
UNKNOWN = pytest.param("BREW", marks=OURS)


@pytest.mark.parametrize("path", METHODS)
@pytest.mark.parametrize("method", ["GET", "PUT", "POST", "DELETE", "PATCH", "TRACE", UNKNOWN])
def test_a_wrong_method_is_405_with_the_methods_that_work(
    api: Api, topic: str, path: str, method: str
) -> None:
    """Contract §0.6, §9 [0.6-05, S-23, 9-01, 9-05]"""
    good(api.put(topic))
    answer = api.raw(method, path.format(t=topic), b"{}" if method[0] == "P" else b"", [JSON])
    if method in METHODS[path]:
        assert answer.status != 405
        return
    if method == "BREW" and answer.status == 400:
        return  # a parser that does not support the method may end the connection
    refused(answer, 405, "method_not_allowed")
    allowed = {word.strip() for word in answer.headers["allow"].split(",")}
    assert METHODS[path] <= allowed
    assert allowed <= METHODS[path] | {"HEAD", "OPTIONS"}


@pytest.mark.parametrize("path", ["/v0/topics/{t}", "/v0/topics", "/v0/health", "/v0/ready"])
def test_head_answers_like_get_without_a_body(api: Api, topic: str, path: str) -> None:
    """§0.6: HEAD is sane. [0.6-01]"""
    good(api.put(topic))
    answer = api.raw("HEAD", path.format(t=topic))
    assert answer.status == 200
    assert answer.body == b""
    assert answer.headers["content-type"].partition(";")[0] == "application/json"
    missing = api.raw("HEAD", "/v0/topics/absent-for-head")
    assert missing.status == 404
    assert missing.body == b""


@pytest.mark.parametrize("path", ["/v0/topics/{t}", "/v0/topics", "/v0/topics/{t}/diff"])
def test_options_names_the_methods(api: Api, topic: str, path: str) -> None:
    """§0.6: OPTIONS is sane. [S-23]"""
    answer = api.raw("OPTIONS", path.format(t=topic))
    assert answer.status in (200, 204, 405)
    allowed = {word.strip() for word in answer.headers["allow"].split(",")}
    assert METHODS[path] <= allowed


@pytest.mark.parametrize(
    "target",
    ["/v0", "/v0/nothing", "/v0/topics/t/unknown", "/v0/topics/a/b/c", "/favicon.ico"],
)
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE"])
def test_an_unknown_path_is_404_not_found(api: Api, method: str, target: str) -> None:
    """Contract §0.6 [S-22, 0.1-01]"""
    body = b"{}" if method in ("POST", "PUT") else b""
    refused(api.raw(method, target, body, [JSON]), 404, "not_found")


def test_conflicts_are_409(api: Api, topic: str) -> None:
    """Contract §0.6 [0.6-07]"""
    api.add(topic, 1)
    refused(api.put(topic, {"type": "queue"}), 409, "topic_exists_incompatible")
    refused(api.drop(topic, if_empty=True), 409, "topic_not_empty")


def test_disable_backpressure_is_a_boolean(api: Api, topic: str) -> None:
    """Contract §0.6, §2 [0.6-16]"""
    good(api.append(topic, [{"data": 1}], disable_backpressure=True))
    good(api.append(topic, [{"data": 1}], disable_backpressure=False))
    wrong: tuple[object, ...] = (1, "true", [], {})
    for value in wrong:
        detail = refused(
            api.append(topic, [{"data": 1}], disable_backpressure=value), 400, "invalid_request"
        )
        assert detail["field"] == "disable_backpressure"
    assert api.get_state(topic)["head_seq"] == 2


def test_diff_always_returns_its_cursor(api: Api, topic: str) -> None:
    """Contract §0.7 [0.7-01, 0.7-02]"""
    api.put(topic)
    empty = api.read(topic)
    assert empty["records"] == []
    assert empty["next_from_seq"] == empty["head_seq"] == 0
    assert empty["caught_up"] is True
    api.add(topic, 1, 2)
    page = api.read(topic, from_seq=0)
    assert page["next_from_seq"] == page["head_seq"] == 2
    assert page["caught_up"] is True
    assert api.read(topic, from_seq=2)["next_from_seq"] == 2


def test_every_answer_measures_itself(api: Api, topic: str) -> None:
    """Contract §0.9 [0.9-01]"""
    answers: list[httpx.Response] = [
        api.put(topic),
        api.append(topic, [{"data": 1}]),
        api.diff(topic),
        api.delete(topic, before_seq=1),
        api.state(topic),
        api.topics(prefix=topic),
        api.drop(topic),
    ]
    for answer in answers:
        took = good(answer)["performance"]["server_total_ms"]
        assert isinstance(took, int | float)
        assert 0 < took < 60_000


def test_a_waiting_diff_reports_the_time_it_took(api: Api, topic: str) -> None:
    """§0.9: measured, not constant. [0.9-01]"""
    api.put(topic)
    assert api.read(topic, wait_ms=300)["performance"]["server_total_ms"] >= 250


@pytest.mark.parametrize("durability", ["ephemeral", "memory", "disk", "fsync"])
def test_only_class_fsync_reports_sync_time(api: Api, topic: str, durability: str) -> None:
    """Contract §0.9 [0.9-02, 0.9-03, 0.9-04]"""
    api.put(topic, {"durability": durability})
    performance = good(api.append(topic, [{"data": 1}]))["performance"]
    assert isinstance(performance["wal_append_ms"], int | float)
    assert performance["wal_append_ms"] >= 0
    if durability == "fsync":
        assert performance["fsync_ms"] > 0
    else:
        assert performance["fsync_ms"] == 0


def test_a_diff_counts_what_it_examined(api: Api, topic: str) -> None:
    """Contract §0.9 [0.9-05]"""
    api.append(topic, [{"data": n, "node": "me" if n % 2 else "you"} for n in range(10)])
    page = api.read(topic, node="me")
    assert len(page["records"]) == 5
    assert page["performance"]["records_scanned"] == 10


def test_a_body_over_the_limit_is_413_before_it_is_parsed(own: NewServer, topic: str) -> None:
    """Contract §0.6, §2 [0.6-08, 2-21]"""
    api = own(TOPICS_MAX_BODY_BYTES="1000").start()
    whole = b'{"records":[{"data":"%s"}]}'
    fits = whole % (b"a" * (1000 - len(whole) + 2))
    assert len(fits) == 1000
    assert api.raw("POST", f"/v0/topics/{topic}", fits, [JSON]).status == 201
    for body in (fits + b" ", b"not json at all " * 100, fits * 50):
        answer = api.raw("POST", f"/v0/topics/{topic}", body, [JSON])
        refused(answer, 413, "payload_too_large")
    chunked = b"".join(b"100\r\n" + b"x" * 256 + b"\r\n" for _ in range(8)) + b"0\r\n\r\n"
    answer = api.raw(
        "POST",
        f"/v0/topics/{topic}",
        chunked,
        [JSON, "Transfer-Encoding: chunked"],
    )
    refused(answer, 413, "payload_too_large")
    assert api.get_state(topic)["head_seq"] == 1


def test_an_inflated_body_is_bounded(own: NewServer, topic: str) -> None:
    """§0.3, §0.6: a small gzip body may not grow past the body limit. [0.6-08, 0.3-04]"""
    api = own(TOPICS_MAX_BODY_BYTES="100000").start()
    record = b'{"records":[{"data":"%s"}]}'
    headers = [JSON, "Content-Encoding: gzip"]
    bomb = gzip.compress(record % (b"a" * 50_000_000))
    assert len(bomb) < 100_000
    refused(api.raw("POST", f"/v0/topics/{topic}", bomb, headers), 413, "payload_too_large")
    refused(api.state(topic), 404, "topic_not_found")
    small = gzip.compress(record % (b"a" * 90_000))
    assert api.raw("POST", f"/v0/topics/{topic}", small, headers).status == 201


def test_the_default_body_limit_is_64_mib(api: Api, topic: str) -> None:
    """§2: the declared length decides, before the body is sent. [2-21, 2-22]"""
    headers = [JSON, f"Content-Length: {64 * 1024 * 1024 + 1}"]
    answer = api.raw("POST", f"/v0/topics/{topic}", b"", headers)
    refused(answer, 413, "payload_too_large")
