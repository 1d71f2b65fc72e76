"""How the text of a setting becomes a value, and how its field is declared.

The converters run before pydantic checks the type and the range. They return a value that is not
text unchanged, and raise `ValueError` for text that is not allowed. Used by `settings`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, ValidationInfo
from pydantic.config import JsonDict

from topics_server.values.texts.amounts import parse_duration, parse_size
from topics_server.values.texts.archive_url import parse_archive_url

# The largest number that a setting may have; a range that ends here is printed without its end.
_UNBOUNDED: Final = 2**64 - 1

# As browsers send it: scheme, host and a port that is not the scheme's own.
_ORIGIN: Final = re.compile(
    r"([a-z][a-z0-9+.-]*)://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::([0-9]{1,5}))?"
)
# No segment of a path has a leading dot, so that none is `.` or `..`.
_MOUNT: Final = re.compile(r"(?:/[A-Za-z0-9_~-][A-Za-z0-9._~-]{0,63}){1,8}")
_OWN_PORTS: Final = {"http": 80, "https": 443, "ws": 80, "wss": 443}


def whole_number(value: object, info: ValidationInfo) -> object:
    """A number. Fields of bytes or of milliseconds also accept a unit, as in `64MiB` or `5s`."""
    if not isinstance(value, str):
        return value
    # pydantic would accept "1_000", " 7" and "5.0" as well.
    if re.fullmatch(r"-?[0-9]{1,20}", value) is not None:
        return int(value)
    for suffix, parse in (("_ms", parse_duration), ("_bytes", parse_size)):
        if str(info.field_name).endswith(suffix):
            return parse(value)
    raise ValueError("not a whole number")


def switch(value: object) -> object:
    """A switch as a boolean: `1` or `true` is on, `0` or `false` is off."""
    words = {"1": True, "true": True, "0": False, "false": False}
    if isinstance(value, str):
        if (word := value.lower()) not in words:
            raise ValueError("neither true nor false")
        return words[word]
    return value


def octal_mode(value: object) -> object:
    """The mode of a folder, 0700 or 0750."""
    if not isinstance(value, str):
        return value
    # The check is here, so that the message shows the text as it was given.
    if value.removeprefix("0") not in {"700", "750"}:
        raise ValueError("not an allowed mode")
    return int(value, 8)


def not_empty(value: object) -> object:
    """A path that names a folder."""
    if value == "":
        raise ValueError("an empty path would mean the current folder; name a folder")
    return value


def absolute(value: object) -> object:
    """A path that does not depend on the folder in which the server is started."""
    if isinstance(value, str) and not value.startswith("/"):
        raise ValueError("a path that depends on where the server is started")
    return value


def origins(value: object) -> object:
    """A list of origins in the form of `split_origins`."""
    return ",".join(split_origins(value)) if isinstance(value, str) else value


def split_origins(text: str) -> list[str]:
    """Origins of a comma-separated list as browsers write them; ValueError if one is invalid."""
    found: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _ORIGIN.fullmatch(part.lower())
        if match is None or int(match[3] or 1) not in range(1, 65_536):
            raise ValueError(f"{part} is not an origin")
        scheme, host, port = match.groups()
        is_own = port is None or int(port) == _OWN_PORTS.get(scheme)
        found.append(f"{scheme}://{host}" if is_own else f"{scheme}://{host}:{int(port)}")
    return found


def archive(value: object) -> object:
    """The URL of an archive, checked and in its normal form."""
    return parse_archive_url(value).text if isinstance(value, str) else value


def mount(value: object) -> object:
    """A path below which streams are served; empty for `off`."""
    if not isinstance(value, str):
        return value
    if value in ("", "off"):
        return ""
    is_ours = value in ("/healthz", "/readyz") or f"{value}/".startswith("/v0/")
    if _MOUNT.fullmatch(value) is None or is_ours:
        raise ValueError("no path for streams")
    return value


Number = Annotated[int, BeforeValidator(whole_number)]
Switch = Annotated[bool, BeforeValidator(switch)]


def number(default: int | None, low: int, high: int, about: str) -> Any:
    """Declare a field that is a number within a range."""
    allowed = f"a whole number of at least {low}"
    if high != _UNBOUNDED:
        allowed = f"a whole number from {low} to {high}"
    extra: JsonDict = {"allowed": allowed}
    return Field(default, ge=low, le=high, description=about, json_schema_extra=extra)


def other(default: object, allowed: str, about: str) -> Any:
    """Declare a field of another type; `allowed` describes its values in messages and help."""
    return Field(default, description=about, json_schema_extra={"allowed": allowed})
