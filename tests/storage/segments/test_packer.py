"""The packing process makes the same bytes as the calling thread, leaves no orphan process and
loses no run.
"""

from __future__ import annotations

import io
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.storage.segments.segment_samples import sample_blocks
from topics_server.wal.segments.packing_process import (
    InlinePacker,
    ProcessPacker,
    keep_memory,
    serve,
)

BLOCKS = sample_blocks(1, 200)
DEAD = bytes(row % 7 == 0 for row in range(200))
EXPECTED = InlinePacker().pack(3, 4, BLOCKS, DEAD)


@pytest.fixture
def packer() -> Iterator[ProcessPacker]:
    packer = ProcessPacker()
    yield packer
    packer.close()


def wait_until_gone(pid: int) -> bool:
    """Whether a process that is not our child ends within some seconds."""
    for _ in range(200):
        status = Path(f"/proc/{pid}/stat")
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


def test_the_child_packs_the_same_bytes(packer: ProcessPacker) -> None:
    assert packer.pack(3, 4, BLOCKS, DEAD) == EXPECTED
    pid = packer.child_pid
    assert packer.pack(3, 4, BLOCKS, DEAD) == EXPECTED
    assert packer.child_pid == pid
    assert packer.packed_inline_count == 0


def test_a_child_that_was_killed_costs_no_run_and_is_replaced(packer: ProcessPacker) -> None:
    packer.pack(3, 4, BLOCKS, DEAD)
    pid = packer.child_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert packer.pack(3, 4, BLOCKS, DEAD) == EXPECTED
    assert packer.packed_inline_count == 1
    assert packer.pack(3, 4, BLOCKS, DEAD) == EXPECTED
    assert packer.packed_inline_count == 1
    assert packer.child_pid not in (None, pid)


def test_memory_is_kept_where_the_c_library_knows_how(monkeypatch: pytest.MonkeyPatch) -> None:
    asks = (
        "from topics_server.wal.segments.packing_process import keep_memory; print(keep_memory())"
    )
    told = subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == str(platform.libc_ver()[0] == "glibc")

    def none_such(name: object) -> object:
        raise OSError("no such library")

    monkeypatch.setattr("ctypes.CDLL", none_such)
    assert not keep_memory()


def test_a_child_that_cannot_start_is_done_without(
    packer: ProcessPacker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    assert packer.pack(3, 4, BLOCKS, DEAD) == EXPECTED
    assert packer.packed_inline_count == 1


def test_close_ends_the_child(packer: ProcessPacker) -> None:
    packer.pack(3, 4, BLOCKS, DEAD)
    pid = packer.child_pid
    assert pid is not None
    packer.close()
    packer.close()
    assert packer.child_pid is None
    assert wait_until_gone(pid)


def test_a_killed_server_leaves_no_child() -> None:
    """`kill -9` of the parent closes the pipe, and that ends the child."""
    script = (
        "from tests.storage.segments.test_packer import BLOCKS, DEAD\n"
        "from topics_server.wal.segments.packing_process import ProcessPacker\n"
        "packer = ProcessPacker()\n"
        "packer.pack(3, 4, BLOCKS, DEAD)\n"
        "import sys; sys.stdout.write(f'{packer.child_pid}\\n'); sys.stdout.flush()\n"
        "sys.stdin.read()\n"
    )
    server = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    )
    with server:
        assert server.stdout is not None
        pid = int(server.stdout.readline())
        server.kill()
    assert wait_until_gone(pid)


@pytest.mark.parametrize("length", [0, 5, 24, 30, 300])
def test_the_child_ends_without_an_answer_when_a_request_breaks_off(length: int) -> None:
    requests = io.BytesIO()
    responses = io.BytesIO()
    requests.write((3).to_bytes(8, "little") + (4).to_bytes(8, "little"))
    requests.write(len(DEAD).to_bytes(4, "little") + (1).to_bytes(4, "little"))
    requests.write(DEAD + (1000).to_bytes(4, "little") + bytes(200))
    serve(io.BytesIO(requests.getvalue()[:length]), responses)
    assert responses.getvalue() == b""


def test_the_child_loads_little() -> None:
    """The child starts in a fraction of a second and does not load the server."""
    script = "import sys, topics_server.wal.segments.packing_process; print(*sorted(sys.modules))"
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.split()
    heavy = {"starlette", "pydantic", "uvicorn", "asyncio", "httpx", "prometheus_client"}
    assert not heavy & set(found)
    assert not [name for name in found if name.startswith("topics_server.engine")]
