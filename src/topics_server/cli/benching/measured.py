"""A row of `topics bench`: rates, percentiles and the client's share of a core. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

# A client that takes more of a core than this limits the result.
BUSY_CORES = 0.9
HEAD = ("row", "connections", "requests/s", "records/s", "p50 ms", "p99 ms", "errors")


class Sample(msgspec.Struct):
    """What one load has counted. `seconds` ends with the last answer; `cpu_s` is the client's."""

    latencies_s: Sequence[float]
    records: int
    errors: int
    seconds: float
    cpu_s: float
    first_error: str | None = None


class Row(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A row of the result; `records_per_s` counts jobs too. Percentiles of nothing are null."""

    row: str
    connections: int
    requests: int
    seconds: float
    requests_per_s: float
    records_per_s: float
    p50_ms: float | None
    p99_ms: float | None
    errors: int
    client_cores: float
    first_error: str | None = None

    def cells(self) -> tuple[str, ...]:
        """The cells of the table, in the order of `HEAD`."""
        return (
            self.row,
            str(self.connections),
            f"{self.requests_per_s:,.0f}",
            f"{self.records_per_s:,.0f}",
            _ms(self.p50_ms),
            _ms(self.p99_ms),
            str(self.errors),
        )


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def percentile_of(ordered: Sequence[float], share: float) -> float | None:
    """The nearest-rank percentile of sorted values; None of none."""
    if not ordered:
        return None
    rank = -(-len(ordered) * round(share * 1000) // 1000)  # rounded up
    return ordered[max(rank, 1) - 1]


def row_of(name: str, connections: int, sample: Sample) -> Row:
    """The row of one load."""
    ordered = sorted(sample.latencies_s)
    p50, p99 = percentile_of(ordered, 0.50), percentile_of(ordered, 0.99)
    return Row(
        row=name,
        connections=connections,
        requests=len(ordered),
        seconds=round(sample.seconds, 3),
        requests_per_s=_rate(len(ordered), sample.seconds),
        records_per_s=_rate(sample.records, sample.seconds),
        p50_ms=None if p50 is None else round(p50 * 1000, 3),
        p99_ms=None if p99 is None else round(p99 * 1000, 3),
        errors=sample.errors,
        client_cores=cores_of([sample]),
        first_error=sample.first_error,
    )


def _rate(count: int, seconds: float) -> float:
    return round(count / seconds, 1) if seconds > 0 else 0.0


def cores_of(samples: Iterable[Sample]) -> float:
    """How much of a core the client used while it measured."""
    taken = list(samples)
    seconds = sum(sample.seconds for sample in taken)
    return round(sum(sample.cpu_s for sample in taken) / seconds, 2) if seconds > 0 else 0.0


def warning_of(rows: Sequence[Row]) -> str | None:
    """The warning that the client limits some rows; None if it limits none."""
    busy = [f"{row.row} x{row.connections}" for row in rows if row.client_cores > BUSY_CORES]
    if not busy:
        return None
    return f"the client was busy, and the server may be faster than this: {', '.join(busy)}"
