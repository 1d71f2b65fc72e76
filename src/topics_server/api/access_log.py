"""Per-route metrics and the access log line of every response.

`api/front_door` and `api/direct` call `answered` once the head of an answer is made. A call costs
well below a microsecond: a few integers, one test of an attribute. A stream is noted when it opens.
Requests that the parser refuses never reach this module.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Protocol

from topics_server.runtime.clock import monotonic_s
from topics_server.runtime.metrics import RequestMetrics, RouteFacts

# Stands for the route of an unknown path, and for the method of a request with an unknown method.
OTHER: Final = "other"
_PARAMETER: Final = re.compile(r"\{(\w+)\}")


class Observed(Protocol):
    """A route whose requests are counted."""

    @property
    def template(self) -> str:
        """Its path template."""
        ...

    @property
    def request_metrics(self) -> Mapping[str, RequestMetrics]:
        """The metrics of its requests, by method."""
        ...


# A callback of the access log: method, path, template, status, bytes, ms, request id.
Noted = Callable[[str, bytes, str, int, int, float, bytes], None]


class Observer:
    """The metrics of all routes, and the callback of the access log."""

    __slots__ = ("_other", "_table", "access")

    def __init__(self, table: Iterable[Observed]) -> None:
        """Observe the routes of `table`."""
        self._table = tuple(table)
        self._other = RequestMetrics()
        # None: the access log is off.
        self.access: Noted | None = None

    def answered(
        self,
        route: Observed | None,
        method: str,
        raw_path: bytes,
        status: int,
        size: int,
        started_ms: float,
        request_id: bytes = b"",
    ) -> None:
        """Note one answer of `size` bytes to a request that arrived at `started_ms`.

        `route` is None for a path of no route.
        """
        took_ms = monotonic_s() * 1000 - started_ms
        request_metrics = (
            self._other if route is None else route.request_metrics.get(method, self._other)
        )
        request_metrics.classes[status // 100] += 1
        # `StepHistogram.observe` written out here, because every request is counted.
        times, took_us = request_metrics.times_us, int(took_ms * 1000)
        times.counts[took_us.bit_length()] += 1
        times.total += took_us
        if self.access is not None:
            template = OTHER if route is None else route.template
            self.access(method, raw_path, template, status, size, took_ms, request_id)

    def facts(self) -> Sequence[RouteFacts]:
        """The current metrics of every route and method."""
        rows = [
            # Parameters in the contract's form: some readers cannot handle braces in a label.
            (_PARAMETER.sub(r":\1", route.template), method, request_metrics)
            for route in self._table
            for method, request_metrics in route.request_metrics.items()
        ]
        return [
            RouteFacts(
                template,
                method,
                tuple(request_metrics.classes),
                tuple(request_metrics.times_us.counts),
                request_metrics.times_us.total,
            )
            for template, method, request_metrics in (*rows, (OTHER, OTHER, self._other))
        ]
