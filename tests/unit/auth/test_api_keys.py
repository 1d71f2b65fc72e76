"""`auth/api_keys`: the grammar of keys, the rights of each, and the key of a token."""

from __future__ import annotations

import hashlib
from hmac import compare_digest
from unittest.mock import patch

import pytest

from topics_server.auth.api_keys import EVERYBODY, KeyRing, Recalled, bearer_token
from topics_server.values.texts.key_list import (
    ALL,
    DELETE,
    READ,
    WRITE,
    parse_keys,
)

COMPARE = "topics_server.auth.api_keys.compare_digest"


def digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


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
