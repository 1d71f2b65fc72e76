"""Finds `spark_jobs`, its packages and its help for the analytics verbs.

`spark_jobs` is a package of its own besides the server's. Only the analytics verbs import it, when
they run.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, Final

import click

FORWARDED: Final = {"ignore_unknown_options": True}


def load(module: str) -> Any:
    """Import a module of `spark_jobs`; exit with code 2 if the package is not installed."""
    if importlib.util.find_spec("spark_jobs") is None:
        click.echo("the package spark_jobs is not installed beside the server", err=True)
        raise SystemExit(2)
    return importlib.import_module(f"spark_jobs.{module}")


def require(what: str, need: str) -> None:
    """Exit with code 2 if a package in `need` is missing; the message says what to install."""
    installing = load("running.installing")
    if installing.missing(need):
        click.echo(installing.how(what, need), err=True)
        raise SystemExit(2)


def run(ctx: click.Context, module: str, words: tuple[str, ...], *, is_help: bool) -> None:
    """Run a module's `main`, or print its parser's help under the command name that was typed."""
    loaded = load(module)
    if is_help:
        parser = loaded.arguments()
        parser.prog = ctx.command_path
        click.echo(f"U{parser.format_help()[1:]}", nl=False)
        return
    raise SystemExit(loaded.main(list(words)))
