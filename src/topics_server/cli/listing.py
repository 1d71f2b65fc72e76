"""Lists topics and routers: reads the pages of the server, prints rows as JSON or as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeVar
from urllib.parse import urlencode

import msgspec

from topics_server.cli.connection import Failure, ServerConnection
from topics_server.cli.details import DETAILED_MAX
from topics_server.cli.output import note, show_table, write_line

PAGE_SIZE: Final = 1000
T = TypeVar("T")


def rows_of(
    client: ServerConnection, path: str, member: str, asked: Mapping[str, str | None]
) -> Iterator[msgspec.Raw]:
    """The rows under `member` of every page of the list at `path`."""
    query = {name: value for name, value in asked.items() if value is not None}
    query["page_size"] = str(PAGE_SIZE)
    while True:
        answer = client.call("GET", f"{path}?{urlencode(query)}", repeatable=True)
        page = msgspec.json.decode(answer, type=dict[str, msgspec.Raw])
        if member not in page:
            raise Failure(f"bad_answer: the answer has no {member!r}")
        yield from msgspec.json.decode(page[member], type=list[msgspec.Raw])
        cursor = msgspec.json.decode(page.get("next_cursor", b"null"), type=str | None)
        if cursor is None:
            return
        assert cursor != query.get("cursor"), "a page moves its cursor"
        query["cursor"] = cursor


def show_rows(
    rows: Iterable[msgspec.Raw],
    kind: type[T],
    cells: Callable[[T, bool], list[str] | None],
    columns: Sequence[str],
    *,
    numbers: Sequence[str],
    limit_note: str,
    as_json: bool,
) -> None:
    """Print each row as one JSON line, or all of them as a table.

    `cells` makes a table line of a row, or `None` if the entry was removed since it was listed. Its
    flag is true for the first `DETAILED_MAX` rows, for which it requests details from the server.
    `limit_note` names the columns that the other rows lack.
    """
    if as_json:
        for row in rows:
            write_line(bytes(row))
        return
    found = list(map(msgspec.json.Decoder(kind).decode, rows))
    lines = [cells(row, number < DETAILED_MAX) for number, row in enumerate(found)]
    show_table(columns, filter(None, lines), numbers=numbers)
    if len(found) > DETAILED_MAX:
        note(f"{limit_note} of the first {DETAILED_MAX:,}; --prefix lists fewer")
