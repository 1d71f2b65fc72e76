"""`client.values`: a job's payload as it was sent, and waiting for the loss of a lease."""

from __future__ import annotations

import asyncio
import math
import threading
from typing import Any

import msgspec
import pytest

from topics_server.client.values import Job, Lost


def job(raw: bytes, raw_meta: bytes | None = None) -> Job:
    """A delivery with this payload."""
    return Job(
        queue="q",
        seq=1,
        lease_id="l",
        deadline_ms=0,
        ts_ms=0,
        deliveries=1,
        raw=raw,
        raw_meta=raw_meta,
    )


@pytest.mark.parametrize(
    ("raw", "data"),
    [(b"null", None), (b'{"a": [1, "x"]}', {"a": [1, "x"]}), (b"[1e400]", [math.inf])],
)
def test_data(raw: bytes, data: Any) -> None:
    assert job(raw).data == data
    assert job(raw).raw == raw


def test_meta_is_an_object() -> None:
    assert job(b"1").meta == {}
    assert job(b"1", b'{"trace": "z9"}').meta == {"trace": "z9"}


class Resize(msgspec.Struct):
    width: int


def test_data_as_a_type() -> None:
    assert job(b'{"width": 3}').data_as(Resize) == Resize(3)
    with pytest.raises(msgspec.ValidationError):
        job(b'{"width": "x"}').data_as(Resize)


def test_a_loss_wakes_threads_and_coroutines() -> None:
    lost = Lost()

    async def waits() -> None:
        waiting = [asyncio.create_task(lost.wait_async()) for _ in range(2)]
        given_up = asyncio.create_task(lost.wait_async())
        await asyncio.sleep(0)
        given_up.cancel()
        threading.Timer(0.005, lost.set).start()
        async with asyncio.timeout(10):
            await asyncio.gather(*waiting)
            await lost.wait_async()  # set before: at once

    asyncio.run(waits())
    assert lost.wait(0)
