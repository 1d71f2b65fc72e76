"""Prints results: NDJSON in pipes, tables on terminals.

JSON output is the server's own bytes with one change: line breaks become spaces, so that each value
is one line. JSON has line breaks only between its tokens.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import click
import msgspec

P = ParamSpec("P")
R = TypeVar("R")


def format_options(verb: Callable[P, R]) -> Callable[..., R]:
    """Add `--json`/`--table`; the verb gets `as_json`. Without either option the terminal
    decides.
    """

    @click.option(
        "--json/--table",
        "as_json",
        default=None,
        help="One JSON value a line, or a table; default: a table on a terminal.",
    )
    @functools.wraps(verb)
    def with_format(*args: Any, as_json: bool | None, **kwargs: Any) -> R:
        chosen = not sys.stdout.isatty() if as_json is None else as_json
        return verb(*args, as_json=chosen, **kwargs)  # type: ignore[arg-type]

    return with_format


def one_line(value: bytes) -> bytes:
    """Return a JSON value without line breaks (JSON strings cannot contain any)."""
    if b"\n" in value or b"\r" in value:
        value = value.replace(b"\n", b" ").replace(b"\r", b" ")
    return value


def write_line(value: bytes) -> None:
    """Write one JSON value as a line of standard output."""
    click.echo(one_line(value))


def note(text: str) -> None:
    """Write a line for the user to standard error."""
    click.echo(text, err=True)


def show_object(answer: bytes, *, as_json: bool) -> None:
    """Print a response that is one JSON object."""
    if as_json:
        write_line(answer)
        return
    fields = msgspec.json.decode(answer, type=dict[str, Any])
    rows: list[tuple[str, str]] = []
    for name, value in fields.items():
        if name == "performance":
            continue
        if isinstance(value, Mapping):
            rows.extend((f"{name}.{inner}", cell(v)) for inner, v in value.items())
        else:
            rows.append((name, cell(value)))
    show_table(("", ""), rows)


def cell(value: object) -> str:
    """A JSON value as the text of a cell."""
    if isinstance(value, str):
        return value
    return msgspec.json.encode(value).decode()


def show_table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[str] = ()
) -> None:
    """Print a table; columns named in `numbers` are right-aligned. Without `heads` there is no
    header line.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=any(head), pad_edge=False, header_style="bold")
    for name in head:
        table.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
    for row in rows:
        # `Text`, because brackets in data are no markup.
        table.add_row(*(Text(text) for text in row))
    print_rich(table)


def print_rich(what: Any) -> None:
    """Print a rich table.

    Raises `BrokenPipeError` if the reader of the output is gone, as for any other line.
    """
    from rich.console import Console

    class _Console(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would end the process with exit code 1

    _Console(highlight=False, soft_wrap=False).print(what)


def confirm(question: str, *, yes: bool) -> None:
    """Ask before an action that cannot be undone; without a terminal only `--yes` confirms.

    Raises `UsageError` without a terminal, `Abort` (exit code 1) for an answer that is not yes.
    """
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise click.UsageError(
            "nothing was deleted: --yes is missing, and there is no terminal for the question"
        )
    click.confirm(question, abort=True, err=True)
