"""Defects of views that random runs found, or reach only rarely, as small tests of their own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.model.views.view_disk import SimulatedApplier, SimulatedQuerier, ViewDisk
from tests.model.views.viewed import ViewedSimulation, definition_of
from tests.model.world import World
from tests.storage.fake_disk import Mode
from topics_server.node.boot import Boot
from topics_server.node.node import Node
from topics_server.values.appends import decode_append
from topics_server.values.model import Durability, OnDelete, TagMatch, TopicConfig


class Bench:
    """A sequence of nodes with the topic `t` and its view `v`, whose rows are all its records."""

    def __init__(self, root: Path) -> None:
        self.disk = disk = ViewDisk(random.Random(1), root)
        # A power cut keeps the files of views as they are, and the log up to its last sync.
        disk.lose_power = disk.kill  # type: ignore[method-assign]

        class BenchBoot(Boot):
            async def start(self) -> Node:
                self.ground.views_dir = disk.root
                self.ground.view_process = applier = SimulatedApplier(disk)
                self.ground.view_queries = SimulatedQuerier(disk)
                applier.may_die = False
                return await super().start()

        self.world = World(1, wal_fsync_interval_ms=600_000)
        self.world.boot_type = BenchBoot
        self.world.start()

    @property
    def node(self) -> Node:
        """The running node."""
        assert self.world.node is not None
        return self.world.node

    def put(self, durability: Durability, **changes: Any) -> None:
        """Create or configure the topic."""
        config = TopicConfig(durability=durability, **changes)
        self.world.run(self.node.store.put_topic("t", config, keep_type=False))

    def view(self, on_delete: OnDelete = OnDelete.KEEP) -> None:
        """Define the view, and wait until it has caught up."""
        self.world.run(self.node.views.put("t", "v", definition_of("audit", on_delete)))
        self.settle()

    def append(self, *numbers: int, tag: str = "a") -> int:
        """Append records; the last seq."""
        records = [{"data": {"n": n, "k": f"k{n}"}, "tag": tag} for n in numbers]
        body = json.dumps({"records": records}).encode()
        store = self.node.store
        call = store.append("t", body, decode_append(body), header_key=None, config=None)
        return int(self.world.run(call).last_seq)

    def delete(self) -> None:
        """Delete all records of tag a."""
        self.world.run(self.node.store.delete("t", before_seq=None, match=TagMatch("a")))

    def settle(self, seconds: float = 3.0) -> None:
        """Wait until the view has no work left."""
        self.world.run(asyncio.sleep(seconds))

    def crash(self, mode: Mode) -> None:
        """Die and start again."""
        self.world.crash(mode)
        self.disk.kill()
        self.world.start()

    def rows(self, after: int | None = None) -> list[int]:
        """The numbers of the records in the view."""
        sql = "SELECT n FROM audit ORDER BY seq"
        call = self.node.views.query("t", "v", sql, {}, after=after)
        return [row[0] for row in json.loads(self.world.run(call).rows)]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """A bench in a folder of its own."""
    found = Bench(tmp_path)
    try:
        yield found
    finally:
        found.world.abandon()
        found.disk.kill()


def test_after_passes_records_that_were_deleted_before_the_view_saw_them(bench: Bench) -> None:
    """Guard: build.py, `_advance`: a wait for news must not swallow that the cursor moved."""
    bench.put(Durability.MEMORY)
    bench.view()

    async def append_and_delete() -> None:
        body = b'{"records":[{"data":{"n":1,"k":"k"},"tag":"a"}]}'
        store = bench.node.store
        await store.append("t", body, decode_append(body), header_key=None, config=None)
        await store.delete("t", before_seq=None, match=TagMatch("a"))

    for _ in range(20):
        bench.world.run(append_and_delete())
    began = bench.world.clock.monotonic_ms()
    bench.rows(after=20)
    assert bench.world.clock.monotonic_ms() - began < 1000


def test_a_delete_that_a_power_cut_undid_is_undone_in_the_view(bench: Bench) -> None:
    """Guard: judge.py, `is_ahead` compares the log's last entry, not only heads and holes."""
    bench.put(Durability.FSYNC)
    bench.append(1, 2, 3)
    bench.put(Durability.MEMORY)
    bench.delete()
    bench.view()
    assert bench.rows() == []
    bench.crash("power")
    bench.settle()
    read = bench.node.store.state("t", touch=False).count
    assert len(bench.rows()) == read


def test_a_hole_that_is_evicted_at_once_hides_no_file_that_is_ahead(bench: Bench) -> None:
    """Guard: judge.py, the files are judged by the log as recovery left it, and at once."""
    bench.put(Durability.MEMORY, cap_records=3)
    bench.view()
    bench.append(1, 2)
    bench.settle()
    assert bench.rows() == [1, 2]
    bench.crash("power")
    # This happens before the view's files are opened again, and evicts the hole.
    last = bench.append(11, 12, 13, 14, 15)
    assert [n for n in bench.rows(after=last) if n < 10] == []


@pytest.mark.parametrize("how", ["clean", "kill"])
def test_a_delete_right_before_a_stop_is_not_forgotten(bench: Bench, how: str) -> None:
    """Guard: view.py, `_is_stale`: the rebuild waits a second, and the stop comes first."""
    bench.put(Durability.FSYNC)
    bench.view(OnDelete.REBUILD)
    bench.append(1, 2)
    bench.append(3, tag="b")
    bench.settle()
    bench.delete()
    assert bench.rows() == [1, 2, 3]
    if how == "kill":
        bench.crash("kill")
    else:
        bench.world.stop()
        bench.world.start()
    bench.settle()
    assert bench.rows() == [3]


def test_a_view_whose_files_are_being_opened_takes_changes(bench: Bench) -> None:
    """`start` applies every change itself; no files are made beside those that it opens."""
    bench.put(Durability.FSYNC)
    bench.view()
    bench.append(1, 2)
    bench.settle()
    bench.world.stop()
    bench.world.start()
    views = bench.node.views
    bench.world.run(views.put("t", "v", definition_of("strict", OnDelete.KEEP)))
    bench.settle()
    sql = "SELECT n FROM t ORDER BY seq"
    assert json.loads(bench.world.run(views.query("t", "v", sql, {})).rows) == [[1], [2]]
    assert len(list(bench.disk.root.glob("*/*.db"))) == 1


def test_a_build_that_goes_on_after_a_start_ends_when_its_definition_changes(bench: Bench) -> None:
    """Guard: view.py, `_begin_missing`: the change came while the file was opened."""
    bench.put(Durability.FSYNC)
    bench.view()
    bench.append(1, 2)
    bench.settle()
    bench.world.stop()
    [path] = bench.disk.root.glob("*/*.db")
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE _topics_view SET is_ready = 0")
    bench.world.start()
    [view] = bench.node.views._views.values()
    assert not view.is_started
    resume = view._resume

    def resume_and_change(*found: Any) -> Any:
        build = resume(*found)
        view.change(definition_of("strict", OnDelete.KEEP))
        return build

    view._resume = resume_and_change  # type: ignore[assignment]
    bench.settle()
    sql = "SELECT n FROM t ORDER BY seq"
    rows = bench.world.run(bench.node.views.query("t", "v", sql, {})).rows
    assert json.loads(rows) == [[1], [2]]


def test_a_view_leaves_the_last_of_a_full_disk_alone(bench: Bench) -> None:
    """Guard: build.py, `_advance`: below the floor of free space a view waits, and says so."""
    bench.put(Durability.FSYNC)
    bench.view()
    bench.append(1)
    bench.settle()

    async def append_then_low() -> None:
        body = b'{"records":[{"data":{"n":2,"k":"k"},"tag":"a"}]}'
        store = bench.node.store
        adding = store.append("t", body, decode_append(body), header_key=None, config=None)
        task = asyncio.ensure_future(adding)
        await asyncio.sleep(0)
        store.is_disk_low = True
        await task

    bench.world.run(append_then_low())
    # The next check of the disk would find room; this test makes no further check.
    store = bench.node.store
    store.is_disk_low = True
    bench.settle(0.5)
    state = bench.node.views.get("t", "v")
    assert (state.processed_seq, state.status) == (1, "failed")
    assert state.failure is not None
    assert state.failure.message == "the disk is nearly full"
    store.is_disk_low = False
    bench.settle()
    assert bench.rows() == [1, 2]
    assert bench.node.views.get("t", "v").status == "ready"


def test_a_build_may_end_while_a_record_of_it_is_skipped() -> None:
    """The process died during the skip, and a changed definition ended the build, so there is
    nothing to skip.
    """
    ViewedSimulation(609).run()
