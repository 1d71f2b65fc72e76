"""The case `scaling`: its figures, its page and its chart, and how the generator counts."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from benchmarks.cases.scaling.depth import together
from benchmarks.cases.scaling.tools import refusals
from benchmarks.cases.scaling.watchers import SPARE_FILES, a_delivery, allowed
from benchmarks.clients.loader import BenchmarkError, Loader, Sample
from benchmarks.clients.requests import http_request, write_requests
from benchmarks.report import document, scaling, scaling_chart
from benchmarks.report.figures import Report, report_from_json
from benchmarks.report.scaling import (
    AXES,
    CONNECTIONS,
    PAYLOAD,
    PAYLOAD_APPEND,
    RISE_LIMIT,
    TOPICS,
    V0,
    V1,
    Point,
    lower_quartile,
    rise,
)

KEPT = Path(document.__file__).parents[1] / "results"
MACHINE = {
    "processor": "a processor",
    "cores": 2,
    "memory_gib": 4,
    "file_system": "ext4",
    "system": "Linux",
    "python": "3.11",
    "load_average_at_start": 0,
    "date": "a day",
}


def report() -> Report:
    """Every curve; a unit costs 100 us at each size."""
    flat = {
        (axis, curve): {size: Point((100.0, 120.0), (0.5, 0.6), (9e3, 8e3)) for size in axis.sizes}
        for axis in AXES
        for curve in axis.curves
    }
    return Report(
        machine=MACHINE,
        options={"rounds": 2, "seconds": 1, "quick": False, "only": ["scaling"]},
        figures=[scaling.figure(axis, curve, points) for (axis, curve), points in flat.items()],
    )


def sample(**changed: float) -> Sample:
    """A sample; p50 1 ms, 10 us of the server, 10 requests."""
    values = {"count": 10, "seconds": 1.0, "rate": 10.0, "p50_ms": 1.0, "p90_ms": 1.0}
    values |= {"p99_ms": 1.0, "max_ms": 1.0, "generator_cpu_us": 1.0, "server_cpu_us": 10.0}
    return Sample(**(values | changed))  # type: ignore[arg-type]


# -- the rise -------------------------------------------------------------------------------------


def test_the_rise_is_that_above_the_cheapest_smaller_size() -> None:
    """A curve that falls and then rises is not flat, though its ends are equal."""
    costs = {1: (100.0, 100.0), 10: (20.0, 25.0), 100: (100.0, 100.0)}
    assert rise(costs, "message").values == (5.0, 4.0)


def test_a_falling_curve_does_not_rise() -> None:
    assert rise({1: (100.0,), 10: (50.0,), 100: (40.0,)}, "request").values == (0.8,)


@pytest.mark.parametrize(("last", "verdict"), [(149.0, "PASS"), (151.0, "short of")])
def test_the_bar(last: float, verdict: str) -> None:
    points = {1: Point((100.0,), (1.0,)), 10: Point((last,), (1.0,))}
    figure = scaling.figure(TOPICS, scaling.APPEND, points)
    assert RISE_LIMIT == 1.5
    assert figure.verdict == verdict


def test_payloads_are_judged_by_the_megabyte() -> None:
    """A request of a thousand times the bytes may cost a thousand times as much."""
    points = {100: Point((50.0,), (1.0,)), 1 << 20: Point((5_000.0,), (1.0,))}
    figure = scaling.figure(PAYLOAD, PAYLOAD_APPEND, points)
    assert figure.judged.median == pytest.approx((5_000 / (1 << 20)) / (50 / 100))
    by_label = {series.label: series.median for series in figure.beside}
    assert by_label["100 B, CPU a MB"] == pytest.approx(500_000)
    assert by_label["1 MiB, CPU a request"] == 5_000


def test_the_lower_quartile_ignores_disturbed_rounds() -> None:
    assert lower_quartile([7.0]) == 7
    assert lower_quartile([10.0, 11.0, 12.0, 50.0, 90.0]) == 11


def test_the_rate_is_that_of_undisturbed_rounds() -> None:
    assert scaling.upper_quartile([9.0, 10.0, 11.0, 2.0, 1.0]) == 10


def test_every_figure_has_its_own_name() -> None:
    names = [axis.figure_name(curve) for axis in AXES for curve in axis.curves]
    assert len(set(names)) == len(names)


# -- page and chart -------------------------------------------------------------------------------


def test_the_page_has_a_row_for_each_size_and_a_column_for_each_curve() -> None:
    page = document.scaling_page(report())
    for axis in AXES:
        heads = re.search(rf"^\| {axis.name} \|.*$", page, re.M)
        assert heads is not None
        for curve in axis.curves:
            assert f"{curve.name}: CPU a {curve.unit}" in heads[0]
        for size in axis.sizes:
            row = re.search(rf"^\| {axis.spelled(size)} \|.*$", page.split(heads[0])[1], re.M)
            assert row is not None
            assert row[0].count("|") == heads[0].count("|")
            assert "|  |" not in row[0]
    assert "| 100,000 | 105 us | 0.525 ms |" in page
    assert "(../images/scaling.svg)" in page


def test_a_size_that_was_not_measured_has_no_row() -> None:
    found = report()
    points = {size: Point((1.0,), (1.0,)) for size in (1, 10)}
    found.figures = [scaling.figure(TOPICS, scaling.APPEND, points, ("a note",))]
    page = document.scaling_page(found)
    assert "| 10 | 1.000 us |" in page
    assert "| 100 |" not in page
    assert "## Watchers" not in page
    assert "- a note" in page


def test_the_chart_has_a_panel_for_each_axis_and_a_line_for_each_curve() -> None:
    drawn = scaling_chart.picture(report())
    for axis in AXES:
        assert f">{axis.name[0].upper()}{axis.name[1:]}<" in drawn
    curves = sum(len(axis.curves) * (2 if axis.is_bytes else 1) for axis in AXES)
    assert drawn.count('stroke-width="2"') == curves
    assert "None" not in drawn


def test_a_flat_curve_is_drawn_flat_and_a_steep_one_steep() -> None:
    def heights(costs: Mapping[int, float]) -> list[float]:
        line = scaling_chart.Line("a", costs)
        drawn = "".join(scaling_chart.panel(TOPICS, [line], 0, 0))
        return [float(y) for y in re.findall(r'cy="([\d.]+)" r="3"', drawn)]

    flat = heights({1: 50.0, 10: 50.0, 100: 50.0})
    assert len(set(flat)) == 1
    steep = heights({1: 10.0, 10: 100.0, 100: 1000.0})
    assert steep[0] - steep[1] == pytest.approx(steep[1] - steep[2], abs=0.2)
    assert steep == sorted(steep, reverse=True)


@pytest.mark.parametrize(
    ("costs", "ends"), [([50.0, 60.0], (1, 3)), ([5.0, 5000.0], (0, 4)), ([100.0], (1, 3))]
)
def test_the_scale_has_at_least_two_decades(costs: list[float], ends: tuple[int, int]) -> None:
    assert scaling_chart.decades(costs) == ends


def test_the_pages_are_written_with_their_chart(tmp_path: Path) -> None:
    for folder in ("performance", "images"):
        (tmp_path / folder).mkdir()
    document.write_pages(report(), tmp_path)
    assert [path.name for path in (tmp_path / "performance").iterdir()] == ["scaling.md"]
    assert (tmp_path / "images" / "scaling.svg").read_text() == scaling_chart.picture(report())


def test_page_and_chart_are_drawn_from_the_kept_report() -> None:
    kept = report_from_json(json.loads((KEPT / "scaling.json").read_text()))
    assert kept.options["only"] == ["scaling"]
    assert not kept.errors
    docs = document.DOCS
    assert (docs / "performance" / "scaling.md").read_text() == document.scaling_page(kept)
    assert (docs / "images" / "scaling.svg").read_text() == scaling_chart.picture(kept)


# -- measuring ------------------------------------------------------------------------------------


def test_a_delivery_has_its_share_of_all_writes() -> None:
    """Two writes of a slice are proofs, which the count leaves out and the server does not."""
    assert a_delivery(sample(count=8, server_cpu_us=1000.0), 100).server_cpu_us == 8.0


def test_watchers_fit_into_the_limit_of_open_files() -> None:
    sizes = (1, 10, 100, 1_000, 10_000)
    assert allowed(sizes, 20_000) == sizes
    assert allowed(sizes, 11_111 + SPARE_FILES) == sizes
    assert allowed(sizes, 11_110 + SPARE_FILES) == (1, 10, 100, 1_000)
    assert allowed(sizes, 1024) == (1, 10, 100)


def test_a_job_costs_its_claim_and_its_ack() -> None:
    claims = [sample(server_cpu_us=10.0), sample(server_cpu_us=20.0)]
    acks = [sample(server_cpu_us=40.0, p50_ms=3.0), sample(server_cpu_us=50.0, p50_ms=3.0)]
    both = together(claims, acks)
    assert (both.server_cpu_us, both.p50_ms, both.count) == (60.0, 4.0, 20)


def test_refusals_are_named_with_their_share() -> None:
    taken = {1: [sample()], 1_000: [sample(count=98, refused=1), sample(count=101, refused=0)]}
    assert refusals(CONNECTIONS, V1, taken) == [
        "/v1/stream append, 1,000: 0.50% of the requests refused (429)"
    ]
    assert refusals(CONNECTIONS, V0, {1: [sample()]}) == []


class Answering:
    """A server of 204, or of another head for every third request."""

    def __init__(self, third: bytes) -> None:
        self._third = third
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.asked = 0
        self.opened = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return
            self.opened += 1
            threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        with link:
            while link.recv(4096):
                self.asked += 1
                status = self._third if self.asked % 3 == 0 else b"204 No Content"
                link.sendall(b"HTTP/1.1 %b\r\ncontent-length: 0\r\n\r\n" % status)

    def close(self) -> None:
        """Stop accepting."""
        self._listener.close()


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    return write_requests(tmp_path / "requests", [http_request("GET", "/")])


@pytest.fixture(params=[b"429 Too Many Requests", b"503 Service Unavailable"])
def refusing(request: pytest.FixtureRequest) -> Iterator[tuple[Answering, bytes]]:
    server = Answering(request.param)
    yield server, request.param
    server.close()


@pytest.mark.parametrize("connections", [1, 4])
def test_the_first_request_of_a_connection_is_not_counted(requests: Path, connections: int) -> None:
    server = Answering(b"204 No Content")
    with Loader() as loader:
        job = {"connections": connections, "seconds": 20, "count": 12}
        plain = loader.run(server.port, requests, **job)
        assert (plain.count, server.asked, plain.server_cpu_us) == (12, 12, 0)
        counted = loader.run(server.port, requests, **job, pid=1)
        assert (counted.count, server.asked) == (12, 12 + 12 + connections)
    server.close()


@pytest.mark.parametrize("connections", [1, 2])
def test_only_429_is_a_refusal(
    refusing: tuple[Answering, bytes], requests: Path, connections: int
) -> None:
    server, third = refusing
    job = {"connections": connections, "seconds": 20, "count": 9}
    with Loader() as loader:
        if third.startswith(b"429"):
            found = loader.run(server.port, requests, **job, refusals=True)
            assert (found.count, found.refused) == (6, 3)
        else:
            with pytest.raises(BenchmarkError, match="3 of 9 requests failed"):
                loader.run(server.port, requests, **job, refusals=True)


def test_a_refusal_is_an_error_unless_it_is_expected(requests: Path) -> None:
    server = Answering(b"429 Too Many Requests")
    job = {"connections": 2, "seconds": 20, "count": 9}
    with Loader() as loader, pytest.raises(BenchmarkError, match="429"):
        loader.run(server.port, requests, **job)
    server.close()
