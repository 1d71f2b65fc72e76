"""The options of `read`, `tail` and `watch` that select records."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import click
import msgspec

P = ParamSpec("P")
R = TypeVar("R")


def filter_options(verb: Callable[P, R]) -> Callable[..., R]:
    """Add the options; the verb gets them as `passing`, a filter (None: without these options)."""

    @click.option("--tag", multiple=True, help="Only records with this tag; may be repeated.")
    @click.option("--tag-prefix", metavar="PREFIX", help="Only records whose tag starts with this.")
    @click.option(
        "--filter", "wanted", metavar="JSON", help='Only records that pass, e.g. ["Not", "paid"].'
    )
    @functools.wraps(verb)
    def with_filter(
        *args: Any, tag: tuple[str, ...], tag_prefix: str | None, wanted: str | None, **kwargs: Any
    ) -> R:
        passing = _joined(tag, tag_prefix, wanted)
        return verb(*args, passing=passing, **kwargs)

    return with_filter


def _joined(tags: tuple[str, ...], prefix: str | None, wanted: str | None) -> Any:
    """The filter that requires every option; None without options."""
    parts: list[Any] = []
    if tags:
        parts.append(["tag", "In", list(tags)])
    if prefix is not None:
        parts.append(["tag", "Glob", f"{prefix}*"])
    if wanted is not None:
        try:
            parts.append(msgspec.json.decode(wanted.encode()))
        except UnicodeEncodeError:
            raise click.UsageError("--filter is not UTF-8 text") from None
        except msgspec.DecodeError as error:
            raise click.UsageError(f"--filter is not JSON: {error}") from None
    if len(parts) < 2:
        return parts[0] if parts else None
    return ["And", *parts]
