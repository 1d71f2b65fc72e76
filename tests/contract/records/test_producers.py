"""Producer headers on `/v0`: accepted, repeated and fenced requests, gaps, restarts and races."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import httpx
import pytest

from tests.contract.conftest import NewServer
from tests.contract.driver import Api, Server, good, refused
from tests.contract.streams.streams import connected
from tests.contract.watch.subscriptions import Clients

HOWS = ["clean stop", "kill -9"]
CLASSES = ["ephemeral", "memory", "disk", "fsync"]
MOST = 2**53 - 1


def _again(server: Server, how: str) -> Api:
    return server.restart() if how == "clean stop" else server.crash()


def _headers(epoch: object, seq: object, producer: str = "p") -> dict[str, str]:
    return {"Producer-Id": producer, "Producer-Epoch": str(epoch), "Producer-Seq": str(seq)}


def _send(
    api: Api,
    topic: str,
    headers: Mapping[str, str],
    *datas: object,
    query: str = "",
    **body: object,
) -> httpx.Response:
    records = [{"data": data} for data in datas or (1,)]
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    return api.http.post(
        f"/v0/topics/{topic}{query}", json={"records": records, **body}, headers=raw
    )


def _accepted(answer: httpx.Response, epoch: int, seq: int, first_seq: int) -> None:
    body = good(answer)
    assert body["first_seq"] == first_seq
    assert (answer.headers["producer-epoch"], answer.headers["producer-seq"]) == (
        str(epoch),
        str(seq),
    )
    assert "topic-first-seq" not in answer.headers


def _repeated(
    answer: httpx.Response, epoch: int, highest: int, seqs: tuple[int, int] | None
) -> None:
    assert (answer.status_code, answer.content) == (204, b"")
    told = answer.headers
    assert (told["producer-epoch"], told["producer-seq"]) == (str(epoch), str(highest))
    if seqs is None:
        assert "topic-first-seq" not in told
        assert "topic-last-seq" not in told
    else:
        assert (told["topic-first-seq"], told["topic-last-seq"]) == (str(seqs[0]), str(seqs[1]))


def _datas(api: Api, topic: str) -> list[object]:
    return [record["data"] for record in api.read_all(topic)]


# --- the rules --------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", CLASSES)
def test_each_next_request_is_accepted_once(api: Api, topic: str, durability: str) -> None:
    """Producer headers and settled rules of the contract [P-04, P-05, S-70]"""
    api.put(topic, {"durability": durability})
    _accepted(_send(api, topic, _headers(0, 0), "a", "b"), 0, 0, 1)
    _accepted(_send(api, topic, _headers(0, 1), "c"), 0, 1, 3)
    _repeated(_send(api, topic, _headers(0, 1), "c"), 0, 1, (3, 3))
    _repeated(_send(api, topic, _headers(0, 0), "a", "b"), 0, 1, None)
    _accepted(_send(api, topic, _headers(0, 2), "d"), 0, 2, 4)
    assert _datas(api, topic) == ["a", "b", "c", "d"]


def test_the_first_request_may_create_the_topic(api: Api, topic: str) -> None:
    """P: a repeat of the creating request gets 204, and a refused request creates nothing.
    [P-04]
    """
    refused(_send(api, topic, _headers(0, 3)), 409, "producer_seq_conflict")
    assert api.state(topic).status_code == 404
    made = _send(api, topic, _headers(4, 0), "a", config={"durability": "fsync"})
    assert made.status_code == 201
    _accepted(made, 4, 0, 1)
    _repeated(_send(api, topic, _headers(4, 0), "a"), 4, 0, (1, 1))
    assert api.get_state(topic)["config"]["durability"] == "fsync"


def test_a_gap_is_409_with_the_expected_seq(api: Api, topic: str) -> None:
    """Producer headers and settled rules of the contract [P-06, S-72]"""
    _send(api, topic, _headers(0, 0))
    answer = _send(api, topic, _headers(0, 5), "skipped")
    detail = refused(answer, 409, "producer_seq_conflict")
    assert detail == {"expected_seq": 1, "received_seq": 5}
    assert answer.headers["producer-expected-seq"] == "1"
    assert answer.headers["producer-received-seq"] == "5"
    _accepted(_send(api, topic, _headers(0, 1)), 0, 1, 2)


def test_a_new_epoch_begins_at_0_and_fences_the_old(api: Api, topic: str) -> None:
    """Producer headers and settled rules of the contract [P-07, P-08, S-71]"""
    for seq in range(3):
        _send(api, topic, _headers(0, seq))
    detail = refused(_send(api, topic, _headers(1, 3)), 400, "invalid_request")
    assert detail == {"field": "Producer-Seq"}
    _accepted(_send(api, topic, _headers(7, 0), "new"), 7, 0, 4)
    zombie = _send(api, topic, _headers(0, 3), "zombie")
    refused(zombie, 403, "producer_fenced")
    assert zombie.headers["producer-epoch"] == "7"
    refused(_send(api, topic, _headers(6, 0)), 403, "producer_fenced")
    assert _datas(api, topic) == [1, 1, 1, "new"]


def test_producers_are_independent_and_of_one_topic(api: Api, topic: str) -> None:
    """Producer headers of the contract [P-09]"""
    other = topic + "-other"
    _accepted(_send(api, topic, _headers(0, 0, "a")), 0, 0, 1)
    _accepted(_send(api, topic, _headers(3, 0, "b")), 3, 0, 2)
    _accepted(_send(api, other, _headers(0, 0, "a")), 0, 0, 1)
    _accepted(_send(api, topic, _headers(0, 1, "a")), 0, 1, 3)
    refused(_send(api, other, _headers(3, 1, "b")), 409, "producer_seq_conflict")


def test_names_of_the_headers_match_in_any_case(api: Api, topic: str) -> None:
    """Producer headers of the contract [P-02]"""
    _accepted(
        _send(api, topic, {"Producer-ID": "p", "PRODUCER-EPOCH": "0", "producer-seq": "0"}), 0, 0, 1
    )
    _repeated(_send(api, topic, _headers(0, 0)), 0, 0, (1, 1))


def test_the_largest_numbers_are_numbers(api: Api, topic: str) -> None:
    """Producer headers of the contract [P-03]"""
    _accepted(_send(api, topic, _headers(MOST, 0, "é" * 256)), MOST, 0, 1)
    detail = refused(
        _send(api, topic, _headers(MOST, MOST, "é" * 256)), 409, "producer_seq_conflict"
    )
    assert detail["received_seq"] == MOST


BAD = [
    ({"Producer-Id": "p"}, "Producer-Epoch"),
    ({"Producer-Epoch": "0"}, "Producer-Id"),
    ({"Producer-Seq": "0"}, "Producer-Id"),
    ({"Producer-Id": "p", "Producer-Epoch": "0"}, "Producer-Seq"),
    ({"Producer-Id": "p", "Producer-Seq": "0"}, "Producer-Epoch"),
    ({"Producer-Epoch": "0", "Producer-Seq": "0"}, "Producer-Id"),
    (_headers(0, 0, ""), "Producer-Id"),
    (_headers(0, 0, "x" * 257), "Producer-Id"),
    *((_headers(bad, 0), "Producer-Epoch") for bad in ("", "-1", "+1", "1.0", "1e3", "x", "0x1")),
    *((_headers(0, bad), "Producer-Seq") for bad in ("", "-1", "+1", "0.0", "null", "１")),
    (_headers(MOST + 1, 0), "Producer-Epoch"),
    (_headers(0, MOST + 1), "Producer-Seq"),
    (_headers(0, "9" * 200), "Producer-Seq"),
]


@pytest.mark.parametrize(("headers", "field"), BAD, ids=str)
def test_anything_else_is_400_and_stores_nothing(
    api: Api, topic: str, headers: dict[str, str], field: str
) -> None:
    """Producer headers of the contract [P-01, P-03]"""
    api.put(topic, {})
    answer = _send(api, topic, headers)
    assert refused(answer, 400, "invalid_request") == {"field": field}
    assert api.get_state(topic)["head_seq"] == 0
    _accepted(_send(api, topic, _headers(0, 0)), 0, 0, 1)


def test_a_header_that_is_said_twice_is_400(api: Api, topic: str) -> None:
    """Producer headers of the contract [P-01]"""
    api.put(topic, {})
    twice = [*_headers(0, 0).items(), ("Producer-Seq", "1")]
    body = {"records": [{"data": 1}]}
    refused(api.http.post(f"/v0/topics/{topic}", json=body, headers=twice), 400, "invalid_request")
    assert api.get_state(topic)["head_seq"] == 0


def test_an_id_that_is_no_text_is_400(api: Api, topic: str) -> None:
    """Producer headers of the contract [P-03]"""
    headers = [(b"Producer-Id", b"\xff"), (b"Producer-Epoch", b"0"), (b"Producer-Seq", b"0")]
    answer = api.http.post(f"/v0/topics/{topic}", json={"records": [{"data": 1}]}, headers=headers)
    assert refused(answer, 400, "invalid_request") == {"field": "Producer-Id"}


# # --- producers together with other features
# -------------------------------------------------------


def test_a_refused_append_does_not_move_its_producer(api: Api, topic: str) -> None:
    api.put(topic, {"cap_records": 1, "discard": "reject"})
    _send(api, topic, _headers(0, 0))
    refused(_send(api, topic, _headers(0, 1)), 422, "topic_full")
    refused(_send(api, topic, _headers(0, 1), data="x", records=[]), 400, "invalid_request")
    api.delete(topic, before_seq=2)
    _accepted(_send(api, topic, _headers(0, 1)), 0, 1, 2)


def test_a_known_key_moves_its_producer_without_records(api: Api, topic: str) -> None:
    """A repeat by its key alone gets the answer of a repeat, and still counts as its producer's
    request.
    """
    first = _send(api, topic, _headers(0, 0), "a", idempotency_key="k")
    _accepted(first, 0, 0, 1)
    again = _send(api, topic, _headers(1, 0), "a", idempotency_key="k")
    _accepted(again, 1, 0, 1)
    assert again.json()["deduped"] is True
    _repeated(_send(api, topic, _headers(1, 0), "a", idempotency_key="k"), 1, 0, (1, 1))
    _accepted(_send(api, topic, _headers(1, 1), "b"), 1, 1, 2)
    refused(_send(api, topic, _headers(0, 1), "c"), 403, "producer_fenced")
    assert _datas(api, topic) == ["a", "b"]


def test_a_producers_repeat_counts_before_its_key(api: Api, topic: str) -> None:
    _send(api, topic, _headers(0, 0), "a", idempotency_key="k")
    _repeated(_send(api, topic, _headers(0, 0), "b", idempotency_key="other"), 0, 0, (1, 1))
    assert _datas(api, topic) == ["a"]


def test_a_dropped_topic_knows_no_producers(api: Api, topic: str) -> None:
    _send(api, topic, _headers(5, 0))
    api.drop(topic)
    refused(_send(api, topic, _headers(5, 1)), 409, "producer_seq_conflict")
    _accepted(_send(api, topic, _headers(0, 0)), 0, 0, 1)


def test_other_appends_and_deletes_do_not_matter(api: Api, topic: str) -> None:
    _send(api, topic, _headers(0, 0), "a")
    api.add(topic, "other")
    api.delete(topic, before_seq=3)
    _repeated(_send(api, topic, _headers(0, 0), "a"), 0, 0, (1, 1))
    _accepted(_send(api, topic, _headers(0, 1), "b", query="?return_seqs=false"), 0, 1, 3)


# --- over restarts --------------------------------------------------------------------------------


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("durability", ["disk", "fsync"])
def test_producers_survive_with_their_records(
    own: NewServer, topic: str, durability: str, how: str
) -> None:
    server = own(TOPICS_CHECKPOINT_INTERVAL_MS="200")
    api = server.start()
    api.put(topic, {"durability": durability})
    for seq in range(50):
        _send(api, topic, _headers(3, seq), seq)
    _send(api, topic, _headers(0, 0, "q"), "q", idempotency_key="k")
    _send(api, topic, _headers(1, 0, "q"), "q", idempotency_key="k")
    for _ in range(2):
        api = _again(server, how)
        _repeated(_send(api, topic, _headers(3, 49), 49), 3, 49, (50, 50))
        _repeated(_send(api, topic, _headers(3, 10), 10), 3, 49, None)
        _repeated(_send(api, topic, _headers(1, 0, "q"), "q"), 1, 0, (51, 51))
        refused(_send(api, topic, _headers(0, 1, "q")), 403, "producer_fenced")
        refused(_send(api, topic, _headers(3, 51)), 409, "producer_seq_conflict")
    assert _datas(api, topic) == [*range(50), "q"]
    good(_send(api, topic, _headers(3, 50), 50))


def test_an_ephemeral_topic_forgets_its_producers_with_its_records(
    own: NewServer, topic: str
) -> None:
    server = own()
    api = server.start()
    api.put(topic, {"durability": "ephemeral"})
    _send(api, topic, _headers(3, 0))
    api = server.restart()
    assert refused(_send(api, topic, _headers(3, 1)), 409, "producer_seq_conflict") == {
        "expected_seq": 0,
        "received_seq": 1,
    }
    good(_send(api, topic, _headers(4, 0)))


# --- races ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", CLASSES)
def test_of_many_with_the_same_request_one_is_accepted(
    api: Api, topic: str, durability: str
) -> None:
    api.put(topic, {"durability": durability})
    statuses: list[int] = []
    turns = threading.Barrier(8)

    def write(name: int) -> None:
        with httpx.Client(base_url=api.url) as http:
            for seq in range(25):
                turns.wait(60)
                body = {"records": [{"data": [name, seq]}]}
                sent = http.post(f"/v0/topics/{topic}", json=body, headers=_headers(0, seq))
                statuses.append(sent.status_code)

    threads = [threading.Thread(target=write, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses.count(200) == 25
    assert statuses.count(204) == 7 * 25
    seqs = [record["data"][1] for record in api.read_all(topic)]
    assert seqs == list(range(25))


def test_requests_sent_one_behind_another_are_successors(api: Api, topic: str) -> None:
    """P: the client pipelines the requests on one connection, without waiting for answers."""
    api.put(topic, {"durability": "fsync"})
    body = b'{"records":[{"data":1}]}'
    requests = b"".join(
        b"POST /v0/topics/%b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\nProducer-Id: p\r\nProducer-Epoch: 0\r\nProducer-Seq: %d\r\n\r\n%b"
        % (topic.encode(), len(body), seq, body)
        for seq in range(40)
    )
    with connected(api.url) as sock:
        sock.sendall(requests)
        got = b""
        while got.count(b"HTTP/1.1 200 ") < 40:
            block = sock.recv(65536)
            assert block, got
            got += block
    assert api.get_state(topic)["head_seq"] == 40


# --- WebSocket ------------------------------------------------------------------------------------


def test_a_publish_may_be_a_producers(api: Api, topic: str, clients: Clients) -> None:
    ws = clients.ws(api)

    def publish(epoch: object, seq: object, *, producer: object = "p") -> dict[str, object]:
        ws.send(
            op="publish",
            request_id="r",
            topic=topic,
            records=[{"data": 1}],
            producer_id=producer,
            producer_epoch=epoch,
            producer_seq=seq,
        )
        frame: dict[str, object] = ws.frame()
        frame.pop("performance", None)
        return frame

    first = publish(0, 0)
    assert (first["first_seq"], first["producer_epoch"], first["producer_seq"]) == (1, 0, 0)
    assert "deduped" not in first
    publish(0, 1)
    last = publish(0, 1)
    assert (last["deduped"], last["first_seq"], last["producer_seq"]) == (True, 2, 1)
    assert publish(0, 0) == {
        "op": "ack",
        "request_id": "r",
        "topic": topic,
        "head_seq": 2,
        "deduped": True,
        "producer_epoch": 0,
        "producer_seq": 1,
    }
    gap = publish(0, 5)
    assert (gap["op"], gap["code"]) == ("error", "producer_seq_conflict")
    assert gap["detail"] == {"expected_seq": 2, "received_seq": 5}
    publish(1, 0)
    fenced = publish(0, 2)
    assert (fenced["code"], fenced["detail"]) == ("producer_fenced", {"epoch": 1})
    for wrong, field in (
        (publish(None, 0), "producer_epoch"),
        (publish(1, 1, producer=""), "producer_id"),
        (publish(-1, 0), "producer_epoch"),
        (publish(1, "1"), "producer_seq"),
        (publish(1, MOST + 1), "producer_seq"),
    ):
        assert (wrong["code"], wrong["detail"]) == ("invalid_request", {"field": field})
    assert api.get_state(topic)["head_seq"] == 3
