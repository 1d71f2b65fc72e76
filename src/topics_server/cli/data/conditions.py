"""The options of a conditional append, and the condition that they make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click
import msgspec

from topics_server.cli.json_input import json_value

F = TypeVar("F", bound=Callable[..., Any])


def condition_options(function: F) -> F:
    """Add the `--if-…` options; the verb gets their values as the keyword arguments of
    `condition_of`.
    """
    for option in (
        click.option(
            "--if-exists/--if-absent", default=None, help="Only if the topic exists, or does not."
        ),
        click.option(
            "--if-after",
            type=click.IntRange(min=0),
            help="With --if-none-match: only later records count.",
        ),
        click.option(
            "--if-none-match",
            metavar="FILTER",
            help="Only if no live record matches: a tag, or a filter as JSON.",
        ),
        click.option(
            "--if-epoch", type=click.IntRange(min=0), help="Only if the topic has this epoch."
        ),
        click.option(
            "--if-head", type=click.IntRange(min=0), help="Only if the topic's head is this seq."
        ),
    ):
        function = option(function)
    return function


def condition_of(
    if_head: int | None,
    if_epoch: int | None,
    if_none_match: str | None,
    if_after: int | None,
    if_exists: bool | None,
) -> bytes | None:
    """The condition as JSON; None without any of the options."""
    fields: dict[str, object] = {
        "head_seq": if_head,
        "epoch": if_epoch,
        "none_match": None if if_none_match is None else _filter(if_none_match),
        "after": if_after,
        "exists": if_exists,
    }
    given = {name: value for name, value in fields.items() if value is not None}
    if if_after is not None and if_none_match is None:
        raise click.UsageError("--if-after needs --if-none-match")
    return msgspec.json.encode(given) if given else None


def _filter(text: str) -> object:
    """A filter is a JSON list or a quoted string; any other text is a tag."""
    if text[:1] not in ("[", '"'):
        return text
    return json_value(text.encode(), "--if-none-match")
