"""`client.front.plans`: options that contradict each other, and a stream that continues after a
read.
"""

from __future__ import annotations

import pytest

from topics_server.client.front.plans import LiveOptions, LivePlan, ReadOptions, ReadPlan

URL = "http://h"
READ = '{"topic":"t","seq":7,"epoch":1}'


@pytest.mark.parametrize(
    "options",
    [
        ReadOptions(consumer="c", from_seq=3),
        ReadOptions(consumer="c", last=1),
        ReadOptions(consumer="c", cursor=READ),
        ReadOptions(save_every_ms=-1),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: ReadOptions) -> None:
    with pytest.raises(ValueError, match=r"two starts|save_every_ms"):
        ReadPlan.of("t", URL, options)


@pytest.mark.parametrize(
    ("topics", "options"),
    [
        (["a", "b"], LiveOptions(consumer="c")),
        ("a", LiveOptions(consumer="c", prefix="b")),
        ((), LiveOptions(consumer="c")),
    ],
)
def test_a_consumer_is_of_one_topic(topics: list[str], options: LiveOptions) -> None:
    with pytest.raises(ValueError, match="one topic"):
        LivePlan.of(topics, 1, options)


def test_a_stream_goes_on_behind_a_read() -> None:
    plan = LivePlan.of("t", 1, LiveOptions(last=3, tag="x", patience_ms=9))
    assert plan.patience_ms == 9
    reader, topic = plan.begin(READ)
    assert (topic, reader.cursor) == ("t", None)
    assert plan.behind_read(reader, 1) == ([], {"tag": "x", "from_seq": 7})
    [gap], query = plan.behind_read(reader, 2)
    assert (gap.reason, query) == ("recreated", {"tag": "x", "from_seq": 0})
    reader, topic = plan.begin('{"id":"abc"}')
    assert (topic, reader.cursor) == (None, "abc")


def test_the_cursor_of_a_read_of_another_topic_is_refused() -> None:
    for plan in (LivePlan.of("other", 1, {}), LivePlan.of("t", 1, {"prefix": "x"})):
        with pytest.raises(ValueError, match="a read of t"):
            plan.begin(READ)
    with pytest.raises(ValueError, match="a read of other"):
        ReadPlan.of("other", URL, {}).reader(READ)
