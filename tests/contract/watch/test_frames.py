"""`docs/FRAMES.md` is complete: it describes exactly what the code can send and accept."""

from __future__ import annotations

import re

import msgspec
import pytest

from tests.contract.watch import frames
from topics_server.api.queues.responses import job_frame
from topics_server.api.watch import sse
from topics_server.api.websocket import commands as ws_commands
from topics_server.api.websocket import frames as ws_frames
from topics_server.api.websocket.commands import OPS

API = frames.FILE.parent.parent / "src" / "topics_server" / "api"


def headings(kind: str) -> set[str]:
    return {
        heading.removeprefix(f"{kind} ")
        for heading in frames.described()
        if heading.startswith(f"{kind} ")
    }


def test_every_event_that_is_rendered_has_a_heading() -> None:
    text = "".join((API / f"{name}.py").read_text() for name in ("watch/sse", "queues/responses"))
    assert set(re.findall(r'\bframe\(b"([a-z-]+)"', text)) == headings("event")
    assert callable(job_frame)
    assert callable(sse.render)


def test_every_op_that_is_rendered_has_a_heading() -> None:
    text = (API / "websocket" / "frames.py").read_text()
    said = set(re.findall(r'"op":"([a-z_]+)"', text)) | set(re.findall(r'_opening\(b"(\w+)"', text))
    said |= set(re.findall(r'"op": "([a-z_]+)"', text))
    assert said == headings("op")
    assert callable(ws_frames.ack)


@pytest.mark.parametrize("op", OPS)
def test_a_command_s_members_are_those_that_are_decoded(op: str) -> None:
    decoded = {
        kind.__struct_config__.tag: kind
        for kind in vars(ws_commands).values()
        if isinstance(kind, type)
        and issubclass(kind, msgspec.Struct)
        and kind.__struct_config__.tag_field == "op"
    }
    fields = {field.encode_name: field.required for field in msgspec.structs.fields(decoded[op])}
    members = frames.described()[f"command {op}"]
    assert members.keys() == fields.keys() | {"op"}
    assert {name: not member.is_optional for name, member in members.items() if name != "op"} == (
        fields
    )
    assert headings("command") == set(OPS)


@pytest.mark.parametrize(
    "frame",
    [
        {"topic": "t"},
        {"topic": "t", "head_seq": "1"},
        {"topic": "t", "head_seq": True},
        {"topic": "t", "head_seq": 1, "more": 1},
        {"topic": None, "head_seq": 1},
    ],
)
def test_an_undescribed_answer_fails(frame: dict[str, object]) -> None:
    frames.check("event caught-up", {"topic": "t", "head_seq": 1})
    with pytest.raises(AssertionError):
        frames.check("event caught-up", frame)
