"""How a setting is declared, and how its text becomes a value.

A converter takes a text, or a value of its own type as code gives it; a `ValueError` refuses
others. `SettingTable` holds the values of all settings; `settings` declares and reads them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple, dataclass_transform

from topics_server.runtime.amounts import parse_duration, parse_size

# The largest number of the store: a range up to it is told as one without an end.
_UNBOUNDED: Final = 2**64 - 1

# As browsers send it: scheme, host and a port that is not the scheme's own.
_ORIGIN: Final = re.compile(
    r"([a-z][a-z0-9+.-]*)://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::([0-9]{1,5}))?"
)
# Segments without a leading dot, so that none is `.` or `..`.
_MOUNT: Final = re.compile(r"(?:/[A-Za-z0-9_~-][A-Za-z0-9._~-]{0,63}){1,8}")
_OWN_PORTS: Final = {"http": 80, "https": 443, "ws": 80, "wss": 443}


def whole_number(value: object, field: str) -> int:
    """A number; for a field of bytes or of milliseconds also one with a unit, as `64MiB`, `5s`."""
    if isinstance(value, str):
        # `int` would accept "1_000", " 7" and other digits as well.
        if re.fullmatch(r"-?[0-9]{1,20}", value) is not None:
            return int(value)
        for suffix, parse in (("_ms", parse_duration), ("_bytes", parse_size)):
            if field.endswith(suffix):
                return parse(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ValueError("not a whole number")


def switch(value: object) -> bool:
    """Whether something is on: 1 or true, 0 or false."""
    words = {"1": True, "true": True, "0": False, "false": False}
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    if isinstance(value, bool):
        return value
    raise ValueError("neither true nor false")


def text(value: object) -> str:
    """Any text."""
    if not isinstance(value, str):
        raise ValueError("no text")
    return value


def path(value: object) -> Path:
    """A path."""
    if not isinstance(value, str | Path):
        raise ValueError("no path")
    return Path(value)


def one_of(*words: str) -> Callable[[object], str]:
    """A converter that takes one of these words."""

    def word(value: object) -> str:
        if value not in words:
            raise ValueError("none of the allowed words")
        return text(value)

    return word


def octal_mode(value: object) -> int:
    """The mode of a folder, 0700 or 0750."""
    if value in (0o700, 0o750):
        assert isinstance(value, int), "equal to a number"
        return value
    if not isinstance(value, str) or value.removeprefix("0") not in {"700", "750"}:
        raise ValueError("not an allowed mode")
    return int(value, 8)


def folder(value: object) -> Path:
    """A path that names a folder."""
    if value == "":
        raise ValueError("an empty path would mean the current folder; name a folder")
    return path(value)


def absolute(value: object) -> Path:
    """A path that is the same wherever the server is started."""
    if isinstance(value, str) and not value.startswith("/"):
        raise ValueError("a path that depends on where the server is started")
    return path(value)


def origins(value: object) -> str:
    """A list of origins in the form of `split_origins`."""
    return ",".join(split_origins(text(value)))


def split_origins(given: str) -> list[str]:
    """Origins of a comma-separated list as browsers write them; ValueError if one is invalid."""
    found: list[str] = []
    for part in filter(None, (part.strip() for part in given.split(","))):
        match = _ORIGIN.fullmatch(part.lower())
        if match is None or int(match[3] or 1) not in range(1, 65_536):
            raise ValueError(f"{part} is not an origin")
        scheme, host, port = match.groups()
        is_own = port is None or int(port) == _OWN_PORTS.get(scheme)
        found.append(f"{scheme}://{host}" if is_own else f"{scheme}://{host}:{int(port)}")
    return found


def mount(value: object) -> str:
    """A path below which streams are served; empty for `off`."""
    if value in ("", "off"):
        return ""
    below = text(value)
    is_ours = below in ("/healthz", "/readyz") or f"{below}/".startswith("/v0/")
    if _MOUNT.fullmatch(below) is None or is_ours:
        raise ValueError("no path for streams")
    return below


class SettingField(NamedTuple):
    """One setting: its default, what it is, what is allowed, and what makes the value.

    `read` takes the field's name and the given value. `is_number`: its help shows a number.
    """

    default: Any
    description: str
    allowed: str
    read: Callable[[str, object], object]
    is_number: bool = False


class WrongValue(NamedTuple):
    """A setting whose given value is refused, and why."""

    field: str
    value: object
    reason: str


class WrongValues(ValueError):
    """Settings whose values are refused."""

    def __init__(self, wrong: list[WrongValue]) -> None:
        super().__init__("; ".join(f"{each.field}: {each.reason}" for each in wrong))
        self.wrong = wrong


@dataclass_transform(kw_only_default=True)
class SettingTable:
    """The values of all settings. A subclass declares a `SettingField` for each; none can change.

    `fields` has them in their order. Making a table raises `WrongValues`.
    """

    fields: ClassVar[Mapping[str, SettingField]] = {}

    def __init_subclass__(cls) -> None:
        cls.fields = {
            name: field for name, field in vars(cls).items() if isinstance(field, SettingField)
        }
        # A value belongs to one table: the class has none.
        for name in cls.fields:
            delattr(cls, name)

    def __init__(self, **given: Any) -> None:
        if strange := given.keys() - self.fields.keys():
            raise TypeError(f"no such setting: {', '.join(sorted(strange))}")
        found = self._found(given)
        wrong: list[WrongValue] = []
        for name, field in self.fields.items():
            value = field.default
            if name in found and found[name] is not value:
                try:
                    value = field.read(name, found[name])
                except ValueError as error:
                    wrong.append(WrongValue(name, found[name], str(error)))
            vars(self)[name] = value
        if wrong:
            raise WrongValues(wrong)
        self._relate(found.keys())

    def _found(self, given: dict[str, Any]) -> dict[str, Any]:
        """The given values, with those that the table finds elsewhere."""
        return given

    def _relate(self, found: Collection[str]) -> None:
        """Check each value beside the others; `found` names those that are no defaults."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"settings are frozen: {name} cannot change")

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """The names and values, in order."""
        return iter(vars(self).items())


def number(default: int | None, low: int, high: int, about: str) -> Any:
    """A field with a number of a range; None, as a default, stands for a number found later."""
    allowed = f"a whole number of at least {low}"
    if high != _UNBOUNDED:
        allowed = f"a whole number from {low} to {high}"

    def read(field: str, value: object) -> int:
        found = whole_number(value, field)
        if not low <= found <= high:
            raise ValueError("out of range")
        return found

    return SettingField(default, about, allowed, read, is_number=default is not None)


def other(default: object, convert: Callable[[object], object], allowed: str, about: str) -> Any:
    """A field with any other value; `allowed` says which, in messages and in the help."""
    return SettingField(default, about, allowed, lambda _, value: convert(value))
