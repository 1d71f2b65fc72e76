"""Watch sessions of a whole node over restarts: clean ones, kills, power cuts, long downtimes."""

from __future__ import annotations

import asyncio

import pytest

from tests.model.world import World
from topics_server.engine.subscribe.cursors import Cursor
from topics_server.engine.subscribe.sessions import WatchSession
from topics_server.values.entries import SessionOptions
from topics_server.wal.tools.dump import verify

OPTIONS = SessionOptions([], 256, 262_144, 15_000, 6, False)
TTL_MS = 60_000


@pytest.fixture
def world() -> World:
    made = World(7, session_ttl_ms=TTL_MS)
    made.start()
    return made


def opened(world: World, seq: int = 0) -> WatchSession:
    assert world.node is not None
    return world.run(world.node.sessions.open(OPTIONS, [Cursor("t", 1, 1, seq)]))


def found(world: World, wid: str) -> WatchSession | None:
    assert world.node is not None
    return world.node.sessions.find(wid)


def restart(world: World, how: str) -> None:
    """Start another process after `clean`, `kill` or `power`."""
    if how == "clean":
        world.stop()
    else:
        world.crash("kill" if how == "kill" else "power")
    world.start()


@pytest.mark.parametrize("how", ["clean", "kill"])
def test_an_answered_session_is_there_after_a_restart(world: World, how: str) -> None:
    session = opened(world, 4)
    restart(world, how)
    again = found(world, session.wid)
    assert again is not None
    assert again is not session
    assert (again.options, again.positions()) == (OPTIONS, session.positions())
    assert again.is_restored
    world.abandon()


@pytest.mark.parametrize("how", ["clean", "kill", "power"])
def test_a_streams_position_of_the_last_checkpoint_survives_everything(
    world: World, how: str
) -> None:
    session = opened(world)
    node = world.node
    assert node is not None
    node.sessions.begin(session)
    session.cursors["t"].seq = 7
    world.run(node.checkpointer.take())
    session.cursors["t"].seq = 9
    restart(world, how)
    again = found(world, session.wid)
    assert again is not None
    assert again.cursors["t"].seq == (9 if how == "clean" else 7)
    # The server restarts twice: it must publish the recovered state before it uses it.
    restart(world, "power")
    again = found(world, session.wid)
    assert again is not None
    assert again.cursors["t"].seq == (9 if how == "clean" else 7)
    world.abandon()


@pytest.mark.parametrize("how", ["clean", "kill"])
def test_downtime_counts_for_disconnected_sessions_and_not_for_connected_ones(
    world: World, how: str
) -> None:
    away, connected = opened(world), opened(world)
    node = world.node
    assert node is not None
    node.sessions.begin(connected)
    # No caller waits for this entry; it is written within the turn.
    world.run(asyncio.sleep(0.01))
    if how == "clean":
        # Streams end, here as in a server, after the drain has begun.
        node.begin_drain()
        node.sessions.end(connected)
        world.run(node.close())
        world._end()
    else:
        world.crash("kill")
    world.clock.step(10 * TTL_MS)
    world.start()
    assert found(world, away.wid) is None
    again = found(world, connected.wid)
    assert again is not None
    assert not again.is_streaming
    world.clock.step(TTL_MS)
    assert found(world, connected.wid) is None
    world.abandon()


def test_a_directory_with_sessions_verifies_clean_and_serves_other_shard_counts() -> None:
    world = World(8, wal_shards=3, session_ttl_ms=TTL_MS)
    world.start()
    sessions = [opened(world, seq) for seq in range(3)]
    world.crash("kill")
    for shards in (1, 2):
        world.changes["wal_shards"] = shards
        world.start()
        assert all(found(world, session.wid) for session in sessions)
        sessions.append(opened(world))
        world.crash("kill")
    report = verify(world.disk, "data")
    assert report.problems == []
    assert report.counts["watch_sessions"] == 4, "the last one is in the journal"
