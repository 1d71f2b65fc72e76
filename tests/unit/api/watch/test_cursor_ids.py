"""`cursor_ids`: parsing returns the written ids; garbage is one `ValueError`."""

from __future__ import annotations

import base64
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from topics_server.api.watch.cursor_ids import ID_BYTES_MAX, CursorPosition, IdOf, decode_id
from topics_server.engine.subscribe.cursors import Cursor
from topics_server.values.limits import U64_MAX

U64 = st.integers(0, U64_MAX)
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,254}", fullmatch=True)


def url64(raw: bytes) -> bytes:
    return base64.urlsafe_b64encode(raw).rstrip(b"=")


def first_of(name: str, seq: int) -> Cursor:
    return Cursor(name, 7, 1, seq)


def test_an_id_is_the_contract_s() -> None:
    """§7.4's own example, byte for byte."""
    cursors = [first_of("jobs", 5210), first_of("events", 88130)]
    assert IdOf(cursors)() == b"eyJqb2JzIjo1MjEwLCJldmVudHMiOjg4MTMwfQ"
    assert decode_id(b"eyJqb2JzIjo1MjEwLCJldmVudHMiOjg4MTMwfQ") == {"jobs": 5210, "events": 88130}


def test_an_id_follows_its_cursors() -> None:
    cursor = first_of("jobs", 1)
    id_of = IdOf([cursor])
    before = id_of()
    cursor.seq = 2
    assert (decode_id(before), decode_id(id_of())) == ({"jobs": 1}, {"jobs": 2})


@given(st.dictionaries(NAMES, U64, min_size=1, max_size=70))
def test_what_is_given_out_is_read_again(seqs: dict[str, int]) -> None:
    text = IdOf(first_of(name, seq) for name, seq in seqs.items())()
    found = decode_id(text)
    if text.startswith(b"c1."):
        assert found == tuple(CursorPosition(7, 1, seq) for seq in seqs.values())
        assert len(seqs) > 64 or len(json.dumps(seqs)) > ID_BYTES_MAX * 3 // 5
    else:
        assert found == seqs
        assert isinstance(found, dict)
        assert list(found) == list(seqs), "in the session's order"
        assert len(text) <= ID_BYTES_MAX
        assert len(seqs) <= 64


@given(st.lists(st.tuples(U64, U64, U64), max_size=300))
def test_places_are_read_again(places: list[tuple[int, int, int]]) -> None:
    text = IdOf(Cursor("t", *place) for place in [(1, 2, 3), *places])()
    assert text.startswith(b"c1.")
    assert decode_id(text) == tuple(CursorPosition(*place) for place in [(1, 2, 3), *places])


@pytest.mark.parametrize(("topics", "is_token"), [(64, False), (65, True)])
def test_a_token_is_used_above_64_topics(topics: int, is_token: bool) -> None:
    text = IdOf(first_of(f"t{number}", 5) for number in range(topics))()
    assert text.startswith(b"c1.") is is_token


def test_a_token_is_used_above_2_kib_of_id() -> None:
    # {"x...x":1} is base64 of n + 6 bytes.
    fits = [first_of("x" * 255, 1), first_of("y" * 255, 1), first_of("z" * 255, 1)]
    names = [first_of(letter * 255, 1) for letter in "abcde"]
    assert not IdOf(fits)().startswith(b"c1.")
    assert not IdOf(names)().startswith(b"c1.")
    assert IdOf([*names, first_of("f" * 255, 1)])().startswith(b"c1.")


def test_a_topic_that_is_not_the_first_of_its_name_makes_a_token() -> None:
    """Otherwise an id of the previous topic would be a position in the new one."""
    text = IdOf([first_of("a", 9), Cursor("b", 12, 2, 3)])()
    assert decode_id(text) == (CursorPosition(7, 1, 9), CursorPosition(12, 2, 3))


def test_a_session_without_topics_has_an_id_too() -> None:
    assert decode_id(IdOf([])()) == ()


def test_padding_is_taken() -> None:
    assert decode_id(b"eyJhIjoxfQ==") == decode_id(b"eyJhIjoxfQ") == {"a": 1}


@pytest.mark.parametrize(
    "text",
    [
        *(
            b"",
            b"x",
            b"!!!",
            b"c1.",
            b"c1.x",
            b"c2.kA",
            b"e30 ",
            b"\xff\xfe",
            b"e3\n0",
            b"=",
            b"A===",
        ),
        url64(b"[]"),
        url64(b'{"a":-1}'),
        url64(b'{"a":1.0}'),
        url64(b'{"a":true}'),
        url64(b'{"a":"1"}'),
        url64(b'{"a":null}'),
        url64(b'{"a":18446744073709551616}'),
        url64(b'{"a":1e400}'),
        url64(b'{"a":' + b"9" * 5000 + b"}"),
        url64(b'{"a":' + b"[" * 5000),
        url64(b'{"\xff":1}'),
        url64(b'{"a":1} x'),
        b"c1." + url64(msgspec.msgpack.encode({})),
        b"c1." + url64(msgspec.msgpack.encode([[1, 2]])),
        b"c1." + url64(msgspec.msgpack.encode([[1, 2, 3, 4]])),
        b"c1." + url64(msgspec.msgpack.encode([[1, 2, -3]])),
        b"c1." + url64(msgspec.msgpack.encode([["1", 2, 3]])),
        b"c1." + url64(msgspec.msgpack.encode([[1, 2, 3]]) + b"x"),
        b"c1." + url64(b"\x91" * 5000),
        b"A" * (4 * 1024 * 1024 + 4),
    ],
)
def test_garbage_is_a_value_error(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        decode_id(text)


@given(st.binary(max_size=64) | st.text(max_size=64).map(lambda text: text.encode()))
def test_reading_never_fails_in_another_way(text: bytes) -> None:
    for sent in (text, b"c1." + text, url64(text), b"c1." + url64(text)):
        try:
            found = decode_id(sent)
        except ValueError:
            continue
        values = found.values() if isinstance(found, dict) else [place.seq for place in found]
        assert all(0 <= value <= U64_MAX for value in values)


@given(U64, st.integers(0, 40), st.integers(0, 255))
def test_a_byte_that_was_changed_is_read_or_refused(seq: int, at: int, byte: int) -> None:
    text = bytearray(IdOf([first_of("jobs", seq)])())
    text[at % len(text)] = byte
    try:
        decode_id(bytes(text))
    except ValueError:
        pass
