"""Option types for durations and sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from topics_server.values.texts.amounts import (
    SECOND_MS,
    duration_text,
    parse_duration,
    parse_size,
    size_text,
)

if TYPE_CHECKING:
    _Base = click.ParamType[int]
else:
    _Base = click.ParamType  # click has generic types since 8.4 only


class Amount(_Base):
    """A duration in milliseconds or a size in bytes, between two bounds.

    `plain_ms` is the unit of a plain number in a duration: 1 for milliseconds, 1000 for seconds.
    """

    def __init__(
        self, kind: str, least: int = 0, most: int | None = None, *, plain_ms: int = 1
    ) -> None:
        self.name = kind
        self._least = least
        self._most = most
        self._plain_ms = plain_ms

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse a text into an amount; a number (a default) is returned unchanged."""
        if isinstance(value, int):
            return value
        try:
            if self.name == "duration":
                found = parse_duration(value, plain_ms=self._plain_ms)
            else:
                found = parse_size(value)
        except ValueError as error:
            self.fail(f"{error}.", param, ctx)
        if found < self._least:
            self.fail(
                f"{value!r} is too small; the minimum is {self._text(self._least)}.", param, ctx
            )
        if self._most is not None and found > self._most:
            self.fail(
                f"{value!r} is too large; the maximum is {self._text(self._most)}.", param, ctx
            )
        return found

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """The placeholder of the value in a help text."""
        return self.name.upper()

    def _text(self, amount: int) -> str:
        return duration_text(amount) if self.name == "duration" else size_text(amount)


def duration(least: int = 0, most: int | None = None) -> Amount:
    """An option type for durations in milliseconds."""
    return Amount("duration", least, most)


def seconds(least_ms: int = 0, most_ms: int | None = None) -> Amount:
    """An option type for durations in milliseconds; a plain number means seconds."""
    return Amount("duration", least_ms, most_ms, plain_ms=SECOND_MS)


def size(least: int = 0) -> Amount:
    """An option type for sizes in bytes."""
    return Amount("size", least)


DURATION: Final = duration()
SIZE: Final = size()
