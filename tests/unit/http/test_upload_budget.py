"""The budget of uploads: the key that holds the most loses its slowest upload, and no other key
does.
"""

from __future__ import annotations

import random

from topics_server.http.upload_budget import STEP_BYTES, Upload, UploadBudget
from topics_server.values.errors import Code, TopicsError

MIB = 2**20


class Receiver:
    """A connection that notes its refusal."""

    def __init__(self) -> None:
        self.errors: list[TopicsError] = []

    def refuse_upload(self, error: TopicsError) -> None:
        self.errors.append(error)


def begun(budget: UploadBudget, key: object, *sizes: int) -> tuple[Receiver, Upload]:
    """An upload that grew to each of these sizes."""
    receiver = Receiver()
    upload = budget.begin(receiver, key)
    for size in sizes:
        budget.set_bytes(upload, size)
    return receiver, upload


def test_what_is_held_is_counted_until_it_ends() -> None:
    budget = UploadBudget(100 * MIB)
    _, first = begun(budget, None, MIB, 3 * MIB)
    _, second = begun(budget, "key", 2 * MIB)
    assert budget.held_bytes == 5 * MIB
    budget.finish(first)
    assert budget.held_bytes == 5 * MIB, "it is not answered yet"
    for upload in (first, second, second):
        budget.end(upload)
    assert budget.held_bytes == 0
    assert not budget._shares


def test_the_slowest_of_the_key_that_holds_the_most_is_refused() -> None:
    budget = UploadBudget(10 * MIB)
    stalled, _ = begun(budget, "greedy", 3 * MIB)
    steady, upload = begun(budget, "greedy", 3 * MIB)
    other, _ = begun(budget, "other", 3 * MIB)
    budget.set_bytes(upload, 3 * MIB + STEP_BYTES)
    assert not stalled.errors
    late, _ = begun(budget, "other", MIB)
    assert [len(one.errors) for one in (stalled, steady, other, late)] == [1, 0, 0, 0]
    assert budget.held_bytes == 7 * MIB + STEP_BYTES
    assert budget.refused == 1
    (error,) = stalled.errors
    assert error.code is Code.THROTTLED
    assert error.detail == {"limit": "max_receiving_bytes", "max": 10 * MIB}


def test_an_upload_that_grows_may_be_the_one_that_is_refused() -> None:
    budget = UploadBudget(MIB)
    receiver, upload = begun(budget, None, MIB, MIB + 1)
    assert receiver.errors
    assert upload.is_ended
    assert budget.held_bytes == 0


def test_a_key_within_its_share_loses_nothing_however_slow_it_is() -> None:
    budget = UploadBudget(10 * MIB)
    slow, _ = begun(budget, "modest", MIB)
    greedy = [begun(budget, "greedy", MIB)[0] for _ in range(50)]
    assert not slow.errors
    assert sum(len(one.errors) for one in greedy) == 41


def test_small_uploads_are_refused_only_where_their_key_has_no_others() -> None:
    """Refusing ten thousand bodies of a few bytes would free almost no memory."""
    budget = UploadBudget(MIB)
    small = [begun(budget, None, 100)[0] for _ in range(100)]
    large, _ = begun(budget, None, MIB)
    assert large.errors
    assert not any(one.errors for one in small)
    budget = UploadBudget(1000)
    small = [begun(budget, None, 100)[0] for _ in range(20)]
    assert [len(one.errors) for one in small] == [1] * 10 + [0] * 10


def test_what_is_whole_is_not_refused() -> None:
    budget = UploadBudget(2 * MIB)
    whole, upload = begun(budget, None, 2 * MIB)
    budget.finish(upload)
    next_one, _ = begun(budget, None, MIB)
    assert not whole.errors
    assert next_one.errors
    budget.set_bytes(upload, 3 * MIB)
    assert not whole.errors
    assert budget.held_bytes == 3 * MIB


def test_without_a_bound_nothing_is_refused() -> None:
    budget = UploadBudget()
    assert not begun(budget, None, 10**12)[0].errors
    assert budget.held_bytes == 10**12


def test_counts_are_right_whatever_happens() -> None:
    chance = random.Random(3)
    budget = UploadBudget(100 * STEP_BYTES)
    live: dict[Upload, Receiver] = {}
    for _ in range(20_000):
        action = chance.randrange(6)
        if action == 0 or not live:
            receiver, upload = begun(budget, chance.randrange(4))
            live[upload] = receiver
        else:
            upload = chance.choice(list(live))
            if action < 4:
                budget.set_bytes(upload, upload.bytes + chance.randrange(2 * STEP_BYTES))
            elif action == 4:
                budget.finish(upload)
            else:
                budget.end(upload)
                del live[upload]
        for upload in [one for one, receiver in live.items() if receiver.errors]:
            assert upload.is_ended
            assert not upload.is_whole
            del live[upload]
        assert budget.held_bytes == sum(upload.bytes for upload in live)
        assert sum(share.count for share in budget._shares.values()) == len(live)
        if budget.held_bytes > budget.max_bytes:
            assert all(upload.is_whole or not upload.bytes for upload in live)
    assert budget.refused > 100
