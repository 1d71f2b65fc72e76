"""Compares frames with `docs/FRAMES.md`: their members and types.

The clients of the contract tests call `check_event` and `check_message` for every frame of our
servers.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

FILE: Final = Path(__file__).resolve().parents[3] / "docs" / "FRAMES.md"
_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "string": (str,),
    "integer": (int,),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


class Member(NamedTuple):
    """One member of a frame."""

    type: str
    is_optional: bool


Described = dict[str, dict[str, Member]]


@cache
def described() -> Described:
    """Frames by heading (`event record`, `op ack`, `a record`) and their members."""
    found: Described = {}
    for section in re.split(r"^### ", FILE.read_text(), flags=re.M)[1:]:
        heading = section.partition("\n")[0].replace("`", "")
        rows = re.findall(r"^\| `([^`]+)` \| (\w+) \| (.*)\|$", section, re.M)
        found[heading] = {
            name: Member(kind, about.startswith("*if*")) for name, kind, about in rows
        }
        assert found[heading], f"{heading} has no members"
    return found


def check(heading: str, frame: dict[str, Any]) -> None:
    """Fail if a frame differs from its description under this heading."""
    assert heading in described(), f"{heading} is not in {FILE.name}: {frame}"
    members = described()[heading]
    where = f"{heading} in {FILE.name}: {str(frame)[:1000]}"
    assert frame.keys() <= members.keys(), f"{frame.keys() - members.keys()} of {where}"
    missing = {name for name, member in members.items() if not member.is_optional} - frame.keys()
    assert not missing, f"without {missing}: {where}"
    for name, value in frame.items():
        kind = members[name].type
        if kind == "any":
            continue
        assert isinstance(value, _TYPES[kind]), f"{name} of {where}"
        assert kind == "boolean" or not isinstance(value, bool), f"{name} of {where}"
    for record in frame.get("records", ()):
        if heading != "command publish":
            check("a record", record)


def check_event(name: str, data: str) -> None:
    """Fail if an event of a stream is not described."""
    check(f"event {name}", json.loads(data))


def check_message(text: bytes | str) -> None:
    """Fail if a message of the server on a WebSocket is not described."""
    frame = json.loads(text)
    check(f"op {frame['op']}", frame)
