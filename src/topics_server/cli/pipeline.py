"""`topics pipeline`: from the log to a lake with one command; the work is `spark_jobs.pipeline`."""

from __future__ import annotations

import importlib
import importlib.util

import click

_NO_SPARK = (
    "the pipeline needs PySpark and pyarrow: pip install 'topics-server[spark]' "
    "(in a checkout: ./run spark-setup)"
)


@click.command(
    name="pipeline", context_settings={"ignore_unknown_options": True}, add_help_option=False
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(ctx: click.Context, words: tuple[str, ...]) -> None:
    """Seal, export or convert, and run the listed jobs by day: `pipeline init`, `pipeline run`."""
    if importlib.util.find_spec("spark_jobs") is None:
        click.echo("the package spark_jobs is not installed beside the server", err=True)
        raise SystemExit(2)
    needs_spark = words[:1] == ("run",) and not {"-h", "--help"} & set(words)
    missing = [each for each in ("pyspark", "pyarrow") if importlib.util.find_spec(each) is None]
    if needs_spark and missing:
        click.echo(_NO_SPARK, err=True)
        raise SystemExit(2)
    module = importlib.import_module("spark_jobs.pipeline")
    if words[:1] in (("-h",), ("--help",)):
        parser = module.arguments()
        parser.prog = ctx.command_path
        click.echo(f"U{parser.format_help()[1:]}", nl=False)
        return
    raise SystemExit(module.main(list(words)))
