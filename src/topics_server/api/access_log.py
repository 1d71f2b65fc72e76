"""Per-route metrics and the access log line of every response.

`answered` is called once an answer's head is made, by both ways a request goes (`api/application`,
`api/direct`), and costs well below a microsecond: a few integers, one test of an attribute. A
stream is noted when it opens. What the parser refuses before there is a request is not seen here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Protocol

from topics_server.runtime.clock import monotonic_ms
from topics_server.runtime.metrics import RequestFigures, RouteFacts

# The route of paths that are none, and the method of what a route does not have.
OTHER: Final = "other"
_PARAMETER: Final = re.compile(r"\{(\w+)\}")


class Observed(Protocol):
    """A route as it is observed."""

    @property
    def template(self) -> str:
        """Its path template."""
        ...

    @property
    def figures(self) -> Mapping[str, RequestFigures]:
        """By method."""
        ...


# What the access log is told: method, path, template, status, bytes, milliseconds, request id.
Noted = Callable[[str, bytes, str, int, int, float, bytes], None]


class Observer:
    """The figures of all routes, and who is told of each answer."""

    __slots__ = ("_find", "_known", "_other", "_table", "access")

    def __init__(
        self,
        table: Iterable[Observed],
        known: Callable[[bytes], tuple[Observed, str] | None],
        find: Callable[[bytes], tuple[Observed | None, bytes]],
    ) -> None:
        """Observe the routes of `table`; `known` and `find` are `Routes`'."""
        self._table = tuple(table)
        self._known = known
        self._find = find
        self._other = RequestFigures()
        # None: the access log is off.
        self.access: Noted | None = None

    def answered(
        self,
        method: str,
        raw_path: bytes,
        status: int,
        size: int,
        started_ms: float,
        request_id: bytes = b"",
    ) -> None:
        """Note one answer of `size` bytes to a request that arrived at `started_ms`."""
        took_ms = monotonic_ms() - started_ms
        known = self._known(raw_path)
        route = known[0] if known is not None else self._find(raw_path)[0]
        figures = self._other if route is None else route.figures.get(method, self._other)
        figures.classes[status // 100] += 1
        figures.times_us.observe(int(took_ms * 1000))
        if self.access is not None:
            template = OTHER if route is None else route.template
            self.access(method, raw_path, template, status, size, took_ms, request_id)

    def facts(self) -> Sequence[RouteFacts]:
        """Every route and method, as it is now."""
        rows = [
            # As the contract writes them: braces in a label are more than some readers expect.
            (_PARAMETER.sub(r":\1", route.template), method, figures)
            for route in self._table
            for method, figures in route.figures.items()
        ]
        return [
            RouteFacts(
                template,
                method,
                tuple(figures.classes),
                tuple(figures.times_us.counts),
                figures.times_us.total,
            )
            for template, method, figures in (*rows, (OTHER, OTHER, self._other))
        ]
