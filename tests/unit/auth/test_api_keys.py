"""`auth/api_keys`: the grammar of keys, the rights of each, and the key of a token."""

from __future__ import annotations

import hashlib
from hmac import compare_digest
from unittest.mock import patch

import pytest

from topics_server.auth.api_keys import (
    ADMIN,
    ALL,
    DELETE,
    EVERYBODY,
    READ,
    WRITE,
    KeyGrant,
    KeyRing,
    KeysError,
    Recalled,
    bearer_token,
    parse_key_lines,
    parse_keys,
)

COMPARE = "topics_server.auth.api_keys.compare_digest"


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


def test_a_caller_has_the_rights_of_all_its_scopes() -> None:
    (grant,) = parse_keys("k:r+d:t.|u.")
    caller = KeyRing([grant]).keys[0].caller
    assert [caller.can(scopes) for scopes in (READ, DELETE, READ | DELETE)] == [True] * 3
    assert not caller.can(WRITE)
    assert not caller.can(READ | WRITE)
    names = ["t.", "t.a", "u.x", "t", "T.a", "at.", "v"]
    assert [caller.may_name(name) for name in names] == [True] * 3 + [False] * 4


def test_everybody_may_do_everything() -> None:
    assert EVERYBODY.can(ALL)
    assert EVERYBODY.may_name("anything")
    assert EVERYBODY.key is None
    assert not KeyRing().is_on


def test_a_token_is_compared_with_every_key_whichever_matches() -> None:
    ring = KeyRing(parse_keys("one,two,three"))
    for token in ("one", "two", "three", "four"):
        with patch(COMPARE, wraps=compare_digest) as compared:
            found = ring.find(token.encode())
        assert compared.call_count == 3
        assert (None if found is None else found.key) in (*ring.keys, None)
        assert (found is None) == (token == "four")


def test_what_a_connection_presented_last_is_compared_once() -> None:
    ring, recalled = KeyRing(parse_keys("one,two,three")), Recalled()
    first = ring.find(b"two", recalled)
    with patch(COMPARE, wraps=compare_digest) as compared:
        assert ring.find(b"two", recalled) is first
        assert compared.call_count == 1
        other = ring.find(b"three", recalled)
    assert first is not None
    assert other is not None
    assert (first.key, other.key) == (ring.keys[1], ring.keys[2])
    assert ring.find(b"four", recalled) is None
    assert ring.find(b"three", recalled) is other
    # A remembered key counts only while the current keys contain it.
    ring.replace(parse_keys("one,two"))
    assert ring.find(b"three", recalled) is None
    assert b"three" not in (recalled.digest,)


def test_an_empty_memory_matches_no_caller() -> None:
    ring = KeyRing(parse_keys("one"))
    with patch.object(hashlib, "sha256") as hashed:
        hashed.return_value.digest.return_value = b""
        assert ring.find(b"", Recalled()) is None


def test_a_key_stays_the_same_over_a_reload() -> None:
    ring = KeyRing(parse_keys("one,two:r,three:w:t."))
    one, two, three = ring.keys
    two.in_flight = 5
    touched = ring.replace(parse_keys("four,two:r,three:w:u."))
    assert ring.keys[1:] == (two, three)
    assert two.in_flight == 5
    assert three.caller.prefixes == ("u.",)
    assert three.caller.key is three
    assert set(touched) == {one, three}
    assert ring.find(b"one") is None
    assert ring.find(b"three") is three.caller


@pytest.mark.parametrize(
    ("header", "token"),
    [
        (b"Bearer abc", b"abc"),
        (b"bearer abc", b"abc"),
        (b"BEARER  abc ", b"abc"),
        (b"Bearer a b", b"a b"),
        (b"Bearer ", None),
        (b"Bearer", None),
        (b"Bearerabc", None),
        (b"Basic abc", None),
        (b"abc", None),
        (b"", None),
        (None, None),
    ],
)
def test_a_bearer_token_is_behind_its_scheme(header: bytes | None, token: bytes | None) -> None:
    assert bearer_token(header) == token
