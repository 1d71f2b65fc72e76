"""`topics export`: records as Parquet, NDJSON or Arrow files; the work is `spark_jobs.export`."""

from __future__ import annotations

import click

from topics_server.cli import analytics


@click.command(name="export", context_settings=analytics.FORWARDED, add_help_option=False)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(ctx: click.Context, words: tuple[str, ...]) -> None:
    """Write records as files by topic and day; each run goes on where the last one stopped."""
    analytics.run(ctx, "export", words, is_help=bool({"-h", "--help"} & set(words)))
