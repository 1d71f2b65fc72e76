"""`auth/authorize`: which callers are allowed, and their error answers."""

from __future__ import annotations

import pytest

from topics_server.auth.api_keys import ANY_KEY, EVERYBODY, PROBE, KeyRing
from topics_server.auth.authorize import authorized, authorized_stream, check_name, check_scopes
from topics_server.auth.tickets import Tickets
from topics_server.http.error_responses import headers_of
from topics_server.values.errors import Code, TopicsError
from topics_server.values.texts.key_list import READ, WRITE, parse_keys

RING = KeyRing(parse_keys("reader:r,writer:w:t.,all"))


def refused(ring: KeyRing, header: bytes | None, need: int) -> TopicsError:
    with pytest.raises(TopicsError) as caught:
        authorized(ring, header, need)
    return caught.value


def test_without_keys_everybody_is_let_in() -> None:
    for header in (None, b"Bearer anything", b"\xff"):
        assert authorized(KeyRing(), header, READ | WRITE) is EVERYBODY


@pytest.mark.parametrize("header", [None, b"", b"Bearer", b"Basic x", b"Bearer unknown", b"\xff"])
def test_an_unknown_key_is_no_caller(header: bytes | None) -> None:
    for need in (READ, ANY_KEY):
        error = refused(RING, header, need)
        assert error.code is Code.UNAUTHORIZED
        assert headers_of(error) == ((b"www-authenticate", b"Bearer"),)
        assert "unknown" not in error.message


def test_probes_ask_for_a_key_only_where_that_is_set() -> None:
    assert authorized(RING, None, PROBE) is EVERYBODY
    covered = KeyRing(parse_keys("reader:r"), covers_probes=True)
    assert refused(covered, None, PROBE).code is Code.UNAUTHORIZED
    assert authorized(covered, b"Bearer reader", PROBE).key is covered.keys[0]


def test_a_key_needs_all_scopes_of_a_route() -> None:
    assert authorized(RING, b"Bearer reader", READ).key is RING.keys[0]
    error = refused(RING, b"Bearer reader", READ | WRITE)
    assert error.code is Code.FORBIDDEN
    assert error.detail == {"scopes": ["write"]}
    assert authorized(RING, b"Bearer all", READ | WRITE).key is RING.keys[2]
    check_scopes(EVERYBODY, READ | WRITE)


def test_a_ticket_ends_with_its_key() -> None:
    ring, tickets = KeyRing(parse_keys("one,two")), Tickets()
    caller = authorized(ring, b"Bearer one", ANY_KEY)
    for ticket in ("before", "after"):
        tickets.issue(ticket, "w", caller, 0.0)
    found = authorized_stream(ring, tickets, {}, b"ticket=before", "w", READ, 1.0)
    assert found.key is ring.keys[0]
    ring.replace(parse_keys("two"))
    with pytest.raises(TopicsError) as caught:
        authorized_stream(ring, tickets, {}, b"ticket=after", "w", READ, 1.0)
    assert caught.value.code is Code.UNAUTHORIZED


def test_a_name_outside_of_the_prefixes_is_refused() -> None:
    writer = authorized(RING, b"Bearer writer", WRITE)
    check_name(writer, "t.a", "topic")
    with pytest.raises(TopicsError) as caught:
        check_name(writer, "other", "source")
    assert caught.value.code is Code.FORBIDDEN
    assert caught.value.detail == {"field": "source", "name": "other"}
