"""`topics export`: records as Parquet, NDJSON or Arrow files; the work is `spark_jobs.export`."""

from __future__ import annotations

import importlib
import importlib.util

import click


@click.command(
    name="export", context_settings={"ignore_unknown_options": True}, add_help_option=False
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(ctx: click.Context, words: tuple[str, ...]) -> None:
    """Write records as files by topic and day; each run goes on where the last one stopped."""
    if importlib.util.find_spec("spark_jobs") is None:
        click.echo("the package spark_jobs is not installed beside the server", err=True)
        raise SystemExit(2)
    if {"-h", "--help"} & set(words):
        parser = importlib.import_module("spark_jobs.export").arguments()
        parser.prog = ctx.command_path
        click.echo(f"U{parser.format_help()[1:]}", nl=False)
        return
    raise SystemExit(importlib.import_module("spark_jobs.export").main(list(words)))
