"""`GET …/live` over a socket: its ids over restarts, keys, malformed requests."""

from __future__ import annotations

import json
from urllib.parse import quote

import pytest

from tests.contract.conftest import NewServer
from tests.contract.driver import Api, Json, good, refused
from tests.contract.malformed import Bad, Table, filled
from tests.contract.streams.streams import Event, SseStream, gauges, nothing_left

ACCEPT = "Accept: text/event-stream"
SECRET = "secret-reader"


def follow(api: Api, target: str, last_id: str | None = None, *headers: str) -> SseStream:
    """A live stream, which must have opened."""
    ids = () if last_id is None else (f"Last-Event-ID: {last_id}",)
    stream = SseStream(api.url, target, (ACCEPT, *ids, *headers))
    assert stream.status == 200, stream.head
    return stream


def records(stream: SseStream, count: int) -> tuple[list[Json], str | None]:
    """The next so many records, and the id after them."""
    found: list[Json] = []
    while True:
        event: Event = stream.event()
        if event.name == "record":
            found += json.loads(event.data)["records"]
        if len(found) >= count:
            assert len(found) == count, found
            return found, event.id


def seqs(found: list[Json]) -> list[int]:
    return [record["$seq"] for record in found]


def test_an_id_leads_over_restarts_and_kills(own: NewServer) -> None:
    server = own()
    api = server.start()
    target = "/v0/live?topics=jobs,soon&prefix=orders.&last=1"
    stream = follow(api, target)
    api.add("jobs", 1, 2, tag="a")
    api.add("orders.eu", 3)
    found, last_id = records(stream, 3)
    assert seqs(found) in ([1, 2, 1], [1, 1, 2])
    stream.close()
    api = server.restart()
    api.add("jobs", 4)
    api.add("orders.us", 5, 6)
    stream = follow(api, target, last_id)
    found, last_id = records(stream, 3)
    assert {record["data"] for record in found} == {4, 5, 6}
    api = server.crash()
    api.add("soon", 7)
    again = follow(api, target, last_id)
    found, _ = records(again, 1)
    assert found[0]["data"] == 7
    stream.close()
    again.close()


def test_a_filter_leaves_out_and_moves_on(api: Api, topic: str) -> None:
    for number in range(6):
        good(api.append(topic, [{"data": number, "tag": "ab"[number % 2]}]))
    wanted = quote(json.dumps(["Or", ["tag", "Eq", "b"], ["Not", ["tag", "Glob", "*"]]]))
    stream = follow(api, f"/v0/topics/{topic}/live?filter={wanted}")
    found, _ = records(stream, 3)
    assert [record["data"] for record in found] == [1, 3, 5]
    good(api.append(topic, [{"data": 6}, {"data": 7, "tag": "a"}]))
    found, _ = records(stream, 1)
    assert found[0]["data"] == 6
    assert "$tag" not in found[0]
    stream.close()


def test_a_ticket_opens_its_stream_again_and_again(own: NewServer) -> None:
    server = own(TOPICS_API_KEYS=f"root,{SECRET}:read:t.")
    server.start()
    key = {"authorization": f"Bearer {SECRET}"}
    root = {"authorization": "Bearer root"}

    def add(data: int) -> None:
        body = {"records": [{"data": data, "tag": "x"}]}
        good(server.api.http.post("/v0/topics/t.a", json=body, headers=root))

    add(1)
    asked = server.api.http.post("/v0/topics/t.a/live?tag=x&last=5", headers=key)
    answer = good(asked)
    assert answer["ticket_ttl_ms"] == 3_600_000
    url = answer["stream_url"]
    assert url == f"/v0/topics/t.a/live?tag=x&last=5&ticket={answer['ticket']}"
    # A client that sends a POST to its old URL gets a new ticket that replaces the old one in the
    # URL.
    renewed = good(server.api.http.post(f"{url}&token=root&%74icket=x", headers=key))
    assert renewed["stream_url"] == url.replace(answer["ticket"], renewed["ticket"])
    last_id = None
    for number in range(3):
        stream = follow(server.api, url, last_id)
        found, last_id = records(stream, 1)
        assert found[0]["data"] == number + 1
        stream.close()
        server.restart()
        add(number + 2)
    for target in (
        url.replace("tag=x", "tag=y"),
        url.replace("/t.a/", "/t.b/"),
        url.replace("&last=5", ""),
        url[:-1] + ("0" if url[-1] != "0" else "1"),
        url.partition("&ticket")[0],
    ):
        stream = SseStream(server.api.url, target, (ACCEPT,))
        assert stream.status == 401, target
        stream.close()
    # A ticket opens only streams.
    ticket = answer["ticket"]
    assert server.api.http.get(f"/v0/topics/t.a/records?ticket={ticket}").status_code == 401
    assert server.api.http.post(f"/v0/topics/t.a/live?ticket={ticket}").status_code == 401


def test_a_key_with_a_prefix_follows_its_prefixes_only(own: NewServer) -> None:
    server = own(TOPICS_API_KEYS=f"root,{SECRET}:read:t.")
    api = server.start()
    key = f"Authorization: Bearer {SECRET}"
    for target, status in (
        ("/v0/live?prefix=t.", 200),
        ("/v0/live?prefix=t.a", 200),
        ("/v0/live?prefix=t.,t.b", 200),
        ("/v0/live?prefix=t", 403),
        ("/v0/live?prefix=", 403),
        ("/v0/live?prefix=x.", 403),
        ("/v0/live?prefix=t.,x.", 403),
        ("/v0/live?topics=t.a,x.a", 403),
        ("/v0/topics/x.a/live", 403),
    ):
        stream = SseStream(api.url, target, (ACCEPT, key))
        assert stream.status == status, target
        stream.close()
    stream = follow(api, "/v0/live?prefix=t.", None, key)
    root = {"authorization": "Bearer root"}
    for name in ("x.a", "t.a"):
        body = {"records": [{"data": name}]}
        good(api.http.post(f"/v0/topics/{name}", json=body, headers=root))
    found, _ = records(stream, 1)
    assert found[0]["data"] == "t.a"
    assert b"x.a" not in stream.body
    stream.close()


# --- malformed ------------------------------------------------------------------------------


def _table() -> Table:
    table = Table()

    def add(name: str, query: str, where: str, *, of_topic: bool = True) -> None:
        for method in ("GET", "POST"):
            for path in ("/v0/topics/{t}/live", "/v0/live") if of_topic else ("/v0/live",):
                sent = query if path != "/v0/live" or not of_topic else f"topics={{t}}&{query}"
                row = Bad(method, f"{path}?{sent}", where=where, headers=(ACCEPT,))
                table.add(f"{method} {path} {name}", row)

    for name in ("last", "limit", "max_batch_bytes", "heartbeat_ms"):
        for value in ("x", "-1", "1.5", "1e3", "%20", "18446744073709551616", "9" * 400):
            add(f"{name}={value[:30]}", f"{name}={value}", name)
    add("last 0", "last=0", "last")
    for value in ("", "soon", "-1", "10", "2026-13-01T00:00:00Z", "5x", "9" * 100):
        if value != "10":
            add(f"since {value[:30]}", f"since={value}", "since")
    for name in ("tail", "include_tags", "include_meta", "include_data"):
        for value in ("", "1", "yes", "TRUE"):
            add(f"{name} {value}", f"{name}={value}", name)
    for value in ("", "weak", "STRONG"):
        add(f"consistency {value}", f"consistency={value}", "consistency")
    for value in ("", "[", "{}", "1", "null", '["tag","Eq"]', '["x","Eq","y"]', '["Or"]', "[[]]"):
        add(f"filter {value}", f"filter={quote(value)}", "filter")
    deep = '["Not",' * 9 + '"a"' + "]" * 9
    add("a deep filter", f"filter={quote(deep)}", "filter")
    wide = json.dumps(["tag", "In", ["a"] * 257])
    add("a wide filter", f"filter={quote(wide)}", "filter")
    add("two starts", "last=1&since=1m", "last")
    for value in ("", "a%20b", "-c", "a,b", "n" * 256):
        add(f"consumer {value[:20]}", f"consumer={value}", "consumer")
    for value in ("", "auto", "MANUAL"):
        add(f"ack {value}", f"ack={value}", "ack")
    add("a start and a tail", "tail=true&last=1", "tail")
    for value in ("!", "c1.", "c9.AAAA", "e30x!", "A"):
        add(f"cursor {value}", f"cursor={quote(value)}", "cursor")
    for value in ("", "a%20b", "-a", "a,", ",", "a,%00", "n" * 256):
        add(f"topics {value[:20]}", f"topics={value}", "topics", of_topic=False)
    add("nothing to follow", "last=1", "topics", of_topic=False)
    add(
        "too many topics",
        "topics=" + ",".join(f"n{n}" for n in range(257)),
        "topics",
        of_topic=False,
    )
    for value in (" ", "-", ".a", "a/b", "ä", "n" * 256):
        add(f"prefix {value[:20]}", f"prefix={quote(value)}", "prefix", of_topic=False)
    add("from_seq of many", "topics={t}&from_seq=1", "from_seq", of_topic=False)
    table.check(180)
    return table


TABLE = _table()


@pytest.fixture(scope="module")
def standing(api: Api) -> str:
    name = "standing-live"
    api.add(name, 1, 2, 3)
    return name


@pytest.mark.parametrize("case", TABLE.values(), ids=list(TABLE))
def test_a_malformed_stream_is_refused_and_takes_no_place(
    api: Api, standing: str, case: Bad
) -> None:
    before = gauges(api)
    target = filled(case.target, {"t": standing})
    answer = api.raw(case.method, target, b"", list(case.headers))
    assert refused(answer, 400, "invalid_request")["field"].startswith(case.where or "")
    nothing_left(api, before)


def test_a_client_that_takes_no_event_stream_is_refused(api: Api, standing: str) -> None:
    answer = api.raw("GET", f"/v0/topics/{standing}/live", headers=["Accept: application/json"])
    refused(answer, 406, "not_acceptable")
    answer = api.raw("GET", f"/v0/topics/{standing}/live", headers=[ACCEPT, "Last-Event-ID: ?"])
    assert refused(answer, 400, "invalid_request")["field"] == "Last-Event-ID"
