"""The live board of `topics queue`.

A snapshot is a topic's state without its configuration. Rates come from two snapshots: enqueued
jobs move `head_seq`; completed and dead jobs leave `count`. Reading the state does not change the
topic's recency.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlencode

import click
import msgspec

from topics_server.cli.amounts import seconds
from topics_server.cli.connection import (
    CallRefused,
    Failure,
    ServerConnection,
    server_options,
    topic_path,
)
from topics_server.cli.output import note, print_rich, write_line
from topics_server.cli.stopping import stopped_by_user
from topics_server.runtime.clock import monotonic_ms

PAGE_SIZE: Final = 1000
# A board of all queues looks for new queues each time it has refreshed this often.
SEARCH_TURNS: Final = 10
COLUMNS: Final = ("queue", "ready", "delayed", "in flight", "dead", "in/s", "out/s")


class QueueCounters(msgspec.Struct):
    """The `queue` object of a topic's state."""

    ready: int = 0
    in_flight: int = 0
    dead_lettered: int = 0
    delayed: int = 0


class _State(msgspec.Struct):
    topic: str
    head_seq: int
    count: int
    queue: QueueCounters | None = None


_STATE: Final = msgspec.json.Decoder(_State)


class _TopicRow(msgspec.Struct):
    topic: str


class _Page(msgspec.Struct):
    topics: list[_TopicRow]
    next_cursor: str | None = None


_PAGE: Final = msgspec.json.Decoder(_Page)


class Snapshot(msgspec.Struct, frozen=True):
    """One queue at one moment; rates are per second and None before there are two snapshots."""

    queue: str
    ready: int
    delayed: int
    in_flight: int
    dead: int
    head_seq: int
    count: int
    in_rate: float | None = None
    out_rate: float | None = None


@click.command("show")
@click.argument("queues", nargs=-1, metavar="[QUEUE]...")
@click.option("--watch", "-w", is_flag=True, help="Repeat until Ctrl-C, also into a pipe.")
@click.option(
    "--interval",
    "interval_ms",
    type=seconds(50),
    default="1s",
    show_default=True,
    help="Time between two updates: 500ms, 5s; plain: seconds.",
)
@click.option(
    "--json/--table",
    "as_json",
    default=None,
    help="One JSON value a line, or a table; default: a board on a terminal.",
)
@server_options
def command(
    queues: tuple[str, ...],
    watch: bool,
    interval_ms: int,
    as_json: bool | None,
    client: ServerConnection,
) -> None:
    """Show the counts of QUEUEs, or of all queues.

    On a terminal the command shows a live board until Ctrl-C. In a pipe it prints one line of JSON
    for each queue, once; with --watch repeatedly.

    You may leave out the word show, unless a queue has the name of another command.
    """
    names = tuple(dict.fromkeys(queues))
    is_board = sys.stdout.isatty() and not as_json
    lines = not is_board if as_json is None else as_json
    board = Board(client, names)
    with stopped_by_user():
        if is_board:
            _show_live(board, interval_ms / 1000)
        elif not watch:
            _show(board.look(), as_json=lines)
        else:
            for snapshots in _looks(board, interval_ms / 1000):
                _show(snapshots, as_json=lines)
                sys.stdout.flush()


class Board:
    """The rows of the board: the requested queues, or all queues of the server."""

    def __init__(self, client: ServerConnection, names: Sequence[str]) -> None:
        self._client = client
        self._asked = names
        self._names: list[str] = list(names)
        self._turns = 0
        self._before: Mapping[str, tuple[float, Snapshot]] = {}

    def look(self) -> list[Snapshot]:
        """Return every queue now. The first time, a requested queue must exist."""
        if not self._asked and self._turns % SEARCH_TURNS == 0:
            self._names = list(self._topics())
        found: list[tuple[float, Snapshot]] = []
        for name in self._names:
            state = self._state(name)
            if state is not None and state.queue is not None:
                found.append(self._rated(_snapshot(state, state.queue)))
        self._before = {snapshot.queue: (at_ms, snapshot) for at_ms, snapshot in found}
        if not self._asked:
            self._names = list(self._before) if self._turns % SEARCH_TURNS == 0 else self._names
        self._turns += 1
        return [snapshot for _, snapshot in found]

    def _state(self, name: str) -> _State | None:
        try:
            answer = self._client.call("GET", topic_path(name, "?touch=false"), repeatable=True)
        except CallRefused as error:
            if error.status == 404 and not (self._asked and self._turns == 0):
                return None  # removed since the list was made
            raise
        state = _STATE.decode(answer)
        if state.queue is None and self._asked:
            raise Failure(f"not_a_queue: {name!r} is a plain log")
        return state

    def _rated(self, snapshot: Snapshot) -> tuple[float, Snapshot]:
        now_ms = monotonic_ms()
        then = self._before.get(snapshot.queue)
        if then is None or then[1].head_seq > snapshot.head_seq:  # a new queue of this name
            return now_ms, snapshot
        seconds = max(now_ms - then[0], 1) / 1000
        came = snapshot.head_seq - then[1].head_seq
        left = came + then[1].count - snapshot.count
        rated = msgspec.structs.replace(
            snapshot, in_rate=round(came / seconds, 1), out_rate=round(left / seconds, 1)
        )
        return now_ms, rated

    def _topics(self) -> Iterator[str]:
        query = {"page_size": str(PAGE_SIZE)}
        while True:
            answer = self._client.call("GET", f"/v0/topics?{urlencode(query)}", repeatable=True)
            page = _PAGE.decode(answer)
            for row in page.topics:
                yield row.topic
            if page.next_cursor is None:
                return
            query["cursor"] = page.next_cursor


def _snapshot(state: _State, queue: QueueCounters) -> Snapshot:
    return Snapshot(
        queue=state.topic,
        ready=queue.ready,
        delayed=queue.delayed,
        in_flight=queue.in_flight,
        dead=queue.dead_lettered,
        head_seq=state.head_seq,
        count=state.count,
    )


def _looks(board: Board, interval_s: float) -> Iterator[list[Snapshot]]:
    while True:
        yield board.look()
        threading.Event().wait(interval_s)


def _show(snapshots: Sequence[Snapshot], *, as_json: bool) -> None:
    if not as_json:
        print_rich(_table(snapshots))
        return
    for snapshot in snapshots:
        fields = msgspec.structs.asdict(snapshot)
        write_line(msgspec.json.encode({k: v for k, v in fields.items() if v is not None}))


def _show_live(board: Board, interval_s: float) -> None:
    """Show the board until Ctrl-C; while no server answers, the last board stays."""
    from rich.console import Console
    from rich.live import Live

    first = board.look()  # an error at the start ends the verb
    with Live(_table(first), console=Console(highlight=False), auto_refresh=False) as live:
        live.refresh()
        trouble = ""
        while True:
            threading.Event().wait(interval_s)
            try:
                live.update(_table(board.look()), refresh=True)
                trouble = ""
            except Failure as error:
                if error.message != trouble:
                    note(error.message)
                trouble = error.message


def _table(snapshots: Sequence[Snapshot]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == COLUMNS[0] else "right", overflow="fold")
    for one in snapshots:
        counts = [one.ready, one.delayed, one.in_flight, one.dead]
        rates = ["-" if rate is None else f"{rate:,.1f}" for rate in (one.in_rate, one.out_rate)]
        styles = ["", "dim", "cyan", "red" if one.dead else "dim"]
        texts = [Text(f"{n:,}", style) for n, style in zip(counts, styles, strict=True)]
        table.add_row(Text(one.queue), *texts, *rates)
    if not snapshots:
        table.add_row(Text("no queues", "dim"), *[""] * (len(COLUMNS) - 1))
    return table
