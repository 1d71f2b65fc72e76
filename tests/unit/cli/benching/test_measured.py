"""The arithmetic of `topics bench`."""

from __future__ import annotations

import pytest

from topics_server.cli.benching.measured import (
    HEAD,
    Row,
    Sample,
    cores_of,
    percentile_of,
    row_of,
    warning_of,
)


def sample(**fields: object) -> Sample:
    """A sample of two requests of five records each in half a second, with these fields changed."""
    base = {"latencies_s": [0.003, 0.001], "records": 10, "errors": 0, "seconds": 0.5, "cpu_s": 0.1}
    return Sample(**{**base, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("count", "share", "rank"),
    [(1, 0.5, 1), (1, 0.99, 1), (2, 0.5, 1), (3, 0.5, 2), (100, 0.99, 99), (101, 0.99, 100)],
)
def test_a_percentile_is_the_nearest_rank(count: int, share: float, rank: int) -> None:
    assert percentile_of([float(number) for number in range(1, count + 1)], share) == rank


def test_there_is_no_percentile_of_nothing() -> None:
    assert percentile_of([], 0.5) is None


def test_a_row_counts_requests_and_records_a_second() -> None:
    row = row_of("append-5", 2, sample())
    assert (row.requests, row.requests_per_s, row.records_per_s) == (2, 4.0, 20.0)
    assert (row.p50_ms, row.p99_ms) == (1.0, 3.0)
    assert row.client_cores == 0.2


def test_a_row_of_no_request_has_no_rate_and_no_percentile() -> None:
    row = row_of("ack-1", 2, sample(latencies_s=[], records=0, seconds=0.0, errors=3))
    assert (row.requests_per_s, row.records_per_s, row.client_cores) == (0.0, 0.0, 0.0)
    assert (row.p50_ms, row.p99_ms, row.errors) == (None, None, 3)
    assert row.cells() == ("ack-1", "2", "0", "0", "-", "-", "3")


def test_the_cells_are_those_of_the_head() -> None:
    row = row_of("append-100", 16, sample(records=1_000_000))
    assert len(row.cells()) == len(HEAD)
    assert row.cells() == ("append-100", "16", "4", "2,000,000", "1.00", "3.00", "0")


def test_the_share_of_a_core_is_weighted_by_time() -> None:
    assert cores_of([sample(seconds=1.0, cpu_s=0.9), sample(seconds=3.0, cpu_s=0.3)]) == 0.3
    assert cores_of([]) == 0.0


@pytest.mark.parametrize(("cpu_s", "warns"), [(0.45, False), (0.46, True)])
def test_a_client_at_its_limit_is_a_warning(cpu_s: float, warns: bool) -> None:
    rows: list[Row] = [row_of("quiet", 1, sample()), row_of("busy", 16, sample(cpu_s=cpu_s))]
    warning = warning_of(rows)
    assert (warning is not None) is warns
    if warning is not None:
        assert "busy x16" in warning
        assert "quiet" not in warning
