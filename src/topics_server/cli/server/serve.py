"""`topics serve`: reads the settings, refuses unsafe ones, runs the server.

Only this module of the command line imports the server.
"""

from __future__ import annotations

from typing import Any

import click
import msgspec

from topics_server.cli.server.flags import loaded, settings_flags
from topics_server.settings import forget_secrets, refusal


@click.command("serve")
@settings_flags
@click.pass_context
def command(ctx: click.Context, /, **flags: Any) -> None:
    """Start the server in the foreground; SIGTERM or Ctrl-C stops it cleanly.

    Every option is also an environment variable; an option given here wins.
    """
    found = loaded(flags)
    reason = refusal(found.settings)
    if reason is not None:
        click.echo(reason, err=True)
        ctx.exit(2)
    for line in found.warnings:
        if found.settings.log_format == "json":
            line = msgspec.json.encode({"level": "warning", "event": line}).decode()
        click.echo(line, err=True)
    forget_secrets()
    from topics_server.server import run

    ctx.exit(run(found.settings))
