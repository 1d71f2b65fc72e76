"""Epochs of dropped names in a snapshot."""

from __future__ import annotations

import msgspec
import pytest

from topics_server.engine.background.epochs import capture_epochs, restore_epochs
from topics_server.engine.topic.registry import Registry
from topics_server.values.model import TopicConfig


def test_the_next_topic_of_a_dropped_name_is_another_one_after_a_restart() -> None:
    before, after = Registry(), Registry()
    before.remember_epoch("t", 7)
    restore_epochs(after, capture_epochs(before))
    assert after.decide_create("t", TopicConfig(), 1)[0].epoch == 8
    assert after.decide_create("u", TopicConfig(), 1)[0].epoch == 1


def test_the_order_in_which_names_are_forgotten_survives() -> None:
    before, after = Registry(), Registry()
    for name in ("b", "a", "c"):
        before.remember_epoch(name, 1)
    restore_epochs(after, capture_epochs(before))
    assert list(after.dropped_epochs) == ["b", "a", "c"]


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (b"", "not captured epochs"),
        (b"\xc1", "not captured epochs"),
        (msgspec.msgpack.encode((2, {})), "floor is missing"),
        (msgspec.msgpack.encode((0, {})), "version 0"),
        (msgspec.msgpack.encode((3, {}, 0)), "version 3"),
        (msgspec.msgpack.encode((1, {"t": "x"})), "not captured epochs"),
    ],
)
def test_bytes_that_are_no_epochs_are_refused(part: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        restore_epochs(Registry(), part)


def test_a_part_of_version_1_has_no_floor_unless_it_may_have_forgotten_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    part = msgspec.msgpack.encode((1, {"a": 3, "b": 7}))
    whole = Registry()
    restore_epochs(whole, part)
    assert (whole.dropped_epochs, whole.epoch_floor) == ({"a": 3, "b": 7}, 0)
    monkeypatch.setattr("topics_server.engine.background.epochs.DROPPED_NAMES_MAX", 2)
    full = Registry()
    restore_epochs(full, part)
    assert full.decide_create("new", TopicConfig(), 1)[0].epoch == 8
