"""The log line of each answer."""

from __future__ import annotations

from typing import Any

from topics_server.api.access_log import Observer
from topics_server.api.routes import build_routes
from topics_server.api.routing import Routes
from topics_server.runtime.clock import monotonic_ms


def observer() -> tuple[Observer, Routes]:
    routes = build_routes()
    return Observer(routes.table), routes


def note(seen: Observer, routes: Routes, method: str, path: bytes, *more: Any) -> None:
    seen.answered(routes.find(path)[0], method, path, *more)


def counted(seen: Observer) -> dict[tuple[str, str], tuple[int, ...]]:
    return {(f.route, f.method): tuple(f.classes) for f in seen.facts() if any(f.classes)}


def test_answers_are_counted_by_template_method_and_class_of_status() -> None:
    seen, routes = observer()
    for status in (200, 201, 404, 503):
        seen.answered(
            routes.find(b"/v0/topics/jobs")[0],
            "POST",
            b"/v0/topics/jobs",
            status,
            10,
            monotonic_ms(),
        )
    seen.answered(
        routes.find(b"/v0/topics/other")[0], "GET", b"/v0/topics/other", 200, 10, monotonic_ms()
    )
    seen.answered(
        routes.find(b"/v0/topics/jobs/diff")[0],
        "POST",
        b"/v0/topics/jobs/diff",
        200,
        10,
        monotonic_ms(),
    )
    assert counted(seen) == {
        ("/v0/topics/:topic", "POST"): (0, 0, 2, 0, 1, 1),
        ("/v0/topics/:topic", "GET"): (0, 0, 1, 0, 0, 0),
        ("/v0/topics/:topic/diff", "POST"): (0, 0, 1, 0, 0, 0),
    }


def test_paths_and_methods_that_are_none_have_one_row_whatever_they_are() -> None:
    """Otherwise a client could make the metrics grow."""
    seen, routes = observer()
    before = len(seen.facts())
    for number in range(100):
        seen.answered(
            routes.find(b"/v0/topics")[0], f"M{number}", b"/v0/topics", 405, 0, monotonic_ms()
        )
        seen.answered(
            routes.find(b"/x/%d" % number)[0], "GET", b"/x/%d" % number, 404, 0, monotonic_ms()
        )
    assert counted(seen) == {("other", "other"): (0, 0, 0, 0, 200, 0)}
    assert len(seen.facts()) == before


def test_the_time_is_counted_in_microseconds() -> None:
    seen, routes = observer()
    seen.answered(
        routes.find(b"/v0/health")[0], "GET", b"/v0/health", 200, 0, monotonic_ms() - 1000.0
    )
    (facts,) = [f for f in seen.facts() if any(f.classes)]
    assert facts.sum_us >= 1_000_000
    assert sum(facts.counts) == sum(facts.counts[20:]) == 1


def test_the_access_log_is_told_the_template_and_what_was_sent() -> None:
    seen, routes = observer()
    route, segment = routes.find(b"/v0/topics/jobs")
    assert route is not None
    routes.name_at(route, b"/v0/topics/jobs", segment)
    told: list[tuple[object, ...]] = []
    seen.access = lambda *noted: told.append(noted)
    seen.answered(
        routes.find(b"/v0/topics/jobs")[0],
        "POST",
        b"/v0/topics/jobs",
        200,
        7,
        monotonic_ms(),
        b"id",
    )
    note(seen, routes, "GET", b"/nowhere", 404, 8, monotonic_ms())
    assert [(*noted[:5], noted[6]) for noted in told] == [
        ("POST", b"/v0/topics/jobs", "/v0/topics/{topic}", 200, 7, b"id"),
        ("GET", b"/nowhere", "other", 404, 8, b""),
    ]
