"""Option types for durations and sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from topics_server.amounts import (
    SECOND_MS,
    duration_text,
    parse_duration,
    parse_size,
    size_text,
)

if TYPE_CHECKING:
    _Base = click.ParamType[int]
else:
    _Base = click.ParamType  # generic since click 8.4 only


class Amount(_Base):
    """A duration in milliseconds or a size in bytes, between two bounds.

    `plain_ms` says what a plain number of a duration counts: 1 is milliseconds, 1000 is seconds.
    """

    def __init__(
        self, kind: str, least: int = 0, most: int | None = None, *, plain_ms: int = 1
    ) -> None:
        self.name = kind
        self._least = least
        self._most = most
        self._plain_ms = plain_ms

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The amount of a text; a number (a default) is what it is."""
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
            self.fail(f"{value!r} is too little: {self._told(self._least)} at least.", param, ctx)
        if self._most is not None and found > self._most:
            self.fail(f"{value!r} is too much: {self._told(self._most)} at most.", param, ctx)
        return found

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """What stands for it in a help text."""
        return self.name.upper()

    def _told(self, amount: int) -> str:
        return duration_text(amount) if self.name == "duration" else size_text(amount)


def duration(least: int = 0, most: int | None = None) -> Amount:
    """Milliseconds."""
    return Amount("duration", least, most)


def seconds(least_ms: int = 0, most_ms: int | None = None) -> Amount:
    """Milliseconds too, but a plain number counts seconds."""
    return Amount("duration", least_ms, most_ms, plain_ms=SECOND_MS)


def size(least: int = 0) -> Amount:
    """Bytes."""
    return Amount("size", least)


DURATION: Final = duration()
SIZE: Final = size()
