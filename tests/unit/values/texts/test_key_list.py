"""`values/texts/key_list`: the text form of keys, and what refuses a malformed one."""

from __future__ import annotations

import hashlib

import pytest

from topics_server.values.texts.key_list import (
    ADMIN,
    ALL,
    DELETE,
    READ,
    WRITE,
    KeyGrant,
    KeysError,
    parse_key_lines,
    parse_keys,
)


def digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


@pytest.mark.parametrize(
    ("text", "scopes", "prefixes"),
    [
        ("k", ALL, ()),
        (" k ", ALL, ()),
        ("k:", ALL, ()),
        ("k::", ALL, ()),
        ("k:read", READ, ()),
        ("k:r", READ, ()),
        ("k:rw", READ | WRITE, ()),
        ("k:r+w+d+a", ALL, ()),
        ("k:read+write+delete+admin", ALL, ()),
        ("k:d+admin+d", DELETE | ADMIN, ()),
        ("k:rw+delete:", READ | WRITE | DELETE, ()),
        ("k::tenant42:", ALL, ("tenant42:",)),
        ("k:w:tenant42:|shared.|a->b", WRITE, ("tenant42:", "shared.", "a->b")),
        ("k::a|b|a", ALL, ("a", "b")),
    ],
)
def test_an_entry_grants_what_it_says(text: str, scopes: int, prefixes: tuple[str, ...]) -> None:
    assert parse_keys(text) == (KeyGrant(digest("k"), scopes, prefixes),)


def test_entries_are_separated_by_commas() -> None:
    found = parse_keys("one, two:read,three::t.")
    assert [grant.digest for grant in found] == [digest("one"), digest("two"), digest("three")]


@pytest.mark.parametrize("secret", ["!#$%&'()*+-./", "0;<=>?@AZ[\\]^_`az{|}~", "x" * 4096])
def test_a_secret_is_any_visible_ascii_but_comma_and_colon(secret: str) -> None:
    assert parse_keys(secret) == (KeyGrant(digest(secret), ALL),)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "entry 1 has no key"),
        (" ", "entry 1 has no key"),
        (",", "entry 1 has no key"),
        ("hush,", "entry 2 has no key"),
        ("hush,,other", "entry 2 has no key"),
        (":read", "entry 1 has no key"),
        ("hu sh", "entry 1 has a key with a character that is not allowed"),
        ("hu\tsh", "entry 1 has a key with a character that is not allowed"),
        ("hüsh", "entry 1 has a key with a character that is not allowed"),
        ("hu\x00sh", "entry 1 has a key with a character that is not allowed"),
        ("hush:reed", "entry 1 has an unknown scope"),
        ("hush:Read", "entry 1 has an unknown scope"),
        ("hush:read+", "entry 1 has an unknown scope"),
        ("hush:+", "entry 1 has an unknown scope"),
        ("hush:read write", "entry 1 has an unknown scope"),
        ("hush: ", None),
        ("hush:read|write", "entry 1 has an unknown scope"),
        ("hush:wr", "entry 1 has an unknown scope"),
        ("hush:all", "entry 1 has an unknown scope"),
        ("hush::|", "entry 1 has a prefix with which no name"),
        ("hush::a|", "entry 1 has a prefix with which no name"),
        ("hush::a||b", "entry 1 has a prefix with which no name"),
        ("hush::*", "entry 1 has a prefix with which no name"),
        ("hush::.a", "entry 1 has a prefix with which no name"),
        ("hush::a/b", "entry 1 has a prefix with which no name"),
        ("hush::" + "a" * 256, "entry 1 has a prefix with which no name"),
        ("one,hush,two,hush:read", "entry 4 has the key of entry 2 again"),
    ],
)
def test_a_malformed_entry_is_one_line_without_its_text(text: str, words: str | None) -> None:
    if words is None:
        assert parse_keys(text) == (KeyGrant(digest("hush"), ALL),)
        return
    with pytest.raises(KeysError) as caught:
        parse_keys(text)
    line = str(caught.value)
    assert line.startswith(words)
    assert "\n" not in line
    assert not any(part in line for part in ("hush", "hu sh", "hüsh", "reed"))


def test_a_file_has_an_entry_a_line() -> None:
    found = parse_key_lines("# keys\n\none\n  two:r:t.  \r\n#three\n")
    assert found == (KeyGrant(digest("one"), ALL), KeyGrant(digest("two"), READ, ("t.",)))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "there is no key"),
        ("# nothing\n \n", "there is no key"),
        ("one\n#\none:r", "line 3 has the key of line 1 again"),
        ("one\ntwo,three", "line 2 has a key with a character that is not allowed"),
        ("one\n\ntwo:x", "line 3 has an unknown scope"),
    ],
)
def test_a_malformed_file_gives_the_line_number(text: str, words: str) -> None:
    with pytest.raises(KeysError) as caught:
        parse_key_lines(text)
    assert str(caught.value).startswith(words)
