"""Bells: who is told, in which order, and what may happen while they are told."""

from __future__ import annotations

from functools import partial

import pytest

from topics_server.engine.commit.notifier import Notifier


def test_a_bell_rings_for_its_topic_only() -> None:
    hub, rung = Notifier(), list[str]()
    hub.add(1, lambda: rung.append("one"))
    hub.add(2, lambda: rung.append("two"))
    hub.ring(1)
    hub.ring(3)
    assert rung == ["one"]


def test_bells_ring_in_the_order_in_which_they_came() -> None:
    hub, rung = Notifier(), list[int]()
    for number in range(5):
        hub.add(1, partial(rung.append, number))
    hub.ring(1)
    assert rung == [0, 1, 2, 3, 4]


def test_a_removed_bell_is_silent_and_leaves_nothing_behind() -> None:
    hub, rung = Notifier(), list[int]()

    def bell() -> None:
        rung.append(1)

    hub.add(1, bell)
    hub.add(1, bell)
    hub.remove(1, bell)
    hub.ring(1)
    assert rung == [1]
    hub.remove(1, bell)
    assert hub.bell_count == 0
    with pytest.raises(KeyError):
        hub.remove(1, bell)


def test_a_bell_may_remove_itself_while_it_rings() -> None:
    hub, rung = Notifier(), list[str]()

    def once() -> None:
        rung.append("once")
        hub.remove(1, once)

    hub.add(1, once)
    hub.add(1, lambda: rung.append("always"))
    hub.ring(1)
    hub.ring(1)
    assert rung == ["once", "always", "always"]


def test_ring_all_reaches_every_topic() -> None:
    hub, rung = Notifier(), list[int]()
    hub.add(1, lambda: rung.append(1))
    hub.add(2, lambda: rung.append(2))
    hub.ring_all()
    assert rung == [1, 2]
