"""`topics routers`: lists routers or draws their graph."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Final

import click
import msgspec

from topics_server.cli.connection import CallRefused, ServerConnection, router_path, server_options
from topics_server.cli.output import format_options
from topics_server.cli.routing.graph import Edge, dot, tree
from topics_server.cli.routing.router import routers, show_list

_EDGE: Final = msgspec.json.Decoder(Edge)


class _Row(msgspec.Struct):
    router: str


_ROW: Final = msgspec.json.Decoder(_Row)


HELP = """List routers, or show with --graph how records flow.

\b
topics routers --graph                      a tree
topics routers --graph | dot -Tsvg > a.svg  a drawing
"""


@click.command("routers", help=HELP)
@click.option(
    "--graph",
    type=click.Choice(["auto", "tree", "dot"]),
    is_flag=False,
    flag_value="auto",
    help="A picture: a tree, or DOT for Graphviz; auto: a tree on a terminal, else DOT.",
)
@click.option("--prefix", help="Only names that start with this.")
@click.option("--source", metavar="TOPIC", help="Only those that read this topic.")
@click.option("--dest", metavar="TOPIC", help="Only those that write to this topic.")
@format_options
@server_options
def command(
    graph: str | None, client: ServerConnection, as_json: bool, **asked: str | None
) -> None:
    """See `HELP`."""
    if graph is None:
        show_list(client, as_json=as_json, asked=asked)
        return
    is_tree = graph == "tree" or (graph == "auto" and sys.stdout.isatty())
    draw = tree if is_tree else dot
    for line in draw(_edges(client, asked)):
        click.echo(line)


def _edges(client: ServerConnection, asked: dict[str, str | None]) -> Iterator[Edge]:
    """Every router's state; the list has neither filter nor position."""
    for row in routers(client, asked):
        name = _ROW.decode(row).router
        try:
            answer = client.call("GET", router_path(name), repeatable=True)
        except CallRefused as refused:
            if refused.code != "router_not_found":
                raise
            continue  # removed since the list was made
        yield _EDGE.decode(answer)
