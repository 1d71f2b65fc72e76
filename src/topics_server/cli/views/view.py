"""`topics view`: put, get, ls, query, watch, rebuild and rm of views."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import click
import msgspec

from topics_server.cli.connection import (
    Failure,
    ServerConnection,
    name_in_path,
    server_options,
    topic_path,
)
from topics_server.cli.output import (
    confirm,
    format_options,
    show_object,
    show_table,
    write_line,
)
from topics_server.cli.views.definition_file import parse
from topics_server.runtime.clock import pause

_POLL_S: Final = 0.5
_SQL_FILE: Final = click.Path(exists=True, dir_okay=False, path_type=Path)


class _Stats(msgspec.Struct):
    status: str
    processed_sequence: int
    lag: int
    bytes: int
    last_error: dict[str, Any] | None = None


class _Row(msgspec.Struct):
    view: str
    stats: _Stats


class _List(msgspec.Struct):
    views: list[_Row]


_LIST: Final = msgspec.json.Decoder(_List)


class _QueryAnswer(msgspec.Struct):
    columns: list[str]
    rows: list[list[Any]]
    processed_sequence: int
    truncated: bool


_QUERY_ANSWER: Final = msgspec.json.Decoder(_QueryAnswer)


class _Dropped(msgspec.Struct):
    deleted: bool


_DROPPED: Final = msgspec.json.Decoder(_Dropped)


@click.group("view", context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Define, query and remove views: tables that follow a topic, in SQL."""


def _path(topic: str, view: str, verb: str = "") -> str:
    return f"{topic_path(topic)}/views/{name_in_path(view)}" + (f"/{verb}" if verb else "")


@command.command("put")
@click.argument("topic")
@click.argument("view")
@click.argument(
    "file", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option("--count-by-tag", is_flag=True, help="Count the records of each tag.")
@click.option("--latest-by-tag", is_flag=True, help="Keep the newest record of each tag.")
@click.option("--latest-by-key", metavar="POINTER", help="Keep the newest record of each key.")
@click.option("--timeseries", metavar="BUCKET", help="Count the records of each interval: 1m, 1h.")
@click.option(
    "--sum",
    "sums",
    multiple=True,
    metavar="POINTER",
    help="With --timeseries: also sum this number.",
)
@format_options
@server_options
def put(
    topic: str,
    view: str,
    file: Path | None,
    count_by_tag: bool,
    latest_by_tag: bool,
    latest_by_key: str | None,
    timeseries: str | None,
    sums: tuple[str, ...],
    client: ServerConnection,
    as_json: bool,
) -> None:
    """Define the VIEW of TOPIC by an SQL FILE, or by one of the options.

    The file has sections that begin with a line -- schema, -- apply or -- query NAME. apply runs
    for each record, with :seq :ts :node :tag :data :meta.
    """
    shortcuts: list[dict[str, Any]] = []
    if count_by_tag:
        shortcuts.append({"count_by_tag": True})
    if latest_by_tag:
        shortcuts.append({"latest_by_tag": True})
    if latest_by_key is not None:
        shortcuts.append({"latest_by_key": latest_by_key})
    if timeseries is not None:
        shortcuts.append({"timeseries": {"bucket": timeseries, "sum": list(sums)}})
    elif sums:
        raise click.UsageError("--sum needs --timeseries")
    if len(shortcuts) + (file is not None) != 1:
        raise click.UsageError("give either FILE or one of the options that define a view")
    if file is None:
        body: dict[str, Any] = {"shortcut": shortcuts[0]}
    else:
        try:
            body = parse(file.read_text(encoding="utf-8"), str(file))
        except UnicodeDecodeError:
            raise Failure(f"{file} is not UTF-8") from None
    encoded = msgspec.json.encode(body)
    show_object(client.call("PUT", _path(topic, view), encoded, repeatable=True), as_json=as_json)


@command.command("get")
@click.argument("topic")
@click.argument("view")
@format_options
@server_options
def get(topic: str, view: str, client: ServerConnection, as_json: bool) -> None:
    """Show the definition of a view and its progress."""
    show_object(client.call("GET", _path(topic, view), repeatable=True), as_json=as_json)


@command.command("ls")
@click.argument("topic")
@format_options
@server_options
def ls(topic: str, client: ServerConnection, as_json: bool) -> None:
    """List the views of TOPIC."""
    answer = client.call("GET", f"{topic_path(topic)}/views", repeatable=True)
    if as_json:
        write_line(answer)
        return
    rows = [
        [
            row.view,
            row.stats.status,
            f"{row.stats.processed_sequence:,}",
            f"{row.stats.lag:,}",
            f"{row.stats.bytes:,}",
            "" if row.stats.last_error is None else str(row.stats.last_error["message"]),
        ]
        for row in _LIST.decode(answer).views
    ]
    columns = ("view", "status", "processed", "lag", "bytes", "error")
    show_table(columns, rows, numbers=("processed", "lag", "bytes"))


@command.command("query")
@click.argument("topic")
@click.argument("view")
@click.argument("sql")
@click.option("--param", "-p", "params", multiple=True, metavar="NAME=VALUE", help="A parameter.")
@click.option(
    "--after",
    type=click.IntRange(min=0),
    metavar="SEQ",
    help="Wait until the view has this record.",
)
@format_options
@server_options
def query(
    topic: str,
    view: str,
    sql: str,
    params: tuple[str, ...],
    after: int | None,
    client: ServerConnection,
    as_json: bool,
) -> None:
    """Print the rows of SQL, or of the named query of the view.

    A word without spaces is the name of a query of the view.
    """
    _show_rows(_asked(client, topic, view, sql, params, after), as_json=as_json)


def _asked(
    client: ServerConnection,
    topic: str,
    view: str,
    sql: str,
    params: tuple[str, ...],
    after: int | None,
) -> bytes:
    body: dict[str, Any] = {"query" if len(sql.split()) == 1 else "sql": sql}
    body["params"] = dict(_param(text) for text in params)
    path = _path(topic, view, "query") + (f"?{urlencode({'after': after})}" if after else "")
    return client.call("POST", path, msgspec.json.encode(body), repeatable=True)


def _param(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise click.UsageError(f"{text!r} is not NAME=VALUE")
    try:
        number = msgspec.json.decode(value)
    except msgspec.DecodeError:
        return name, value
    is_scalar = number is None or isinstance(number, int | float | str)
    return name, number if is_scalar else value


def _show_rows(answer: bytes, *, as_json: bool) -> None:
    found = _QUERY_ANSWER.decode(answer)
    if as_json:
        for row in found.rows:
            write_line(msgspec.json.encode(dict(zip(found.columns, row, strict=True))))
        return
    cells = [["" if value is None else _shown(value) for value in row] for row in found.rows]
    show_table(found.columns, cells)
    if found.truncated:
        raise Failure("there are more rows than an answer may have; narrow the query")


def _shown(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


@command.command("watch")
@click.argument("topic")
@click.argument("view")
@click.argument("sql")
@click.option("--param", "-p", "params", multiple=True, metavar="NAME=VALUE", help="A parameter.")
@format_options
@server_options
def watch(
    topic: str,
    view: str,
    sql: str,
    params: tuple[str, ...],
    client: ServerConnection,
    as_json: bool,
) -> None:
    """Print the rows of a query now and whenever they change, until Ctrl-C."""
    before: list[list[Any]] | None = None
    while True:
        answer = _asked(client, topic, view, sql, params, None)
        rows = _QUERY_ANSWER.decode(answer).rows
        if rows != before:
            before = rows
            _show_rows(answer, as_json=as_json)
        pause(_POLL_S)


@command.command("rebuild")
@click.argument("topic")
@click.argument("view")
@click.option("--skip", type=click.IntRange(min=1), metavar="SEQ", help="Skip this failing record.")
@format_options
@server_options
def rebuild(
    topic: str, view: str, skip: int | None, client: ServerConnection, as_json: bool
) -> None:
    """Rebuild a view while the old one answers, or skip the record at which it stopped."""
    body = msgspec.json.encode({} if skip is None else {"skip": skip})
    show_object(client.call("POST", _path(topic, view, "rebuild"), body), as_json=as_json)


@command.command("rm")
@click.argument("topic")
@click.argument("view")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@format_options
@server_options
def rm(topic: str, view: str, yes: bool, client: ServerConnection, as_json: bool) -> None:
    """Remove a view and its rows; its topic stays."""
    confirm(f"Remove view {view} of {topic}?", yes=yes)
    answer = client.call("DELETE", _path(topic, view))
    if not _DROPPED.decode(answer).deleted:
        raise Failure(f"view_not_found: topic {topic!r} has no view {view!r}")
    show_object(answer, as_json=as_json)
