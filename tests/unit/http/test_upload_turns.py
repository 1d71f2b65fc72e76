"""Turns of uploads: a few read at a time, one key after another, and none waits for ever."""

from __future__ import annotations

import asyncio

import pytest

from topics_server.http.upload_budget import UploadBudget
from topics_server.http.upload_turns import (
    ASKED_MAX,
    READING_MAX,
    READING_MS,
    REST_S,
    SHARE_BYTES,
    VAIN_REST_S,
    UploadTurns,
)

pytestmark = pytest.mark.anyio


class Clock:
    """The time of the loop, which only a test moves: no slow machine ends a turn or a rest."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    async def advance(self, seconds: float) -> None:
        """Move the time forward, and run the due timers and the callbacks that they schedule."""
        self.now_s += seconds
        for _ in range(4):
            await asyncio.sleep(0)


@pytest.fixture(autouse=True)
async def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: found.now_s)
    return found


class Reader:
    """A connection that notes whether it is being read."""

    def __init__(self, key: object = None) -> None:
        self.upload_key = key
        self.reads = True
        self.turns = 0
        # Bytes that the client has sent; None: it sends no more.
        self.sent: int | None = 0
        self.asked = self.taken = 0

    def read_share(self, count: int) -> bool | None:
        self.asked += 1
        if self.sent is None:
            return None
        share = min(count, self.sent)
        self.sent -= share
        self.taken += share
        return share > 0

    def begin_turn(self) -> None:
        self.reads = True
        self.turns += 1

    def end_turn(self) -> None:
        self.reads = False


async def test_a_few_read_and_the_others_wait() -> None:
    turns, readers = UploadTurns(), [Reader() for _ in range(10)]
    for reader in readers:
        turns.wait(reader)
    assert not any(reader.reads for reader in readers)
    await asyncio.sleep(0)
    assert [reader.reads for reader in readers] == [True] * READING_MAX + [False] * (
        10 - READING_MAX
    )
    assert len(turns) == 10 - READING_MAX


async def test_whoever_brought_much_goes_to_the_end_of_the_line() -> None:
    turns, readers = UploadTurns(), [Reader() for _ in range(READING_MAX + 1)]
    for reader in readers:
        turns.wait(reader)
    await asyncio.sleep(0)
    turns.wait(readers[0])
    assert not readers[0].reads
    await asyncio.sleep(0)
    assert readers[-1].reads
    assert not readers[0].reads


async def test_uploads_that_stall_hold_nobody_up(clock: Clock) -> None:
    turns, readers = UploadTurns(), [Reader() for _ in range(20)]
    for reader in readers:
        turns.wait(reader)
    for _ in range(20 // READING_MAX):
        await clock.advance(READING_MS / 1000)
    assert all(reader.turns for reader in readers)
    assert sum(reader.reads for reader in readers) <= READING_MAX
    for reader in readers:
        turns.leave(reader)
    assert len(turns) == 0


async def test_the_uploads_of_one_key_do_not_keep_others_waiting() -> None:
    turns = UploadTurns()
    greedy = [Reader("greedy") for _ in range(200)]
    for reader in greedy:
        turns.wait(reader)
    modest = Reader("modest")
    turns.wait(modest)
    served = 0
    for _ in range(20):
        await asyncio.sleep(0)
        if modest.reads:
            served += 1
            turns.wait(modest)
        for reader in [reader for reader in greedy if reader.reads]:
            turns.wait(reader)
    assert served >= 8


async def test_whoever_leaves_reads_and_makes_room() -> None:
    turns, readers = UploadTurns(), [Reader() for _ in range(READING_MAX + 2)]
    for reader in readers:
        turns.wait(reader)
    await asyncio.sleep(0)
    turns.leave(readers[-1])
    assert readers[-1].reads
    turns.leave(readers[0])
    await asyncio.sleep(0)
    assert readers[READING_MAX].reads
    turns.leave(readers[0])
    assert len(turns) == 0


class Uploading(Reader):
    """A connection that no budget refuses here."""

    def refuse_upload(self, error: Exception) -> None:
        raise AssertionError(error)


def greedy_ones(count: int, budget: UploadBudget, turns: UploadTurns) -> list[Uploading]:
    """Waiting connections of a greedy key."""
    greedy = [Uploading("greedy") for _ in range(count)]
    for reader in greedy:
        budget.set_bytes(budget.begin(reader, "greedy"), budget.max_bytes // count)
        turns.wait(reader)
    assert budget.is_greedy("greedy")
    assert not budget.is_greedy("modest")
    return greedy


async def test_a_greedy_key_gets_one_share_at_a_time_and_rests_behind_it(clock: Clock) -> None:
    budget = UploadBudget(max_bytes=1000)
    turns = UploadTurns(budget)
    greedy = greedy_ones(5, budget, turns)
    for reader in greedy:
        reader.sent = 10 * SHARE_BYTES
    await asyncio.sleep(0)
    assert sum(reader.taken for reader in greedy) == SHARE_BYTES
    modest = Uploading("modest")
    turns.wait(modest)
    await asyncio.sleep(0)
    assert modest.reads, "a modest key does not wait for the rest of a greedy one"
    for shares in range(2, 11):
        await clock.advance(REST_S)
        assert sum(reader.taken for reader in greedy) <= shares * SHARE_BYTES
        assert not any(reader.reads for reader in greedy), "none reads by itself"
    assert all(reader.taken for reader in greedy), "the rests end, and each has its share"


async def test_stalled_uploads_of_a_greedy_key_are_asked_now_and_then(clock: Clock) -> None:
    budget = UploadBudget(max_bytes=1000)
    turns = UploadTurns(budget)
    greedy = greedy_ones(200, budget, turns)
    await asyncio.sleep(0)
    for rests in range(1, 26):
        assert sum(reader.asked for reader in greedy) == rests * ASKED_MAX
        await clock.advance(VAIN_REST_S)
    assert {reader.asked for reader in greedy} <= {1, 2}
    assert not any(reader.turns for reader in greedy), "none was told to read"
    # A connection that continues is found after those before it in the queue.
    greedy[0].sent = SHARE_BYTES
    for _ in range(200 // ASKED_MAX + 1):
        await clock.advance(VAIN_REST_S)
    assert greedy[0].taken == SHARE_BYTES


async def test_who_ends_within_its_share_reads_freely(clock: Clock) -> None:
    budget = UploadBudget(max_bytes=1000)
    turns = UploadTurns(budget)
    whole, gone, last = greedy_ones(3, budget, turns)
    last.sent = SHARE_BYTES

    def read_share(count: int) -> bool:
        turns.wait(whole)
        turns.leave(whole)
        return True

    whole.read_share = read_share  # type: ignore[method-assign]
    gone.sent = None
    await asyncio.sleep(0)
    assert whole.reads
    await clock.advance(REST_S)
    assert gone.reads, "it finds by itself that there is nothing more"
    assert last.taken == SHARE_BYTES
    assert len(turns) == 1
    turns.leave(last)
    assert last.reads
    assert len(turns) == 0


async def test_the_line_of_a_key_that_is_no_longer_greedy_reads_by_itself(clock: Clock) -> None:
    budget = UploadBudget(max_bytes=1000)
    turns = UploadTurns(budget)
    greedy = [Uploading("greedy") for _ in range(2)]
    uploads = [budget.begin(reader, "greedy") for reader in greedy]
    for reader, upload in zip(greedy, uploads, strict=True):
        budget.set_bytes(upload, 400)
        turns.wait(reader)
    await asyncio.sleep(0)
    assert not any(reader.reads for reader in greedy)
    budget.end(uploads[0])
    await clock.advance(VAIN_REST_S)
    assert all(reader.reads for reader in greedy)


async def test_no_key_is_greedy_while_half_of_the_budget_is_free() -> None:
    budget = UploadBudget(max_bytes=1000)
    upload = budget.begin(Uploading("only"), "only")
    budget.set_bytes(upload, 500)
    assert not budget.is_greedy("only")
    budget.set_bytes(upload, 501)
    assert budget.is_greedy("only")
    unlimited = UploadBudget()
    unlimited.set_bytes(unlimited.begin(Uploading(), None), 10**9)
    assert not unlimited.is_greedy(None)
