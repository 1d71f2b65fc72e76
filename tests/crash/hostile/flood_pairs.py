"""The throughput of a flood and the service of honest clients beside it: two builds in turn, as a
table.

One cell is the run of `test_starvation`: closed-loop connections append to one topic, twenty
clients append to topics of every priority. Each round measures every cell with both builds, one
right after the other, and the next round in the opposite order, so that other load on the machine
affects both. The ratio is the median of the ratios of the rounds.

    python -m tests.crash.hostile.flood_pairs --base PATH_OF_ANOTHER_TREE --rounds 5

The other tree has its own `.venv`. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.contract.driver import Server, good
from tests.crash.hostile.flood import Flood, HonestClients, append_request
from tests.crash.hostile.test_hostile_clients import port_of

# Priority of the flood's topic, and records of each of its appends.
FLOODS: Final = ((500, 1), (1000, 100))
# Priority of the honest topics; None means derived from their reads, so 0 without reads.
PRIORITIES: Final = (None, *range(-1000, 1001, 125), None, 0)
WARM_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Cell:
    """The result of one build: appends of the flood a second, and of the honest clients in ms."""

    rate: float
    honest_rate: float
    flood_refused: int
    p50_ms: float
    longest_ms: float
    tries: int
    starved: int


def measured(tree: Path, connections: int, flood: tuple[int, int], count: int) -> Cell:
    """Measure one cell with the build in a tree; `count`: appends of each honest client."""
    priority, records = flood
    command = (str(tree / ".venv/bin/python"), "-m", "topics_server", "serve")
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), {"PYTHONPATH": str(tree / "src")}, command=command)
        server.start()
        try:
            # Bound the retained records, so that a long flood does not grow the tail.
            good(server.api.put("flood", {"priority": priority, "cap_records": 50_000}))
            topics = [f"honest-{number}" for number in range(len(PRIORITIES))]
            for name, own in zip(topics, PRIORITIES, strict=True):
                good(server.api.put(name, {"priority": own}))
            honest = HonestClients(port_of(server), topics, count)
            with Flood(port_of(server), connections, append_request("flood", records)) as running:
                time.sleep(WARM_S)
                taken, began = running.taken, time.monotonic()
                honest.run()
                took_s = time.monotonic() - began
                rate = (running.taken - taken) / took_s
                refused = running.refused
        finally:
            assert server.process is not None
            server.process.kill()
            server.process.wait()
    seconds = sorted(one.seconds for one in honest.served) or [0.0]
    return Cell(
        rate,
        len(honest.served) / took_s,
        refused,
        statistics.median(seconds) * 1000,
        seconds[-1] * 1000,
        max((one.tries for one in honest.served), default=0),
        len(honest.starved),
    )


def _whole(cell: Cell) -> float:
    """Appends a second of flood and honest clients together; without honest clients the flood had
    them all.
    """
    return cell.rate + cell.honest_rate


def main(arguments: Sequence[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--connections", default="64,256,600")
    parser.add_argument("--appends", type=int, default=60)
    asked = parser.parse_args(arguments)
    trees = {"base": asked.base.resolve(), "this": Path(__file__).resolve().parents[3]}
    found: dict[tuple[int, tuple[int, int]], list[dict[str, Cell]]] = {}
    for number in range(asked.rounds):
        for connections in map(int, asked.connections.split(",")):
            for flood in FLOODS:
                order = ("base", "this") if number % 2 == 0 else ("this", "base")
                pair = {
                    name: measured(trees[name], connections, flood, asked.appends) for name in order
                }
                found.setdefault((connections, flood), []).append(pair)
                print(f"round {number + 1}, {connections}, {flood}: {pair}", file=sys.stderr)
    print(
        "| connections | records | build | flood/s (ratio: median, of each round) "
        "| honest/s | ratio of both | flood refused "
        "| honest p50 ms | longest ms | tries | given up |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|"
    )
    for (connections, (_, records)), pairs in found.items():
        both = [_whole(pair["this"]) / max(1e-9, _whole(pair["base"])) for pair in pairs]
        ratios = [pair["this"].rate / max(1e-9, pair["base"].rate) for pair in pairs]
        for name in trees:
            cells = [pair[name] for pair in pairs]
            rate = f"{statistics.median(cell.rate for cell in cells):.0f}"
            if name == "this":
                each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
                rate += f" ({statistics.median(ratios):.2f}: {each})"
            print(
                f"| {connections} | {records} | {name} | {rate} "
                f"| {statistics.median(cell.honest_rate for cell in cells):.0f} "
                f"| {statistics.median(both) if name == 'this' else 1:.2f} "
                f"| {sum(cell.flood_refused for cell in cells)} "
                f"| {statistics.median(cell.p50_ms for cell in cells):.1f} "
                f"| {max(cell.longest_ms for cell in cells):.0f} "
                f"| {max(cell.tries for cell in cells)} "
                f"| {sum(cell.starved for cell in cells)} |"
            )


if __name__ == "__main__":
    main(sys.argv[1:])
