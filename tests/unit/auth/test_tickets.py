"""`auth/tickets`: a ticket is valid once, for a short time, for one session."""

from __future__ import annotations

import pytest

from topics_server.auth import tickets as module
from topics_server.auth.api_keys import KeyRing
from topics_server.auth.tickets import TICKET_TTL_MS, Tickets
from topics_server.values.texts.key_list import parse_keys

CALLER = KeyRing(parse_keys("one")).keys[0].caller


def test_a_ticket_is_good_once() -> None:
    tickets = Tickets()
    tickets.issue("a", "w", CALLER, 0)
    assert tickets.redeem("b", "w", 1) is None
    assert tickets.redeem("a", "w", 1) is CALLER
    assert tickets.redeem("a", "w", 1) is None


def test_a_ticket_is_good_for_its_session_only_and_then_used() -> None:
    tickets = Tickets()
    tickets.issue("a", "w", CALLER, 0)
    assert tickets.redeem("a", "x", 1) is None
    assert tickets.redeem("a", "w", 1) is None


def test_a_ticket_expires_within_a_minute() -> None:
    assert TICKET_TTL_MS <= 60_000
    tickets = Tickets()
    tickets.issue("a", "w", CALLER, 0)
    tickets.issue("b", "w", CALLER, 10)
    assert tickets.redeem("a", "w", TICKET_TTL_MS) is None
    assert len(tickets) == 1
    assert tickets.redeem("b", "w", TICKET_TTL_MS) is CALLER


def test_only_so_many_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TICKETS_MAX", 2)
    tickets = Tickets()
    for name in "abc":
        tickets.issue(name, "w", CALLER, 0)
    assert [tickets.redeem(name, "w", 1) for name in "abc"] == [None, CALLER, CALLER]
