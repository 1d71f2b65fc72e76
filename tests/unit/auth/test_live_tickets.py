"""`auth/live_tickets`: a ticket opens one stream, until it expires or its key is removed."""

from __future__ import annotations

from topics_server.auth.api_keys import KeyRing
from topics_server.auth.live_tickets import LIVE_TICKET_TTL_MS, issue, redeem, subscription_of
from topics_server.values.texts.key_list import parse_keys

RING = KeyRing(parse_keys("one:read:t.,two"))
ONE, TWO = RING.keys
STREAM = subscription_of("t.a", b"tag=x&last=10")


def test_a_ticket_opens_its_stream_until_it_expires() -> None:
    ticket = issue(ONE, STREAM, 1000)
    for now_ms in (1000, 1001, 1000 + LIVE_TICKET_TTL_MS - 1):
        assert redeem(RING, ticket, STREAM, now_ms) is ONE.caller
    assert redeem(RING, ticket, STREAM, 1000 + LIVE_TICKET_TTL_MS) is None


def test_a_ticket_opens_no_other_stream() -> None:
    ticket = issue(ONE, STREAM, 1000)
    for topic, query in (
        ("t.b", b"tag=x&last=10"),
        ("t.a", b"tag=y&last=10"),
        ("t.a", b"tag=x"),
        ("", b"tag=x&last=10"),
        ("t.a", b"tag=x&last=10&prefix=t."),
    ):
        assert redeem(RING, ticket, subscription_of(topic, query), 1000) is None


def test_where_the_client_is_and_how_it_proves_itself_do_not_count() -> None:
    ticket = issue(ONE, STREAM, 1000)
    same = subscription_of("t.a", b"ticket=z&last=10&cursor=abc&tag=x")
    assert redeem(RING, ticket, same, 1000) is ONE.caller


def test_the_first_of_a_repeated_parameter_counts_as_for_the_stream() -> None:
    ticket = issue(ONE, subscription_of("", b"topics=t.a&tag=x&topics=t.b&tag=y"), 1000)
    for query, is_same in (
        (b"topics=t.a&tag=x", True),
        (b"tag=x&topics=t.a&topics=t.c", True),
        (b"topics=t.b&tag=y&topics=t.a&tag=x", False),
    ):
        caller = redeem(RING, ticket, subscription_of("", query), 1000)
        assert (caller is ONE.caller) is is_same, query


def test_a_changed_ticket_opens_nothing() -> None:
    ticket = issue(ONE, STREAM, 1000)
    word, until, owner, signature = ticket.split("_")
    for other in (
        f"{word}_{int(until, 16) + 1:x}_{owner}_{signature}",
        f"{word}_{until}_{TWO.owner}_{signature}",
        f"{word}_{until}_{owner}_{signature[:-1]}{'0' if signature[-1] != '0' else '1'}",
        f"{word}_{until}_{owner}",
        ticket.upper(),
        "",
        "live_",
    ):
        assert redeem(RING, other, STREAM, 1000) is None


def test_a_ticket_outlives_a_restart_and_ends_with_its_key() -> None:
    ticket = issue(ONE, STREAM, 1000)
    again = KeyRing(parse_keys("two,one:read:t."))
    caller = redeem(again, ticket, STREAM, 2000)
    assert caller is again.keys[1].caller
    assert redeem(KeyRing(parse_keys("two")), ticket, STREAM, 2000) is None
    # The ticket grants the present rights of its key.
    changed = redeem(KeyRing(parse_keys("one:write:s.")), ticket, STREAM, 2000)
    assert changed is not None
    assert changed.prefixes == ("s.",)
