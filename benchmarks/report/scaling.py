"""Cost per unit over size: the axes of the case `scaling`, its figures, and their page. Pure.

A curve is one kind of request at the sizes of an axis. Its figure is judged by its rise: the CPU
time of a unit at the largest size over the least at a smaller one. The page and the chart
(`scaling_chart`) show the lower quartile of the rounds (of rates the upper one), because other work
on the machine only adds to a round. They find their series by the labels of this module.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.report.figures import Bar, Figure, Report, Series, ratios, spelled

CASE: Final = "scaling"
RISE_LIMIT: Final = 1.5
MEGABYTE: Final = 1e6
REQUEST: Final = "request"


@dataclass(frozen=True, slots=True)
class Curve:
    """One kind of request; its `name` within its axis."""

    name: str
    unit: str = REQUEST  # of the judged cost
    is_floor: bool = False  # a server that does nothing else, which explains the others; no bar


@dataclass(frozen=True, slots=True)
class Axis:
    """What grows, in which sizes, and what is measured at each."""

    name: str
    sizes: tuple[int, ...]
    quick: tuple[int, ...]
    curves: tuple[Curve, ...]
    p50: str  # what the latency is
    explains: str  # of the page: how the curves come about; has no measured number
    is_bytes: bool = False  # sizes are bytes of payload; the judged unit is a megabyte
    has_rate: bool = False

    def spelled(self, size: int) -> str:
        """A size in words."""
        if not self.is_bytes:
            return f"{size:,}"
        for unit, bytes_ in (("MiB", 1 << 20), ("KiB", 1 << 10)):
            if size >= bytes_:
                return f"{size // bytes_:,} {unit}"
        return f"{size} B"

    def figure_name(self, curve: Curve) -> str:
        """The name of a curve's figure."""
        return f"{self.name}: {curve.name}"


@dataclass(frozen=True, slots=True)
class Point:
    """The rounds of one size: CPU time of a unit in us, latency in ms, requests/s."""

    cpu_us: tuple[float, ...]
    p50_ms: tuple[float, ...]
    rate: tuple[float, ...] = ()


APPEND: Final = Curve("append")
READ: Final = Curve("read back")
LAST: Final = Curve("diff of the last 100")
ANYWHERE: Final = Curve("diff of 100 anywhere")
DELIVERED: Final = Curve("delivery", "message")
V0: Final = Curve("/v0 append")
V1: Final = Curve("/v1/stream append")
BARE: Final = Curve("bare server", is_floor=True)
SOCKETS: Final = Curve("sockets", is_floor=True)
PAYLOAD_APPEND: Final = Curve("append", "MB")
PAYLOAD_READ: Final = Curve("read back", "MB")
CLAIM: Final = Curve("claim and ack", "job")

TOPICS: Final = Axis(
    "topics",
    (1, 10, 100, 1_000, 10_000, 100_000),
    (1, 100, 1_000),
    (APPEND,),
    "p50 of an append",
    "The server answers a request without parsing its head if the head is one of the 16,384 that "
    "it knows (http/exchange/known_heads). A topic's name is part of the head, so with more topics "
    "than that most heads are parsed. The rest of the rise is probably that of the processor's "
    "caches.",
)
RECORDS: Final = Axis(
    "records in the topic",
    (1_000, 10_000, 100_000, 1_000_000, 10_000_000),
    (1_000, 20_000),
    (APPEND, LAST, ANYWHERE),
    "p50 of the request",
    "Records of a small topic are in memory. A page anywhere in a topic that is larger than the "
    "server's 48 MiB of blocks is read from its files, checked and decoded: on the loop if the "
    "system has it in memory, else by a thread. The server "
    "keeps the JSON of a block if a page takes half of it: the last 100 records are half of their "
    "block at some sizes, and are rendered again for each request at the others.",
)
WATCHERS: Final = Axis(
    "watchers of a topic",
    (1, 10, 100, 1_000, 10_000),
    (1, 50),
    (DELIVERED,),
    "p50 from the write to the last byte of the last watcher",
    "The cost of a write is divided by the number of watchers that get its record; from about 100 "
    "on, one write to a socket is nearly all of it.",
)
CONNECTIONS: Final = Axis(
    "connections",
    (1, 16, 64, 256, 1_000, 2_000),
    (1, 16, 64),
    (V0, V1, BARE, SOCKETS),
    "p50 of an append",
    "Every connection sends its next append after the answer to the last one. Many connections "
    "share the loop's turns and the writes to the journal. When the loop is late, appends wait for "
    "their turn, at most 250 ms (429). Two servers that do nothing else get the same requests and "
    "send the same answers. The bare server is uvicorn with an application of a few lines. "
    "Sockets is a loop that counts bytes and writes the answer, with no HTTP at all. What they "
    "pay more for many connections is the kernel's, and that of memory that has left the "
    "processor's caches when a connection has its turn again.",
    has_rate=True,
)
PAYLOAD: Final = Axis(
    "payload",
    (100, 1 << 10, 10 << 10, 100 << 10, 1 << 20),
    (100, 100 << 10),
    (PAYLOAD_APPEND, PAYLOAD_READ),
    "p50 of the request",
    "A small request has a fixed cost; from about 10 KiB on the bytes weigh. A body above 1 MiB, "
    "such as that of a record of 1 MiB, is decoded by a helper process, so that the loop goes on: "
    "its latency rises more than its cost. An answer of 1 MiB does not fit into the buffer of a "
    "socket: the server writes the rest as the client reads, three times in all.",
    is_bytes=True,
)
QUEUE: Final = Axis(
    "jobs in the queue",
    (10, 100, 1_000, 10_000, 100_000, 1_000_000),
    (10, 1_000, 10_000),
    (CLAIM,),
    "p50 of the claim and p50 of the ack together",
    "A short queue is in memory. From 65,536 jobs on the oldest are in sealed segments: an ack "
    "there also sets a flag in the segment's file, which the server syncs in the background.",
)
AXES: Final = (TOPICS, RECORDS, WATCHERS, CONNECTIONS, PAYLOAD, QUEUE)


def lower_quartile(values: Sequence[float]) -> float:
    """The lower quartile; of a single value, the value."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=4, method="inclusive")[0]


# -- figures --------------------------------------------------------------------------------------


def cpu_label(axis: Axis, size: int, unit: str) -> str:
    """The label of the cost at one size."""
    return f"{axis.spelled(size)}, CPU a {unit}"


def p50_label(axis: Axis, size: int) -> str:
    """The label of the latency at one size."""
    return f"{axis.spelled(size)}, p50"


def rate_label(axis: Axis, size: int) -> str:
    """The label of the rate at one size."""
    return f"{axis.spelled(size)}, rate"


def cost_of(axis: Axis, curve: Curve, size: int, cpu_us: float) -> float:
    """The CPU time of the judged unit, from that of a request."""
    return cpu_us / size * MEGABYTE if axis.is_bytes else cpu_us


def rise(costs: Mapping[int, Sequence[float]], unit: str) -> Series:
    """For each round, the cost at the largest size over that at the cheapest smaller one.

    So a curve that falls and then rises is judged from its lowest point.
    """
    *smaller, largest = sorted(costs)
    cheapest = min(smaller, key=lambda size: lower_quartile(costs[size]))
    label = f"CPU a {unit}, largest size / cheapest smaller one"
    return ratios(costs[largest], costs[cheapest], label)


def figure(
    axis: Axis, curve: Curve, points: Mapping[int, Point], notes: Sequence[str] = ()
) -> Figure:
    """The figure of a curve."""
    costs = {
        size: tuple(cost_of(axis, curve, size, value) for value in point.cpu_us)
        for size, point in sorted(points.items())
    }
    beside: list[Series] = []
    for size, point in sorted(points.items()):
        beside.append(Series(cpu_label(axis, size, curve.unit), "us", costs[size]))
        if axis.is_bytes:
            beside.append(Series(cpu_label(axis, size, REQUEST), "us", point.cpu_us))
        beside.append(Series(p50_label(axis, size), "ms", point.p50_ms))
        if axis.has_rate:
            beside.append(Series(rate_label(axis, size), "requests/s", point.rate))
    return Figure(
        CASE,
        axis.figure_name(curve),
        rise(costs, curve.unit),
        None if curve.is_floor else Bar("<=", RISE_LIMIT),
        tuple(beside),
        tuple(notes),
    )


# -- reading a report -----------------------------------------------------------------------------


def measured(report: Report, axis: Axis, curve: Curve) -> Figure | None:
    """The figure of a curve; None if the report has none."""
    name = axis.figure_name(curve)
    return next((f for f in report.figures if f.case == CASE and f.name == name), None)


def upper_quartile(values: Sequence[float]) -> float:
    """The upper quartile: of rates, what the lower one is of costs."""
    return -lower_quartile([-value for value in values])


def values(
    found: Figure,
    axis: Axis,
    label: Callable[[int], str],
    of: Callable[[Sequence[float]], float] = lower_quartile,
) -> dict[int, float]:
    """Size → the quartile of the series that has this label at this size."""
    by_label = {series.label: series for series in found.beside}
    sizes = sorted({*axis.sizes, *axis.quick})
    return {size: of(by_label[label(size)].values) for size in sizes if label(size) in by_label}


def cpu_values(found: Figure, axis: Axis, unit: str) -> dict[int, float]:
    """Size → the cost of a unit, in us."""
    return values(found, axis, lambda size: cpu_label(axis, size, unit))


# -- the page -------------------------------------------------------------------------------------


def section(report: Report, axis: Axis) -> list[str]:
    """One axis: a table with a row for each size, and what shapes the curves."""
    heads: list[str] = []
    columns: list[dict[int, str]] = []
    notes: list[str] = []
    for curve in axis.curves:
        found = measured(report, axis, curve)
        if found is None:
            continue
        units = (REQUEST, curve.unit) if axis.is_bytes else (curve.unit,)
        for unit in units:
            heads.append(f"{curve.name}: CPU a {unit}")
            costs = cpu_values(found, axis, unit)
            columns.append({size: spelled(value, "us") for size, value in costs.items()})
        if not curve.is_floor:
            heads.append("p50")
            times = values(found, axis, lambda size: p50_label(axis, size))
            columns.append({size: spelled(value, "ms") for size, value in times.items()})
        if axis.has_rate:
            heads.append("requests/s")
            rates = values(found, axis, lambda size: rate_label(axis, size), upper_quartile)
            columns.append({size: f"{round(value):,}" for size, value in rates.items()})
        notes += [note for note in found.notes if note not in notes]
    if not columns:
        return []
    lines = [f"## {axis.name[0].upper()}{axis.name[1:]}", ""]
    lines += [f"| {axis.name} | {' | '.join(heads)} |", "|---:" * (len(heads) + 1) + "|"]
    for size in sorted({size for column in columns for size in column}):
        cells = [column.get(size, "") for column in columns]
        lines.append(f"| {axis.spelled(size)} | {' | '.join(cells)} |")
    about = [f"p50: {axis.p50.removeprefix('p50 ')}.", axis.explains]
    lines += ["", " ".join(text for text in about if text), ""]
    lines += [f"- {note}" for note in notes]
    return [*lines, ""] if notes else lines


def sections(report: Report) -> str:
    """The part of the page above the bars."""
    lines = [
        "![The server's CPU time for one unit over the size of each axis](../images/scaling.svg)",
        "",
        "Each value is the lower quartile of the rounds, of rates the upper one. CPU time is that "
        "of the server's process, with all threads and children. How it is measured: "
        "[METHOD.md](METHOD.md).",
        "",
    ]
    for axis in AXES:
        lines += section(report, axis)
    return "\n".join(lines)
