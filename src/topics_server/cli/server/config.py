"""`topics config`: shows the settings and their sources, secrets masked.

Exit code 0: a server would start with these settings. 1: a server would refuse to start; standard
error has the reason. 2: a value is not allowed, or two values exclude each other.
"""

from __future__ import annotations

from typing import Any

import click
import msgspec

from topics_server.cli.connection import DEFAULT_URL
from topics_server.cli.output import format_options, note, show_table, write_line
from topics_server.cli.server.flags import loaded, settings_flags, shown
from topics_server.settings import refusal, variable


@click.command("config")
@settings_flags
@click.option("--url", envvar="TOPICS_URL", default=DEFAULT_URL, hidden=True)
@click.option("--token", envvar="TOPICS_TOKEN", hidden=True)
@format_options
@click.pass_context
def command(
    ctx: click.Context, /, url: str, token: str | None, as_json: bool, **flags: Any
) -> None:
    """Show every setting, its value and where it comes from: default, environment or flag.

    The last two settings are for verbs that call a server.
    """
    found = loaded(flags)
    rows: list[tuple[str, str, str]] = [
        (variable(name), shown(name, getattr(found.settings, name)), source)
        for name, source in found.sources.items()
    ]
    client = (("TOPICS_URL", "url", url), ("TOPICS_TOKEN", "token", "***" if token else "-"))
    rows += [(name, value, _source(ctx, parameter)) for name, parameter, value in client]
    if as_json:
        for name, value, source in rows:
            fields = {"name": name, "value": None if value == "-" else value, "source": source}
            write_line(msgspec.json.encode(fields))
    else:
        show_table(("setting", "value", "from"), rows)
    for line in found.warnings:
        note(line)
    if (reason := refusal(found.settings)) is not None:
        note(f"the server would not start: {reason}")
        ctx.exit(1)


def _source(ctx: click.Context, parameter: str) -> str:
    source = ctx.get_parameter_source(parameter)
    assert source is not None, f"{parameter} is a parameter"
    return {"COMMANDLINE": "flag", "ENVIRONMENT": "environment"}.get(source.name, "default")
