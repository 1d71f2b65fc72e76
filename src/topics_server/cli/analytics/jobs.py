"""`topics jobs`: lists the analytics jobs or runs one with Spark."""

from __future__ import annotations

import subprocess
import sys

import click

from topics_server.cli.analytics import spark_package

HELP = """List the analytics jobs, or run one of them with Spark.

\b
topics jobs                     list the jobs
topics jobs NAME --help         the options of one job
topics jobs NAME DATA_DIR ...   run it over a data directory's sealed segments
"""


@click.command(
    name="jobs",
    help=HELP,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def command(words: tuple[str, ...]) -> None:
    """See `HELP`."""
    known = spark_package.load("catalog")
    catalog: dict[str, str] = known.JOBS
    if not words:
        width = max(map(len, catalog))
        click.echo("Usage: topics jobs NAME DATA_DIR [OPTIONS]\n")
        for name, about in catalog.items():
            click.echo(f"  {name:<{width}}  {about}")
        click.echo("\nEach reads the sealed segments of a data directory; NAME --help says more.")
        return
    name, *rest = words
    if name not in catalog:
        click.echo(f"there is no job {name}; there are: {', '.join(catalog)}", err=True)
        raise SystemExit(2)
    need = known.WITHOUT_SPARK.get(name)
    spark_package.require(f"{name} needs" if need else "jobs need", need or "spark")
    done = subprocess.run([sys.executable, "-m", f"spark_jobs.{name}", *rest], check=False)
    raise SystemExit(done.returncode)
