"""The shape of JSON is measured exactly, in linear time and with little memory."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topics_server.values import json_shape
from topics_server.values.json_shape import exceeds_depth, has_more_items
from topics_server.values.limits import JSON_DEPTH_MAX, MIB

# Texts with everything that may mislead: quotes, backslashes and brackets in strings.
_TEXTS = st.text(st.sampled_from('"\\[]{},:ab'), max_size=12)
_VALUES = st.recursive(
    st.none() | st.integers(-9, 9) | _TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXTS, inner, max_size=4),
    max_leaves=12,
)


def depth_of(value: object) -> int:
    """The depth of a decoded value, by walking all of it."""
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(depth_of, value), default=0)
    return 0


@pytest.fixture(autouse=True)
def small_pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut short texts into many pieces, so that every state is carried over a cut."""
    if "large" not in request.node.name:
        monkeypatch.setattr(json_shape, "_PIECE_BYTES", 3)


@given(value=_VALUES, deeper=st.integers(0, 3))
def test_depth_is_exact(value: Any, deeper: int) -> None:
    # Wrapped to about the allowed depth, on either side of the limit.
    wraps = JSON_DEPTH_MAX - depth_of(value) - 1 + deeper
    text = b"[" * wraps + json.dumps(value).encode() + b"]" * wraps
    assert exceeds_depth(text) == (wraps + depth_of(value) > JSON_DEPTH_MAX)


@settings(max_examples=300)
@given(value=st.lists(_VALUES, max_size=8) | st.dictionaries(_TEXTS, _VALUES, max_size=8))
def test_items_are_counted_exactly(value: Any) -> None:
    text = json.dumps(value).encode()
    for most in range(1, 10):
        assert has_more_items(text, most) == (len(value) > most)
        assert has_more_items(memoryview(b"  " + text + b" "), most) == (len(value) > most)


@pytest.mark.parametrize("count", [*range(8), 63, 64, 65])
def test_backslashes_are_paired_over_a_cut(count: int) -> None:
    # After an odd number of backslashes the quote is a character, and the string continues.
    text = b'["' + b"\\" * (2 * (count // 2)) + b'",' + b"[" * JSON_DEPTH_MAX
    text += b"]" * JSON_DEPTH_MAX + b"]"
    assert json.loads(text) is not None
    assert exceeds_depth(text)
    quoted = b'["' + b"\\" * (2 * (count // 2) + 1) + b'",' + b"[" * JSON_DEPTH_MAX + b'"]'
    assert json.loads(quoted) is not None
    assert not exceeds_depth(quoted)


HOSTILE: dict[str, Callable[[int], bytes]] = {
    "brackets": lambda size: b"[" + b"[]," * (size // 3) + b"[]]",
    "one string": lambda size: b'["' + b"[" * size + b'"]',
    "escapes": lambda size: b'["' + b"\\\\" * (size // 2) + b'",[' + b"[]," * 600 + b"[]]]",
    "escaped quotes": lambda size: b'["' + b'\\"' * (size // 2) + b'",[' + b"[]," * 600 + b"[]]]",
    "short strings": lambda size: b"[" + b'"[",' * (size // 4) + b"0]",
    "keys": lambda size: b"{" + b",".join(b'"%d":{}' % n for n in range(size // 12)) + b"}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_large_text_takes_little_memory(name: str) -> None:
    text = HOSTILE[name](4 * MIB)
    tracemalloc.start()
    try:
        assert not exceeds_depth(text)
        has_more_items(text, 1_000)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The memory is a few times a piece, whatever the text contains; an earlier version took a
    # hundred times the text.
    assert peak_bytes < 2 * MIB
