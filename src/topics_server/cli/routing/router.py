"""`topics router`: put, get, ls and rm of routers (§6)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import click
import msgspec

from topics_server.cli.connection import Failure, ServerConnection, router_path, server_options
from topics_server.cli.details import RouterDetails, fetched
from topics_server.cli.listing import rows_of, show_rows
from topics_server.cli.output import confirm, format_options, show_object

COLUMNS: Final = ("router", "source", "dest", "guarantee", "forwarded", "lag", "state")
NUMBERS: Final = ("forwarded", "lag")


class _Dropped(msgspec.Struct):
    deleted: bool


_DROPPED: Final = msgspec.json.Decoder(_Dropped)


@click.group("router", context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Create, show, list and remove routers.

    A router copies every record appended to its source into its destination.
    """


@command.command("put")
@click.argument("name")
@click.option("--source", required=True, metavar="TOPIC", help="Where records come from.")
@click.option("--dest", required=True, metavar="TOPIC", help="Where copies go.")
@click.option("--filter-tag", metavar="TAG", help="Only records with exactly this tag.")
@click.option("--filter-prefix", metavar="TEXT", help="Only records whose tag starts with this.")
@click.option("--no-preserve-node", is_flag=True, help="Copies do not keep the writer's node.")
@click.option("--no-preserve-tag", is_flag=True, help="Copies do not keep the tag.")
@click.option(
    "--no-create-dest", is_flag=True, help="Do not create the destination; it must exist."
)
@click.option("--allow-cycle", is_flag=True, help="Allow a cycle of routers.")
@click.option(
    "--exactly-once", is_flag=True, help="Give each copy a key, so that none is made twice."
)
@click.option(
    "--from-earliest", is_flag=True, help="A new router starts with the first record of the source."
)
@format_options
@server_options
def put(
    name: str,
    source: str,
    dest: str,
    filter_tag: str | None,
    filter_prefix: str | None,
    client: ServerConnection,
    as_json: bool,
    **flags: bool,
) -> None:
    """Create the router NAME, or replace its definition.

    Options that you leave out take their defaults, also when the router exists. A usual name is
    'SOURCE->DEST'; quote it for the shell.
    """
    if filter_tag is not None and filter_prefix is not None:
        raise click.UsageError("give --filter-tag or --filter-prefix, not both")
    body: dict[str, Any] = {"source": source, "dest": dest}
    if filter_tag is not None:
        body["filter"] = ("tag", "Eq", filter_tag)
    if filter_prefix is not None:
        body["filter"] = ("tag", "Glob", f"{filter_prefix}*")
    for flag in ("preserve_node", "preserve_tag", "create_dest"):
        if flags[f"no_{flag}"]:
            body[flag] = False
    if flags["allow_cycle"]:
        body["allow_cycle"] = True
    if flags["exactly_once"]:
        body["guarantee"] = "exactly_once"
    if flags["from_earliest"]:
        body["from"] = "earliest"
    encoded = msgspec.json.encode(body)
    show_object(client.call("PUT", router_path(name), encoded, repeatable=True), as_json=as_json)


@command.command("get")
@click.argument("name")
@format_options
@server_options
def get(name: str, client: ServerConnection, as_json: bool) -> None:
    """Show the definition and the progress of the router NAME, and why it is stalled."""
    show_object(client.call("GET", router_path(name), repeatable=True), as_json=as_json)


@command.command("ls")
@click.option("--prefix", help="Only names that start with this.")
@click.option("--source", metavar="TOPIC", help="Only those that read this topic.")
@click.option("--dest", metavar="TOPIC", help="Only those that write to this topic.")
@format_options
@server_options
def ls(client: ServerConnection, as_json: bool, **asked: str | None) -> None:
    """List routers."""
    show_list(client, as_json=as_json, asked=asked)


@command.command("rm")
@click.argument("name")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@format_options
@server_options
def rm(name: str, yes: bool, client: ServerConnection, as_json: bool) -> None:
    """Remove the router NAME; its copies stay."""
    confirm(f"Remove router {name}? It will copy no further records.", yes=yes)
    answer = client.call("DELETE", router_path(name))
    if not _DROPPED.decode(answer).deleted:
        raise Failure(f"router_not_found: there was no router {name!r}")
    show_object(answer, as_json=as_json)


def show_list(client: ServerConnection, *, as_json: bool, asked: dict[str, str | None]) -> None:
    """Print every router that the query matches. A table also shows lag and state."""
    show_rows(
        routers(client, asked),
        RouterDetails,
        partial(_cells, client),
        COLUMNS,
        numbers=NUMBERS,
        limit_note="lag and state are those",
        as_json=as_json,
    )


def _cells(client: ServerConnection, row: RouterDetails, has_details: bool) -> list[str] | None:
    """One line of the table; `None` for a router that was removed since it was listed."""
    lag = state = ""
    if has_details:
        found = fetched(client, router_path(row.router), RouterDetails)
        if found is None:
            return None
        row, lag, state = found, f"{found.lag:,}", found.state
    return [row.router, row.source, row.dest, row.guarantee, f"{row.forwarded_total:,}", lag, state]


def routers(client: ServerConnection, asked: dict[str, str | None]) -> Iterator[msgspec.Raw]:
    """The rows of the list that match the query, read page by page."""
    return rows_of(client, "/v0/routers", "routers", asked)
