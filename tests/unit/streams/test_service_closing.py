"""Closed streams: they have all they will ever have."""

from __future__ import annotations

from tests.design7.bench import Bench
from topics_server.streams.values import CreateAsked


def test_a_power_loss_moves_nothing_behind_the_end_of_a_closed_stream() -> None:
    """Nothing was ever appended there: nobody is told of a loss, and the end stays the end."""
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
