"""Both kinds of producers over a transport that drops, delays and refuses."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import httpx
import pytest

from tests.unit.client.model_server import ModelServer
from topics_server.client import (
    AsyncIdempotentProducer,
    Backoff,
    Fenced,
    IdempotentProducer,
    InvalidRequest,
    ProducerClosed,
    Undelivered,
    Unreachable,
)
from topics_server.client.producing.batches import SendTerms
from topics_server.client.producing.targets import Accepted, Beaten, Repeated, StampGap

FAST = Backoff(base_ms=1, cap_ms=5)
URL = "http://model/v0/topics/t"
STREAM = "http://model/v1/stream/t"


class Model(httpx.AsyncBaseTransport):
    """A model server behind HTTP; `faults` from 0 to 1 is the unreliability of the network."""

    def __init__(self, *, faults: float = 0.0, seed: int = 1) -> None:
        self.server = ModelServer(knows_keys=True)
        self.faults = faults
        self.chance = Random(seed)
        self.asked = asyncio.Event()
        self.held: asyncio.Event | None = None
        self.instead: Callable[[], httpx.Response] | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.asked.set()
        if self.held is not None:
            await self.held.wait()
        if self.instead is not None:
            return self.instead()
        if self.chance.random() < self.faults:
            await asyncio.sleep(self.chance.random() / 1000)  # others overtake it
        if self.chance.random() < self.faults:
            raise httpx.ConnectError("down")
        if self.chance.random() < self.faults:
            return httpx.Response(429, headers={"Retry-After": "0"})
        response = self.do(request)
        if self.chance.random() < self.faults:
            raise httpx.ReadError("lost")
        return response

    def do(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        is_topic = isinstance(body, dict)
        records = [row["data"] for row in body["records"]] if is_topic else body
        key = body.get("idempotency_key", "") if is_topic else str(self.chance.random())
        verdict = self.server.append(
            [json.dumps(record).encode() for record in records],
            int(request.headers["Producer-Epoch"]),
            int(request.headers["Producer-Seq"]),
            key or str(self.chance.random()),
        )
        match verdict:
            case Accepted(first_seq=first_seq):
                return httpx.Response(200, json={"first_seq": first_seq})
            case Repeated(highest=highest):
                return httpx.Response(204, headers={"Producer-Seq": str(highest)})
            case StampGap(expected=expected):
                return httpx.Response(409, headers={"Producer-Expected-Seq": str(expected)})
            case Beaten(epoch=epoch):
                return httpx.Response(403, headers={"Producer-Epoch": str(epoch)})
            case _:
                raise AssertionError(verdict)

    @property
    def stored(self) -> list[Any]:
        return [json.loads(record) for record in self.server.log if record != b"rival"]


def bad() -> httpx.Response:
    return httpx.Response(400, json={"error": {"code": "invalid_request", "message": "m"}})


@pytest.mark.anyio
@pytest.mark.parametrize("place", [URL, STREAM])
async def test_coroutines_over_a_bad_way_store_once_and_in_order(place: str) -> None:
    for seed in range(5):
        model = Model(faults=0.2, seed=seed)
        async with AsyncIdempotentProducer(
            place,
            "p",
            transport=model,
            epoch=0,
            pauses=FAST,
            linger_ms=0,
            batch_records=3,
            in_flight=5,
            buffer_records=20,
        ) as producer:
            receipts = [await producer.send(number) for number in range(100)]
        assert model.stored == list(range(100))
        assert [(await receipt).epoch for receipt in receipts] == [0] * 100


@pytest.mark.parametrize("place", [URL, STREAM])
def test_threads_over_a_bad_way_store_once_and_in_order(place: str) -> None:
    model = Model(faults=0.2)
    producer = IdempotentProducer(
        place, "p", transport=model, epoch=0, pauses=FAST, buffer_records=20, batch_records=3
    )

    def send(worker: int) -> None:
        for number in range(50):
            producer.send([worker, number])

    with producer, ThreadPoolExecutor(4) as pool:
        list(pool.map(send, range(4)))
    for worker in range(4):
        assert [n for w, n in model.stored if w == worker] == list(range(50))
    assert len(model.stored) == 200


def test_receipts_tell_where_a_record_is() -> None:
    with IdempotentProducer(URL, "p", transport=Model(), epoch=0) as producer:
        producer.send("a").result(10)
        first, second = producer.send("b"), producer.send("c")
        assert not second.done()
        assert (first.result(10).seq, second.result(10).seq) == (2, 3)
        assert first.result().producer_seq == 1
        assert producer.epoch == 0


def test_a_claim_fences_the_one_before_and_is_told_by_receipt_and_flush() -> None:
    model = Model()
    zombie = IdempotentProducer(URL, "p", transport=model)
    zombie.send(1).result(10)
    with IdempotentProducer(URL, "p", transport=model) as heir:
        heir.send(2).result(10)
        assert (zombie.epoch, heir.epoch) == (0, 1)
    late = zombie.send(3)
    with pytest.raises(Undelivered) as told:
        late.result(10)
    assert isinstance(told.value.reason, Fenced)
    assert not told.value.in_doubt
    with pytest.raises(Undelivered):
        zombie.flush()
    with pytest.raises(Undelivered):
        zombie.send(4)
    zombie.close()  # reported already
    assert model.stored == [1, 2]


def test_a_close_is_heard_while_the_loop_is_awake_for_something_else() -> None:
    """The producer's loop was woken and has decided to continue; the producer is closed before the
    loop checks again.
    """
    producer = IdempotentProducer(URL, "p", transport=Model())
    producer.send(1).result(10)
    carrier = producer._carrier
    is_over = carrier._is_over
    closing = threading.Thread(target=producer.close, daemon=True)

    def close_behind(tasks: Any) -> bool:
        found = is_over(tasks)
        if not found and closing.ident is None:
            closing.start()
            while not carrier.is_closing:
                time.sleep(0.001)
            time.sleep(0.05)  # and has notified the loop
        return found

    carrier._is_over = close_behind  # type: ignore[method-assign]
    carrier.wake()
    for _ in range(1000):
        if closing.ident is not None:
            break
        time.sleep(0.01)
    closing.join(10)
    assert not closing.is_alive()


def test_with_claim_it_goes_on() -> None:
    model = Model()
    with IdempotentProducer(URL, "p", transport=model, claim=True) as producer:
        producer.send(1).result(10)
        model.server.rival()
        assert producer.send(2).result(10).epoch == 2
    assert model.stored == [1, 2]


def test_close_raises_what_nobody_looked_at() -> None:
    model = Model()
    model.instead = bad
    producer = IdempotentProducer(URL, "p", transport=model, epoch=0)
    producer.send(1)
    with pytest.raises(Undelivered) as told:
        producer.close()
    assert isinstance(told.value.reason, InvalidRequest)
    producer.close()
    with pytest.raises(Undelivered):
        producer.send(2)


def test_the_error_of_a_block_is_not_hidden() -> None:
    model = Model()
    model.instead = bad

    def work() -> None:
        with IdempotentProducer(URL, "p", transport=model, epoch=0) as producer:
            producer.send(1)
            raise KeyError("mine")

    with pytest.raises(KeyError) as found:
        work()
    assert "is not stored" in found.value.__notes__[0]


def test_an_unused_producer_opens_nothing() -> None:
    with IdempotentProducer(URL, "p", transport=Model()) as producer:
        producer.flush()
    with pytest.raises(Undelivered):
        producer.send(1)


def test_a_close_that_does_not_wait_tells_what_is_left() -> None:
    model = Model()
    model.instead = lambda: httpx.Response(503)
    producer = IdempotentProducer(URL, "p", transport=model, epoch=0, patience_ms=None)
    receipt = producer.send(1)
    with pytest.raises(Undelivered) as told:
        producer.close(timeout_ms=50)
    assert isinstance(told.value.reason, ProducerClosed)
    with pytest.raises(Undelivered):
        receipt.result(0)


def test_a_full_buffer_holds_senders_back_until_there_is_room() -> None:
    model = Model()
    model.instead = lambda: httpx.Response(503)
    producer = IdempotentProducer(URL, "p", transport=model, epoch=0, buffer_records=2, pauses=FAST)
    producer.send(1)
    producer.send(2)
    through = threading.Event()

    def send() -> None:
        producer.send(3)
        through.set()

    thread = threading.Thread(target=send)
    thread.start()
    assert not through.wait(0.05)
    model.instead = None
    assert through.wait(20)
    thread.join()
    producer.close()
    assert model.stored == [1, 2, 3]


def test_a_send_that_waits_for_room_learns_of_the_end() -> None:
    model = Model()
    model.instead = lambda: httpx.Response(503)
    producer = IdempotentProducer(
        URL, "p", transport=model, epoch=0, buffer_records=1, pauses=FAST, patience_ms=100
    )
    producer.send(1)
    with pytest.raises(Undelivered):
        producer.send(2)
    with pytest.raises(Undelivered):
        producer.close()


@pytest.mark.anyio
async def test_coroutines_wait_for_room_in_turn() -> None:
    model = Model()
    model.held = asyncio.Event()
    async with AsyncIdempotentProducer(
        URL, "p", transport=model, epoch=0, buffer_records=1
    ) as producer:
        sends = [asyncio.create_task(producer.send(number)) for number in range(5)]
        await model.asked.wait()
        assert sum(task.done() for task in sends) == 1
        model.held.set()
        for task in sends:
            await (await task)
    assert model.stored == [0, 1, 2, 3, 4]


@pytest.mark.anyio
async def test_coroutines_learn_of_the_end_too() -> None:
    model = Model()
    producer = AsyncIdempotentProducer(URL, "p", transport=model)
    receipt = await producer.send(1)
    await producer.flush()
    assert receipt.done()
    model.server.rival()
    await producer.send(2)
    with pytest.raises(Undelivered):
        await producer.flush()
    await producer.close()
    assert producer.epoch == 0
    with pytest.raises(Undelivered):
        await producer.send(3)
    other = AsyncIdempotentProducer(URL, "p", transport=model)
    model.instead = lambda: httpx.Response(503)
    receipt = await other.send(1)
    with pytest.raises(Undelivered):
        await other.close(timeout_ms=20)
    with pytest.raises(Undelivered):
        await receipt
    await other.close()

    async def work() -> None:
        async with AsyncIdempotentProducer(URL, "p", transport=model, patience_ms=0) as third:
            await third.send(1)
            raise KeyError("mine")

    with pytest.raises(KeyError) as found:
        await work()
    assert found.value.__notes__


@pytest.mark.anyio
async def test_a_cancelled_waiting_send_does_no_harm() -> None:
    model = Model()
    model.held = asyncio.Event()
    async with AsyncIdempotentProducer(URL, "p", transport=model, epoch=0) as producer:
        receipt = await producer.send(1)

        async def wait() -> None:
            await receipt

        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        model.held.set()
        assert (await receipt).seq == 1


@pytest.mark.anyio
async def test_a_request_under_way_is_broken_off_quietly(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    model.held = asyncio.Event()
    producer = AsyncIdempotentProducer(URL, "p", transport=model, epoch=0)
    await producer.send(1)
    await producer.send(2)
    with pytest.raises(Undelivered) as told:
        await producer.close(timeout_ms=20)
    assert told.value.in_doubt
    sync_model = Model()
    with pytest.raises(Undelivered):
        await asyncio.to_thread(_close_under_way, sync_model)
    assert [line for line in caplog.messages if "exception" in line] == []


def _close_under_way(model: Model) -> None:
    model.held = asyncio.Event()
    producer = IdempotentProducer(URL, "p", transport=model, epoch=0)
    producer.send(1)
    producer.close(timeout_ms=20)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"epoch": -1}, ValueError),
        ({"seq": 0}, ValueError),
        ({"epoch": 0, "seq": -1}, ValueError),
        ({"in_flight": 0}, ValueError),
        ({"colour": "red"}, TypeError),
    ],
)
def test_wrong_options(options: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        IdempotentProducer("t", "p", **options)
    with pytest.raises(ValueError, match="printable"):
        IdempotentProducer("t", "")


def test_an_unreachable_server_is_reported_after_the_patience() -> None:
    producer = IdempotentProducer("t", "p", url="http://127.0.0.1:1", patience_ms=0)
    receipt = producer.send(1)
    with pytest.raises(Undelivered) as told:
        receipt.result(20)
    assert isinstance(told.value.reason, Unreachable)
    assert not told.value.in_doubt
    with pytest.raises(Undelivered):
        producer.close()


# -- fork ----------------------------------------------------------------------------------------


def in_a_child(act: Callable[[], object]) -> str:
    """The exception of `act` in a forked child, as text; empty if it returns."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        told = ""
        try:
            act()
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        finally:
            os.write(writing, told.encode())
            os._exit(0)
    os.close(writing)
    assert os.waitpid(child, 0)[1] == 0
    with os.fdopen(reading) as file:
        return file.read()


@pytest.mark.parametrize("moment", ["before the first record", "while it sends"])
def test_a_forked_child_is_told_at_once_that_the_producer_is_its_parents(moment: str) -> None:
    """Some web servers load the application before they fork their workers."""
    model = Model()
    with IdempotentProducer("t", "p", url="http://model", transport=model) as producer:
        if moment == "while it sends":
            producer.send({"n": 1}).result(20)
        told = [
            in_a_child(lambda: producer.send({"n": 2})),
            in_a_child(producer.flush),
        ]
        for line in told:
            assert line.startswith("Undelivered: is not stored: producer p was made before a fork")
        assert in_a_child(producer.close) == ""
        producer.send({"n": 3}).result(20)


def test_an_async_producer_tells_a_forked_child_too() -> None:
    producer = AsyncIdempotentProducer("t", "p", url="http://model", transport=Model())
    told = in_a_child(lambda: asyncio.run(producer.flush()))
    assert told.startswith("Undelivered: is not stored: producer p was made before a fork")


# -- reported results ----------------------------------------------------------------------------


def test_a_server_that_is_not_there_is_told_once_with_the_cause(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def down() -> httpx.Response:
        raise httpx.ConnectError("connection refused")

    model = Model()
    model.instead = down
    options: Any = {"url": "http://model", "transport": model, "pauses": FAST, "patience_ms": 200}
    caplog.set_level("WARNING", logger="topics_server.client")
    with (
        pytest.raises(Undelivered, match="connection refused"),
        IdempotentProducer("t", "p", **options) as producer,
    ):
        producer.send(1)
    told = [record.message for record in caplog.records]
    assert len(told) == 1
    assert "connection refused; trying again for 0.2 s (patience_ms)" in told[0]


def test_by_default_it_gives_up_within_half_a_minute() -> None:
    assert SendTerms().patience_ms == 30_000


@pytest.mark.parametrize("token", ["hush\nhush", "hüsh"])
def test_a_wrong_token_is_refused_when_the_producer_is_made(token: str) -> None:
    with pytest.raises(ValueError, match="of the token") as caught:
        IdempotentProducer("t", "p", token=token)
    assert token not in str(caught.value)
