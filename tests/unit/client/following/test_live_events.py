"""The events of a live stream as values."""

from __future__ import annotations

import pytest

from topics_server.client.errors import BadAnswer
from topics_server.client.following.live_events import LivePosition


def test_topics_that_the_stream_leaves_out_are_told() -> None:
    place = LivePosition((), "orders.", None, None, {})
    event = place.take("error", '{"code":429,"error":"its maximum","topics":["orders.x"]}', "")
    assert event is not None
    assert (event.kind, event.data["topics"], event.records) == ("left-out", ["orders.x"], ())


def test_other_errors_are_no_events() -> None:
    place = LivePosition("a", None, None, None, {})
    for payload in ('{"code":410,"error":"gone"}', '{"code":429,"error":"slow down"}'):
        assert place.take("error", payload, "") is None


def test_an_id_alone_moves_the_position() -> None:
    place = LivePosition("a", None, None, None, {})
    assert place.take("message", "", "abc") is None
    assert place.headers() == {"Last-Event-ID": "abc"}


def test_an_event_that_is_not_json_is_a_bad_answer() -> None:
    with pytest.raises(BadAnswer):
        LivePosition("a", None, None, None, {}).take("record", "<html>", "")
