"""`client.values`: a job's payload as it was sent, and waiting for the loss of a lease."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
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


# Makes new types, and lets two threads decode each of them for the first time at once.
FIRST_USES = """
import sys, threading, types, msgspec
from topics_server.client.values import Job

sys.setswitchinterval(1e-6)
SOURCE = "import msgspec\\nclass Part(msgspec.Struct):\\n    a: int\\n    b: str | None\\n" \\
    "class Whole(msgspec.Struct):\\n    parts: list[Part]\\n    c: int = 0\\n"
JOB = Job(queue="q", seq=1, lease_id="l", deadline_ms=1, ts_ms=1, deliveries=1,
          raw=b'{"parts": [{"a": 1, "b": "x"}], "c": 2}')
meet = threading.Barrier(3)
kinds = []

def decode():
    while meet.wait() is not None and kinds[-1] is not None:
        assert JOB.data_as(kinds[-1]).parts[0].a == 1
        meet.wait()

threads = [threading.Thread(target=decode) for _ in range(2)]
for thread in threads:
    thread.start()
for number in range(300):
    module = types.ModuleType(f"made{number}")
    sys.modules[module.__name__] = module
    exec("from __future__ import annotations\\n" + SOURCE, module.__dict__)
    kinds.append(module.Whole)
    meet.wait()
    meet.wait()
kinds.append(None)
meet.wait()
"""


def test_two_threads_decode_a_new_type_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", FIRST_USES], capture_output=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, b"")


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
