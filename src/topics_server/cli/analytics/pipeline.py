"""`topics pipeline`: from the log to a lake with one command."""

from __future__ import annotations

import click

from topics_server.cli.analytics import spark_package


@click.command(name="pipeline", context_settings=spark_package.FORWARDED, add_help_option=False)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(ctx: click.Context, words: tuple[str, ...]) -> None:
    """Seal, export or convert, and run the listed jobs by day: `pipeline init`, `pipeline run`."""
    if words[:1] == ("run",) and not {"-h", "--help"} & set(words):
        spark_package.require("the pipeline needs", "spark")
    # The parser of the pipeline module prints `pipeline run --help`.
    spark_package.run(ctx, "pipeline", words, is_help=words[:1] in (("-h",), ("--help",)))
