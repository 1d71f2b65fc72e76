"""`topics bench`: measures a running server over HTTP.

Exit code 0: every row was measured without an error. 1: the server refused something, or the run
was stopped. 2: wrong usage, or no server answers. Whatever happens, the verb removes its topics, or
says which remain.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click
import msgspec

from topics_server.cli.benching.measured import HEAD, Row, cores_of, warning_of
from topics_server.cli.benching.own_topics import OwnTopics
from topics_server.cli.benching.run import GROUPS, BenchRun
from topics_server.cli.connection import CallRefused, Failure, ServerConnection, server_options
from topics_server.cli.output import format_options, note, show_table, write_line

HELP = """Measure a running server: appends, reads, a waiting reader, a queue.

Connections send one request after the other, for --seconds a row. All topics of a run are its own,
below --prefix and a random name, and are removed at the end. A key needs the scopes read, write,
delete and admin for that prefix.

\b
append   appends of one record, by one connection and by --connections
batch    appends of 100 records, the same way
read     diffs of 1,000 records, the same way
follow   one record to a reader that waits: the latency of the whole way
queue    enqueue, claim and ack, one job a call and 64 a call

The client needs a part of the processor too, and says how much: on the server's machine the
server lacks it.
"""


if TYPE_CHECKING:
    _Base = click.ParamType[tuple[str, ...]]
else:
    _Base = click.ParamType  # click has generic types since 8.4 only


class Groups(_Base):
    """Names of groups, separated by commas."""

    name = "groups"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        """The named groups in the order of `GROUPS`, each once."""
        if isinstance(value, tuple):
            return value
        named = {name.strip() for name in value.split(",") if name.strip()}
        unknown = sorted(named - set(GROUPS))
        if unknown or not named:
            self.fail(f"{value!r} does not name groups of {', '.join(GROUPS)}.", param, ctx)
        return tuple(name for name in GROUPS if name in named)


@click.command("bench", help=HELP)
@click.option(
    "--seconds",
    type=click.FloatRange(0.05, 60),
    default=2.0,
    show_default=True,
    help="How long each row is measured.",
)
@click.option(
    "--connections",
    type=click.IntRange(1, 256),
    default=16,
    show_default=True,
    help="Connections of the rows with many.",
)
@click.option(
    "--only",
    type=Groups(),
    default=",".join(GROUPS),
    metavar="GROUP,...",
    help=f"Only these: {', '.join(GROUPS)}.",
)
@click.option(
    "--prefix",
    default="bench.",
    show_default=True,
    help="Start of the topics' names, for a key that is limited to a prefix.",
)
@format_options
@server_options
def command(
    seconds: float,
    connections: int,
    only: tuple[str, ...],
    prefix: str,
    client: ServerConnection,
    as_json: bool,
) -> None:
    """Measure a server, see `HELP`."""
    rows: list[Row] = []

    def emit(row: Row) -> None:
        rows.append(row)
        if as_json:
            write_line(msgspec.json.encode(row))

    topics = OwnTopics(client, prefix)
    run = BenchRun(client, topics, seconds=seconds, connections=connections, emit=emit)
    with ended_by_signals():
        try:
            run.run(only)
        except CallRefused as error:
            raise explained(error) from None
        except KeyboardInterrupt:
            raise Failure("stopped: what was measured until then is above") from None
        finally:
            try:
                if not as_json and rows:
                    show_table(HEAD, [row.cells() for row in rows], numbers=HEAD[1:])
            finally:
                cleaned(topics)
    note(f"the client used {cores_of(run.samples):.1f} of a core")
    warning = warning_of(rows)
    if warning is not None:
        note(warning)
    failed = [row for row in rows if row.errors]
    if failed:
        lost = sum(row.errors for row in failed)
        raise Failure(f"refused requests: {lost}; the first: {failed[0].first_error}")


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the verb as Ctrl-C does, with its clean-up."""

    def interrupt(_number: int, _frame: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    handlers: dict[signal.Signals, Any] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: interrupt,
        signal.SIGHUP: interrupt,
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def cleaned(topics: OwnTopics) -> None:
    """Remove the topics that are left, and name those that remain."""
    error: Failure | None = None
    try:
        error = topics.remove_all()
    finally:
        if topics.left:
            why = "" if error is None else f" ({error.message})"
            note(f"these topics remain; topics rm removes them{why}: {' '.join(topics.left)}")


def explained(error: CallRefused) -> Failure:
    """The refusal, with the user's way out of it where there is one."""
    advice = {
        "forbidden": "a key for this verb has the scopes read, write, delete and admin; "
        "--prefix sets the prefix of the topics",
        "not_found": "the server has no such call; it may be older than this command",
    }.get(error.code)
    return error if advice is None else Failure(f"{error.message} ({advice})")
