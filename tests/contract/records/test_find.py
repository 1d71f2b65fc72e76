"""Plain reads: `GET …/records` with ranges, filters and orders, one record, validation by ETag."""

from __future__ import annotations

import json
import time

import httpx
import pytest

from tests.contract.conftest import NewServer
from tests.contract.driver import Api, Json, eventually, good, refused, seqs_of

TAGS = ("k0", "k1", "k2", None)


@pytest.fixture
def filled(api: Api, topic: str) -> str:
    """Twelve records: tags k0, k1, k2 and none in turn; nodes n0 and n1 in turn."""
    for number in range(12):
        tag = TAGS[number % 4]
        record: Json = {"data": number + 1, "node": f"n{number % 2}"}
        good(api.append(topic, [record if tag is None else record | {"tag": tag}]))
    return topic


def find(api: Api, topic: str, **query: object) -> Json:
    """A plain read's answer."""
    answer = api.http.get(
        f"/v0/topics/{topic}/records", params={k: str(v) for k, v in query.items()}
    )
    return good(answer)


def test_a_plain_read_gives_what_a_diff_gives(api: Api, filled: str) -> None:
    page = find(api, filled, limit=5)
    same = api.read(filled, limit=5, include_tags=True)
    assert page["records"] == same["records"]
    for fact in ("next_from_seq", "head_seq", "earliest_seq", "caught_up", "tombstone", "epoch"):
        assert page[fact] == same[fact], fact
    assert page["complete"] is False
    rest = find(api, filled, from_seq=page["next_from_seq"])
    assert (seqs_of(rest), rest["complete"]) == (list(range(6, 13)), True)


@pytest.mark.parametrize("is_sealed", [False, True])
def test_filters(api: Api, filled: str, is_sealed: bool) -> None:
    if is_sealed:
        good(api.http.post("/v0/admin/seal", json={"topics": [filled]}))

    def by(value: object) -> list[int]:
        return seqs_of(find(api, filled, filter=json.dumps(value)))

    assert seqs_of(find(api, filled, tag="k1")) == [2, 6, 10]
    assert seqs_of(find(api, filled, tag_prefix="k")) == [1, 2, 3, 5, 6, 7, 9, 10, 11]
    assert seqs_of(find(api, filled, node="n1")) == [2, 4, 6, 8, 10, 12]
    assert seqs_of(find(api, filled, tag="k1", node="n0")) == []
    assert by("k2") == [3, 7, 11]
    assert by(["tag", "In", ["k0", "k2"]]) == [1, 3, 5, 7, 9, 11]
    assert by(["Not", ["tag", "Glob", "k*"]]) == [4, 8, 12]
    assert by(["Or", "k0", ["And", "k1", ["node", "Eq", "n1"]]]) == [1, 2, 5, 6, 9, 10]
    assert seqs_of(api.read(filled, filter=["node", "In", ["n0", "x"]])) == [1, 3, 5, 7, 9, 11]


def test_a_page_of_a_filter_moves_past_what_does_not_match(api: Api, filled: str) -> None:
    page = api.read(filled, filter="k0", limit=2)
    assert (seqs_of(page), page["next_from_seq"], page["caught_up"]) == ([1, 5], 5, False)
    page = api.read(filled, filter="k0", from_seq=9)
    assert (seqs_of(page), page["next_from_seq"], page["caught_up"]) == ([], 12, True)


def test_the_last_records(api: Api, filled: str) -> None:
    assert seqs_of(find(api, filled, last=3)) == [10, 11, 12]
    assert seqs_of(find(api, filled, last=2, tag="k1")) == [6, 10]
    assert seqs_of(find(api, filled, last=99)) == list(range(1, 13))
    assert seqs_of(api.read(filled, last=2, filter=["Not", "k2"])) == [10, 12]
    assert find(api, filled, last=3)["caught_up"] is True


def test_newest_first(api: Api, filled: str) -> None:
    page = find(api, filled, order="desc", limit=4)
    assert (seqs_of(page), page["next_before_seq"]) == ([12, 11, 10, 9], 9)
    assert page["complete"] is False
    page = find(api, filled, order="desc", before_seq=9, from_seq=5)
    assert (seqs_of(page), page["complete"]) == ([8, 7, 6], True)
    assert seqs_of(find(api, filled, order="desc", tag="k2", limit=2)) == [11, 7]


def test_times(api: Api, topic: str) -> None:
    api.add(topic, 1, 2)
    time.sleep(0.02)
    (first,) = find(api, topic, last=1)["records"]
    api.add(topic, 3)
    (newest,) = find(api, topic, last=1)["records"]
    border = newest["$ts"]
    assert border > first["$ts"]
    assert seqs_of(find(api, topic, since=border)) == [3]
    assert seqs_of(find(api, topic, until=border)) == [1, 2]
    assert seqs_of(find(api, topic, since="1h", until=border)) == [1, 2]
    seconds, ms = divmod(border, 1000)
    day = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    assert seqs_of(find(api, topic, since=f"{day}.{ms:03d}Z")) == [3]
    assert seqs_of(api.read(topic, since=border)) == [3]
    assert seqs_of(api.read(topic, since="1h")) == [1, 2, 3]
    assert seqs_of(find(api, topic, since="0ms")) == []


def test_what_a_cap_evicted_is_told_in_both_orders(api: Api, topic: str) -> None:
    api.put(topic, {"cap_records": 3})
    api.add(topic, *range(10))
    page = find(api, topic)
    assert (page["tombstone"]["gap_from"], page["tombstone"]["gap_to"]) == (1, 7)
    page = find(api, topic, order="desc", limit=3)
    assert (seqs_of(page), page["tombstone"], page["complete"]) == ([10, 9, 8], None, False)
    page = find(api, topic, order="desc", before_seq=page["next_before_seq"])
    assert (page["records"], page["complete"]) == ([], True)
    assert (page["tombstone"]["gap_from"], page["tombstone"]["gap_to"]) == (1, 7)


def test_one_record(api: Api, filled: str) -> None:
    at = f"/v0/topics/{filled}/records"
    one = good(api.http.get(f"{at}/7"))
    assert one["record"] == find(api, filled, from_seq=6, limit=1)["records"][0]
    api.delete(filled, match="k2")
    for seq, reason in ((7, "deleted"), (13, "not_written"), (2**64 - 1, "not_written")):
        error = refused(api.http.get(f"{at}/{seq}"), 404, "record_not_found")
        assert error == {"topic": filled, "seq": seq, "reason": reason}
    api.put(filled, {"cap_records": 1})
    api.add(filled, "newest")
    error = refused(api.http.get(f"{at}/2"), 404, "record_not_found")
    assert error["reason"] == "cap"
    refused(api.http.get("/v0/topics/nobody/records/1"), 404, "topic_not_found")


def test_a_closed_range_is_validated_by_its_etag(api: Api, filled: str) -> None:
    at = f"/v0/topics/{filled}/records"
    descending = "order=desc&before_seq=9&limit=4"
    for query in ("limit=4", descending, "until=1", "order=desc&until=1", "tag=k1&limit=2"):
        first = api.http.get(f"{at}?{query}")
        assert first.headers["cache-control"] == "private, no-cache"
        known = {"if-none-match": first.headers["etag"]}
        again = api.http.get(f"{at}?{query}", headers=known)
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == first.headers["etag"]
    # A new record changes no closed range; a delete changes the ranges that had the record.
    first = api.http.get(f"{at}?limit=4")
    known = {"if-none-match": first.headers["etag"]}
    api.add(filled, "more")
    assert api.http.get(f"{at}?limit=4", headers=known).status_code == 304
    api.delete(filled, match="k1")
    after = api.http.get(f"{at}?limit=4", headers=known)
    assert (after.status_code, seqs_of(after.json())) == (200, [1, 3, 4, 5])
    lines = {"accept": "application/x-ndjson"}
    assert api.http.get(f"{at}?limit=4", headers=lines).headers["etag"] != after.headers["etag"]


@pytest.mark.parametrize(
    ("query", "margin_ms"), [("since={}ms", 300), ("order=desc&until={}ms", -100)]
)
def test_a_page_whose_times_move_gets_another_etag(
    api: Api, topic: str, query: str, margin_ms: int
) -> None:
    """A duration gives another time at each request: records that leave the range leave the
    page.
    """
    good(api.append(topic, [{"data": 1}]))
    first_ts = api.read(topic)["records"][0]["$ts"]
    eventually(lambda: time.time() * 1000 > first_ts + 200, "the second record is younger")
    good(api.append(topic, [{"data": 2}, {"data": 3}]))
    # The range is closed: a later record follows it.
    good(api.append(topic, [{"data": 4}]))
    back_ms = int(time.time() * 1000 - first_ts) + margin_ms
    at = f"/v0/topics/{topic}/records?{query.format(back_ms)}&before_seq=4"
    states: dict[str | None, list[int]] = {}

    def has_moved() -> bool:
        answer = api.http.get(at)
        seqs = seqs_of(good(answer))
        etag = answer.headers.get("etag")
        assert etag is None or states.setdefault(etag, seqs) == seqs
        return (1 not in seqs) if margin_ms > 0 else (3 in seqs)

    eventually(has_moved, "the duration has passed")


def test_pages_of_lines_and_of_json_vary_by_accept(api: Api, filled: str) -> None:
    at = f"/v0/topics/{filled}/records"
    for query in ("limit=2", "", "order=desc", "order=desc&before_seq=3"):
        for accept in ("application/json", "application/x-ndjson"):
            answer = api.http.get(f"{at}?{query}", headers={"accept": accept})
            assert "accept" in answer.headers["vary"].replace(" ", "").lower().split(",")


@pytest.mark.parametrize("path", ["records?limit=2", "records?limit=1&order=desc&before_seq=3"])
def test_a_store_begun_anew_does_not_validate_pages_of_another(own: NewServer, path: str) -> None:
    """The first topic of the new store has the same id, epoch and seqs; only the store
    distinguishes its records.
    """
    answers: list[httpx.Response] = []
    for data in (1, 2):
        server = own()
        http = server.start().http
        good(http.post("/v0/topics/t", json={"records": [{"data": data}] * 3}))
        known = {"if-none-match": ", ".join(each.headers["etag"] for each in answers)}
        for target in (path, "records/2"):
            answer = http.get(f"/v0/topics/t/{target}", headers=known if answers else {})
            assert answer.status_code == 200, target
            answers.append(answer)
        server.stop()
    assert len({each.headers["etag"] for each in answers}) == 4


@pytest.mark.parametrize(
    ("accept", "is_lines"),
    [
        ("application/x-ndjson", True),
        ("application/json, application/x-ndjson", True),
        ("*/*;q=0.1, application/jsonl;q=0.2", True),
        ("application/json, application/x-ndjson;q=0.9", False),
        ("application/json, application/x-ndjson;q=0", False),
        ("application/x-ndjson;q=0", False),
        ("application/x-ndjson-seq", False),
        ("text/html, */*", False),
    ],
)
def test_lines_are_for_clients_that_like_them(
    api: Api, filled: str, accept: str, is_lines: bool
) -> None:
    answer = api.http.get(f"/v0/topics/{filled}/records?limit=1", headers={"accept": accept})
    kind = "application/x-ndjson" if is_lines else "application/json"
    assert answer.headers["content-type"] == kind


def test_an_open_range_is_never_stored(api: Api, filled: str) -> None:
    for query in ("", "last=2", "until=99999999999999", "order=desc"):
        answer = api.http.get(f"/v0/topics/{filled}/records?{query}")
        assert answer.headers["cache-control"] == "no-store"
        assert "etag" not in answer.headers


def test_lines_of_json(api: Api, filled: str) -> None:
    answer = api.http.get(
        f"/v0/topics/{filled}/records?tag=k0", headers={"accept": "application/x-ndjson"}
    )
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert lines == find(api, filled, tag="k0")["records"]
    told = json.loads(answer.headers["topics-page"])
    assert (told["next_from_seq"], told["complete"]) == (12, True)
    assert answer.headers["topics-tombstone"] == "null"
    nothing = api.http.get(
        f"/v0/topics/{filled}/records?tag=none", headers={"accept": "application/x-ndjson"}
    )
    assert (nothing.status_code, nothing.content) == (200, b"")


def test_a_head_request_has_the_same_head(api: Api, filled: str) -> None:
    at = f"/v0/topics/{filled}/records?limit=2"
    asked, head = api.http.get(at), api.http.head(at)
    assert head.content == b""
    for name in ("etag", "cache-control", "content-type"):
        assert head.headers[name] == asked.headers[name]


def test_a_read_waits_for_a_record_that_matches(api: Api, filled: str) -> None:
    began = time.monotonic()
    page = find(api, filled, from_seq=12, tag="rare", wait_ms=300)
    assert (page["records"], time.monotonic() - began >= 0.3) == ([], True)
