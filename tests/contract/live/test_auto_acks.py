"""Streams that commit for their consumer the records that their socket took: `ack: auto`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Final
from urllib.parse import quote

import pytest

from tests.contract.conftest import NewServer
from tests.contract.driver import Api, Json, eventually, good, refused
from tests.contract.records.test_consumers import commit, put, where
from tests.contract.streams.streams import SseStream, WsClient
from tests.contract.watch.test_filters import frames_until, seqs
from tests.contract.watch.test_live import ACCEPT, follow, records

CARRIERS: Final = ("live", "watch", "ws")


@pytest.fixture
def standing(api: Api, topic: str) -> str:
    """Six records, `odd` and `even`, and a consumer `c` at 2."""
    for number in range(1, 7):
        good(api.append(topic, [{"data": number, "tag": ("even", "odd")[number % 2]}]))
    good(put(api, topic, "c", **{"from": 2}))
    return topic


@pytest.fixture
def socket(api: Api) -> Iterator[WsClient]:
    client = WsClient(api.url)
    yield client
    client.close()


class Carried:
    """One stream of consumer `c` with `ack: auto`, over any carrier."""

    def __init__(self, carrier: str, api: Api, topic: str, **more: Any) -> None:
        self._stream: SseStream | None = None
        self._socket: WsClient | None = None
        start = {"consumer": "c", "ack": "auto"}
        if carrier == "ws":
            self._socket = WsClient(api.url)
            self._socket.send(op="subscribe", topic=topic, **start, **more)
            return
        url = f"/v0/topics/{topic}/live?consumer=c&ack=auto"
        if "filter" in more:
            url += f"&filter={quote(json.dumps(more['filter']))}"
        if carrier == "watch":
            body = {"topics": {topic: start}, **more}
            url = good(api.http.post("/v0/watch", json=body))["stream_url"]
        self._stream = follow(api, url)

    def take(self, count: int) -> list[int]:
        """The seqs of the next so many records."""
        found: list[int] = []
        while len(found) < count:
            if self._stream is not None:
                found += [record["$seq"] for record in records(self._stream, count)[0]]
            else:
                assert self._socket is not None
                found += seqs([self._socket.frame()])
        return found

    def close(self) -> None:
        for each in (self._stream, self._socket):
            if each is not None:
                each.close()


def committed(api: Api, topic: str, seq: int) -> None:
    eventually(lambda: bool(where(api, topic)["seq"] == seq), f"the consumer is at {seq}")


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_stream_commits_what_the_socket_took(api: Api, standing: str, carrier: str) -> None:
    stream = Carried(carrier, api, standing)
    assert stream.take(4) == [3, 4, 5, 6]
    committed(api, standing, 6)
    for number in range(7, 10):
        api.add(standing, number)
        assert stream.take(1) == [number]
        committed(api, standing, number)
    stream.close()
    # The next stream begins after the committed seq.
    stream = Carried(carrier, api, standing)
    api.add(standing, 10)
    assert stream.take(1) == [10]
    committed(api, standing, 10)
    # A stream never goes back; its consumer does after a commit with `rewind`.
    good(commit(api, standing, 4, rewind=True))
    api.add(standing, 11)
    assert stream.take(1) == [11]
    committed(api, standing, 11)
    stream.close()


@pytest.mark.parametrize("carrier", CARRIERS)
def test_what_a_filter_leaves_out_is_finished_as_well(
    api: Api, standing: str, carrier: str
) -> None:
    stream = Carried(carrier, api, standing, filter=["tag", "Eq", "odd"])
    assert stream.take(2) == [3, 5]
    committed(api, standing, 6)
    stream.close()


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_consumer_that_is_gone_is_told_and_the_stream_goes_on(
    api: Api, standing: str, carrier: str
) -> None:
    stream = Carried(carrier, api, standing)
    assert stream.take(4) == [3, 4, 5, 6]
    committed(api, standing, 6)
    good(api.http.delete(f"/v0/topics/{standing}/consumers/c"))
    api.add(standing, 7)
    assert stream.take(1) == [7]
    if stream._socket is not None:
        (told,) = frames_until(stream._socket, "error")
        assert (told["code"], told["detail"]["consumer"]) == ("consumer_not_found", "c")
    else:
        assert stream._stream is not None
        event = stream._stream.event()
        assert (event.name, json.loads(event.data)["code"], json.loads(event.data)["consumer"]) == (
            "error",
            404,
            "c",
        )
    api.add(standing, 8)
    assert stream.take(1) == [8]
    stream.close()


def test_a_session_commits_over_restarts_and_kills(own: NewServer) -> None:
    server = own()
    api = server.start()
    api.add("jobs", 1, 2)
    good(put(api, "jobs"))
    body = {"topics": {"jobs": {"consumer": "c", "ack": "auto"}}}
    url = good(api.http.post("/v0/watch", json=body))["stream_url"]
    stream = follow(api, url)
    last_id = records(stream, 2)[1]
    committed(api, "jobs", 2)
    for number, stop in ((3, server.crash), (4, server.restart)):
        api = stop()
        stream.close()
        api.add("jobs", number)
        stream = follow(api, url, last_id)
        found, last_id = records(stream, 1)
        assert found[0]["data"] == number
        committed(api, "jobs", number)
    stream.close()
    server.stop()


def test_an_unsubscribed_topic_is_committed_no_more(
    api: Api, socket: WsClient, standing: str
) -> None:
    start = {"topic": standing, "consumer": "c"}
    socket.send(op="subscribe", ack="auto", **start)
    assert seqs(frames_until(socket, "caught_up")) == [3, 4, 5, 6]
    committed(api, standing, 6)
    # A subscription that replaces it commits nothing.
    socket.send(op="subscribe", **start)
    frames_until(socket, "caught_up")
    api.add(standing, 7)
    assert seqs(frames_until(socket, "record")) == [7]
    socket.send(op="unsubscribe", topic=standing)
    frames_until(socket, "unsubscribed")
    socket.send(op="subscribe", ack="auto", **start)
    assert seqs(frames_until(socket, "caught_up")) == [7]
    committed(api, standing, 7)


def test_a_stream_that_commits_needs_read_and_write(
    own: NewServer, names: Callable[[str], str]
) -> None:
    server = own(TOPICS_API_KEYS="all,r:read,rw:read+write")
    api = server.start()
    root = {"authorization": "Bearer all"}
    good(api.http.post("/v0/topics/t", json={"records": [{"data": 1}]}, headers=root))
    good(api.http.put("/v0/topics/t/consumers/c", json={}, headers=root))
    body: Json = {"topics": {"t": {"consumer": "c", "ack": "auto"}}}
    for key, status in (("r", 403), ("rw", 200)):
        head = {"authorization": f"Bearer {key}"}
        assert api.http.post("/v0/watch", json=body, headers=head).status_code == status
        target = "/v0/topics/t/live?consumer=c&ack=auto"
        assert api.http.post(target, headers=head).status_code == status
        stream = SseStream(api.url, target, (ACCEPT, f"Authorization: Bearer {key}"))
        assert stream.status == status
        stream.close()
        socket = WsClient(api.url, headers=(("Authorization", f"Bearer {key}"),))
        socket.send(op="subscribe", **body)
        told = socket.frame()
        assert told["op"] == ("error" if status == 403 else "subscribed"), told
        if status == 403:
            assert (told["code"], told["detail"]["scopes"]) == ("forbidden", ["write"])
        socket.close()
    server.stop()


def test_an_auto_ack_needs_a_consumer(api: Api, standing: str) -> None:
    for method in ("GET", "POST"):
        answer = api.raw(method, f"/v0/topics/{standing}/live?ack=auto", headers=[ACCEPT])
        assert refused(answer, 400, "invalid_request")["field"] == "ack"
