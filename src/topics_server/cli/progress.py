"""A progress bar of verbs that work through lines or records: share, number, rate, time left."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

# The items so far, the finished units of the total (None: the share is unknown), and whether the
# items were sent.
Advance = Callable[[int, int, bool], None]


@contextlib.contextmanager
def progress_bar(total: int | None, noun: str) -> Iterator[Advance]:
    """The bar on standard error, if that is a terminal; `noun` names the counted items."""
    if not sys.stderr.isatty():
        yield lambda _items, _done, _sent: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        SpinnerColumn,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from topics_server.runtime.clock import monotonic_ms

    columns = (
        SpinnerColumn(),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[items]:,} " + noun),
        TextColumn("{task.fields[rate]:,.0f}/s"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total, items=0, rate=0.0)
        first: tuple[int, float] | None = None

        def advance(items: int, done: int, sent: bool) -> None:
            nonlocal first
            now_ms = monotonic_ms()
            if not sent or first is None:
                first = (items, now_ms)  # the rate counts sent items and not skipped ones
            passed_ms = now_ms - first[1]
            rate = (items - first[0]) * 1000 / passed_ms if passed_ms > 0 else 0.0
            progress.update(task, completed=done, items=items, rate=rate)

        yield advance
