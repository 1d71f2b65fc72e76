"""Must-show 9: a full or failing disk: clear errors, nothing lost, nothing half-visible.

On the disk in memory, each fault alone. On a real file system of 160 MiB (or, where mounting is not
allowed, under a file-size limit), a real server is filled and emptied through its API.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.contract.driver import Api, Server, eventually, good, refused
from tests.design7.bench import TOPIC, Bench
from tests.storage.fake_disk import Fault, Mode, Op
from topics_server.values.errors import Code, TopicsError
from topics_server.values.model import Durability

FAULTS: list[tuple[Op, Fault, int | None]] = [
    ("write", "eio", 1),
    ("write", "partial", 1),
    ("write", "enospc", 1),
    ("write", "enospc", None),
    ("open", "emfile", 3),
    ("open", "emfile", None),
    ("rename", "enospc", None),
]


@pytest.fixture
def bench() -> Iterator[Bench]:
    """A node that seals and takes checkpoints all the time."""
    made = Bench(segment_max_events=30, checkpoint_interval_ms=400)
    yield made
    made.world.abandon()


def _try_append(bench: Bench, count: int, name: str = TOPIC) -> TopicsError | None:
    try:
        bench.append(count, name=name)
    except TopicsError as error:
        return error
    return None


@pytest.mark.parametrize("mode", ["kill", "power"])
@pytest.mark.parametrize(("op", "fault", "times"), FAULTS)
@pytest.mark.parametrize("durability", [Durability.FSYNC, Durability.DISK])
def test_a_disk_that_refuses_loses_and_half_stores_nothing(
    bench: Bench, op: Op, fault: Fault, times: int | None, durability: Durability, mode: Mode
) -> None:
    bench.put(durability)
    bench.append(5)
    bench.world.disk.fail(op, fault, nth=2, times=times)
    stored = 5
    answers: list[Code] = []
    for _ in range(60):
        error = _try_append(bench, 25)
        if error is None:
            stored += 25
        else:
            answers.append(error.code)
            assert error.detail["limit"] == "disk"
            bench.wait(0.2)
        assert bench.seqs() == list(range(1, stored + 1))
    assert set(answers) <= {Code.THROTTLED}
    assert answers or (op, times) != ("write", None)
    bench.world.disk.heal()
    bench.wait(3)
    assert _try_append(bench, 25) is None
    stored += 25
    if durability is Durability.DISK and mode == "power":
        bench.wait(1)  # the background sync of the class
    bench.crash(mode)
    assert bench.seqs() == list(range(1, stored + 1))
    assert bench.append().first_seq == bench.look().head


@pytest.mark.parametrize("how", ["drop", "delete ranges"])
def test_a_full_disk_is_emptied_through_the_store_alone(how: str) -> None:
    bench = Bench(segment_max_events=30, checkpoint_interval_ms=400, min_free_bytes=30_000)
    bench.put()
    disk = bench.world.disk
    for _ in range(30):
        bench.append(20, name="big")
    bench.wait(2)
    disk.capacity_bytes = disk.used_bytes() + 80_000
    kept = refusals = 0
    for number in itertools.count():
        error = _try_append(bench, 20, TOPIC if number % 4 == 0 else "big")
        bench.wait(0.3)
        if error is None:
            kept += 20 * (number % 4 == 0)
            continue
        assert error.code is Code.THROTTLED
        assert error.detail["limit"] in ("disk", "min_free_bytes")
        refusals += 1
        if refusals > 20:
            break
    assert bench.seqs() == list(range(1, kept + 1))
    if how == "drop":
        bench.world.run(bench.store.drop_topic("big", if_empty=False))
    else:
        head = bench.look("big").head
        for before_seq in (head // 2, head + 1):
            bench.world.run(bench.store.delete("big", before_seq=before_seq, match=None))
    for _ in range(40):
        bench.wait(1)
        if _try_append(bench, 20) is None:
            break
    else:
        raise AssertionError(f"still full: {disk.used_bytes()} of {disk.capacity_bytes}")
    kept += 20
    bench.crash("power")
    assert bench.seqs() == list(range(1, kept + 1))
    bench.world.abandon()


# -- a real server ---------------------------------------------------------------------------


def _mount_small(folder: Path) -> bool:
    """Mount a file system of 160 MiB at `folder`, if this process may mount one."""
    libc = ctypes.CDLL(None, use_errno=True)
    return (
        os.geteuid() == 0
        and libc.mount(b"tmpfs", bytes(folder), b"tmpfs", 0, b"size=160m,mode=700") == 0
    )


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[tuple[Server, Callable[[], None]]]:
    """A started server with a small disk, or with a file-size limit where mounting is forbidden."""
    folder = tmp_path / "server"
    folder.mkdir()
    (folder / "data").mkdir()
    is_mounted = _mount_small(folder / "data")
    env = {
        "TOPICS_WAL_SHARDS": "1",
        "TOPICS_MIN_FREE_BYTES": str(4 << 20),
        "TOPICS_CHECKPOINT_INTERVAL_MS": "300",
        "TOPICS_SEGMENT_MAX_EVENTS": "20",
    }
    server = Server(folder, env)
    server.start()

    def limit() -> None:
        if not is_mounted:
            assert server.process is not None
            resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (4_200_000, -1))

    yield server, limit
    if server.process is not None:
        server.stop()
    if is_mounted:
        ctypes.CDLL(None).umount2(bytes(folder / "data"), 2)


def _fill(api: Api, topic: str) -> int:
    """Append until refused; return the number of accepted records."""
    payload = "x" * 100_000
    for count in range(4000):
        answer = api.append(topic, [{"data": payload}])
        if answer.status_code == 429:
            assert refused(answer, 429, "throttled")["limit"] in ("disk", "min_free_bytes")
            assert int(answer.headers["retry-after"]) >= 0
            return count
        good(answer)
    raise AssertionError("400 MB went into 160 MiB")


@pytest.mark.slow
def test_a_server_on_a_full_disk_is_emptied_through_its_api(
    small_disk: tuple[Server, Callable[[], None]],
) -> None:
    server, limit = small_disk
    api = server.api
    for number in range(30):
        api.add("kept", number)
    limit()
    taken = _fill(api, "big")
    assert taken >= 3
    assert len(api.read_all("kept")) == 30
    state = api.get_state("big")
    assert (state["count"], state["head_seq"]) == (taken, taken)
    good(api.delete("big", before_seq=taken // 2))
    good(api.drop("big"))
    if not os.path.ismount(server.data_dir):
        assert server.process is not None
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (-1, -1))

    def takes() -> bool:
        return api.append("kept", [{"data": 30}]).status_code == 200

    eventually(takes, "appends are taken again", within_s=30)
    assert good(api.append("kept", [{"data": "y" * 50_000}]))["first_seq"] == 32
    api = server.crash()
    records = api.read_all("kept")
    assert [r["data"] for r in records[:31]] == list(range(31))
    assert len(records) == 32
    assert api.state("big").status_code == 404
