"""`topics export`: writes records as Parquet, NDJSON or Arrow files."""

from __future__ import annotations

import click

from topics_server.cli.analytics import spark_package


@click.command(name="export", context_settings=spark_package.FORWARDED, add_help_option=False)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(ctx: click.Context, words: tuple[str, ...]) -> None:
    """Write records as files by topic and day; each run continues where the last one stopped."""
    spark_package.run(ctx, "export", words, is_help=bool({"-h", "--help"} & set(words)))
