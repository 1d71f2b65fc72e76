"""Closed streams: their content is final."""

from __future__ import annotations

import pytest

from tests.design7.bench import Bench
from tests.storage.fake_disk import Mode
from topics_server.streams.values import BEGINNING, AppendAsked, CreateAsked
from topics_server.values.errors import Code, TopicsError
from topics_server.values.model import Durability, LossReason, ProducerStamp, TopicConfig


@pytest.mark.parametrize("body", [b"", b"all of it"])
def test_a_stream_is_made_closed_with_its_first_and_last_record(body: bytes) -> None:
    bench = Bench()
    try:
        run = bench.world.run
        asked = CreateAsked("text/plain", body=body, closes=True)
        made = run(bench.node.streams.create("s", asked))
        assert (made.is_new, made.view.is_closed) == (True, True)
        for _ in range(2):
            streams = bench.node.streams
            page = run(streams.read("s", BEGINNING, 99, explicit=False))
            assert (list(page.datas), page.is_closed) == ([body] if body else [], True)
            with pytest.raises(TopicsError) as raised:
                run(streams.append("s", b"more", AppendAsked("text/plain")))
            assert raised.value.code is Code.STREAM_CLOSED
            assert not run(streams.create("s", asked)).is_new
            bench.crash("power")
    finally:
        bench.world.abandon()


def test_a_power_loss_moves_nothing_behind_the_end_of_a_closed_stream() -> None:
    """No record was ever appended after the end, so readers get no loss, and the end stays."""
    bench = Bench()
    try:
        run = bench.world.run
        for path in ("open", "closed"):
            run(bench.node.streams.create(path, CreateAsked("text/plain", body=b"x")))
        end = run(bench.node.streams.close("closed", None)).tail
        bench.checkpoint()
        bench.crash("power")
        streams = bench.node.streams
        page = run(streams.read("closed", end, 99, explicit=True))
        assert (page.next, page.is_closed) == (end, True)
        assert bench.look("closed").gaps == []
        assert streams.head("open").tail.seq > 1, "there might have been records behind"
    finally:
        bench.world.abandon()


@pytest.mark.parametrize("producer", [None, ProducerStamp("p", 0, 0)])
@pytest.mark.parametrize("mode", ["kill", "power"])
def test_closing_an_ephemeral_stream_by_an_append_lasts_though_its_records_do_not(
    mode: Mode, producer: ProducerStamp | None
) -> None:
    bench = Bench()
    try:
        run = bench.world.run
        run(bench.node.streams.create("s", CreateAsked("text/plain")))
        config = TopicConfig(durability=Durability.EPHEMERAL)
        run(bench.node.store.put_topic("s", config, keep_type=True))
        run(bench.node.streams.append("s", b"1", AppendAsked("text/plain")))
        asked = AppendAsked("text/plain", producer=producer, closes=True)
        last = run(bench.node.streams.append("s", b"2", asked)).tail
        if mode == "power":
            bench.wait(1)
        bench.crash(mode)
        streams = bench.node.streams
        assert streams.head("s").is_closed
        assert streams.head("s").tail >= last
        with pytest.raises(TopicsError) as raised:
            run(streams.append("s", b"3", AppendAsked("text/plain")))
        assert raised.value.code is Code.STREAM_CLOSED
        seen = bench.look("s")
        assert not seen.records
        assert {gap.reason for gap in seen.gaps} == {LossReason.RESTART}
    finally:
        bench.world.abandon()
