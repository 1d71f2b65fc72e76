"""Notifiers: which readers are called, in which order, and what may happen meanwhile."""

from __future__ import annotations

from functools import partial

import pytest

from topics_server.engine.commit.notifier import Notifier


def test_a_listener_hears_of_its_topic_only() -> None:
    notifier, heard = Notifier(), list[str]()
    notifier.add(1, lambda: heard.append("one"))
    notifier.add(2, lambda: heard.append("two"))
    notifier.notify(1)
    notifier.notify(3)
    assert heard == ["one"]


def test_listeners_run_in_the_order_in_which_they_were_added() -> None:
    notifier, heard = Notifier(), list[int]()
    for number in range(5):
        notifier.add(1, partial(heard.append, number))
    notifier.notify(1)
    assert heard == [0, 1, 2, 3, 4]


def test_a_removed_listener_is_not_called_and_leaves_nothing_behind() -> None:
    notifier, heard = Notifier(), list[int]()

    def listener() -> None:
        heard.append(1)

    notifier.add(1, listener)
    notifier.add(1, listener)
    notifier.remove(1, listener)
    notifier.notify(1)
    assert heard == [1]
    notifier.remove(1, listener)
    assert notifier.listener_count == 0
    with pytest.raises(KeyError):
        notifier.remove(1, listener)


def test_a_listener_may_remove_itself_while_it_runs() -> None:
    notifier, heard = Notifier(), list[str]()

    def once() -> None:
        heard.append("once")
        notifier.remove(1, once)

    notifier.add(1, once)
    notifier.add(1, lambda: heard.append("always"))
    notifier.notify(1)
    notifier.notify(1)
    assert heard == ["once", "always", "always"]


def test_notify_all_reaches_every_topic() -> None:
    notifier, heard = Notifier(), list[int]()
    notifier.add(1, lambda: heard.append(1))
    notifier.add(2, lambda: heard.append(2))
    notifier.notify_all()
    assert heard == [1, 2]
