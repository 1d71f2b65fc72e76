"""The kinds of settings: the default, the allowed values in words, and how text becomes a value.

`settings` declares one `SettingField` for each variable. A `read` function takes what a
variable, an option or a caller gave and returns the value; it raises `ValueError` for everything
else. A value of the field's own type passes unchanged, so that programs need not write text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from topics_server.runtime.amounts import parse_duration, parse_size

Read = Callable[[object], object]

# `int` would accept "1_000", " 7" and digits of other scripts as well.
_WHOLE: Final = re.compile(r"-?[0-9]{1,20}")
_SWITCHES: Final = {"1": True, "true": True, "0": False, "false": False}


class SettingField(msgspec.Struct, frozen=True):
    """One setting. `default` is None where the setting may be absent, or `make_default` is given.

    `allowed` and `description` are for people.
    """

    read: Read
    allowed: str
    description: str
    default: Any = None
    make_default: Callable[[], object] | None = None
    is_number: bool = False

    def default_value(self) -> object:
        """The value of a setting that nobody gave."""
        return self.default if self.make_default is None else self.make_default()

    def value_of(self, name: str, given: object) -> object:
        """The value of what was given for the setting `name`. Raises `ValueError`."""
        if given is None and self.default is None and self.make_default is None:
            return None
        if self.is_number and isinstance(given, str):
            given = number(name, given)
        return self.read(given)


def setting(
    default: Any,
    read: Read,
    allowed: str,
    description: str,
    *,
    make_default: Callable[[], object] | None = None,
    is_number: bool = False,
) -> Any:
    """Declare a class variable as a setting; an instance holds the value under the same name."""
    return SettingField(read, allowed, description, default, make_default, is_number)


def declared(settings: type) -> dict[str, SettingField]:
    """The settings that a class declares, in their order."""
    return {
        name: field for name, field in vars(settings).items() if isinstance(field, SettingField)
    }


def number(name: str, given: str) -> int:
    """The number in a text; one of bytes or milliseconds may have a unit, as `64MiB` or `5s`.

    The end of the setting's name tells which.
    """
    if _WHOLE.fullmatch(given) is not None:
        return int(given)
    for suffix, parse in (("_ms", parse_duration), ("_bytes", parse_size)):
        if name.endswith(suffix):
            return parse(given)
    raise ValueError("not a whole number")


def in_range(low: int, high: int) -> Read:
    """A whole number of this range."""

    def read(given: object) -> int:
        if type(given) is not int or not low <= given <= high:
            raise ValueError("not a whole number of this range")
        return given

    return read


def one_of(*values: object) -> Read:
    """One of these values."""

    def read(given: object) -> object:
        if given not in values:
            raise ValueError("none of the allowed values")
        return given

    return read


def switch(given: object) -> bool:
    """`1`, `true`, `0` or `false`, in any case."""
    value = _SWITCHES.get(given.lower()) if isinstance(given, str) else given
    if not isinstance(value, bool):
        raise ValueError("neither true nor false")
    return value


def one_mode_of(*modes: int) -> Read:
    """One of these modes; as text in octal digits, with or without a zero before them."""
    by_text = {form: mode for mode in modes for form in (f"{mode:o}", f"{mode:04o}")}

    def read(given: object) -> object:
        mode = by_text.get(given) if isinstance(given, str) else given
        if mode not in modes:
            raise ValueError("not an allowed mode")
        return mode

    return read


def path(given: object) -> Path:
    """A path, relative to the current folder or absolute."""
    if not isinstance(given, str | Path):
        raise ValueError("not a path")
    return Path(given)


def named_folder(given: object) -> Path:
    """A path that is not empty: an empty one would mean the current folder."""
    if given == "":
        raise ValueError("an empty path would mean the current folder; name a folder")
    return path(given)


def absolute_path(given: object) -> Path:
    """A path that does not depend on where the server is started."""
    if isinstance(given, str) and not given.startswith("/"):
        raise ValueError("a path that depends on where the server is started")
    return path(given)


def text(given: object) -> str:
    """Any text."""
    if not isinstance(given, str):
        raise ValueError("not a text")
    return given
