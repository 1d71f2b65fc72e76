"""Which web pages may make a browser call: the rule against cross-site requests, case by case."""

from __future__ import annotations

from itertools import product

import pytest

from topics_server.auth.origin import check_origin, is_allowed, is_concerned
from topics_server.values.errors import Code, TopicsError

LISTED = frozenset({b"https://app.example"})
SITES = (None, b"none", b"same-origin", b"same-site", b"cross-site", b"Same-Origin", b"")
# `+`: allowed, `-`: refused; one for each site of `SITES`.
TABLE: list[tuple[bytes | None, bytes | None, str]] = [
    # No browser headers: curl, SDKs; and a browser's image or link, which sends no Origin.
    (None, b"topics:4000", "+++--++"),
    (None, None, "+++--++"),
    # The server's own pages, also behind a proxy that adds TLS or drops the port.
    (b"http://topics:4000", b"topics:4000", "+++--++"),
    (b"http://topics:4000", b"TOPICS:4000", "+++--++"),
    (b"https://topics", b"topics", "+++--++"),
    (b"https://topics", b"topics:443", "+++--++"),
    (b"http://topics", b"topics:80", "+++--++"),
    (b"http://[::1]:4000", b"[::1]:4000", "+++--++"),
    # Behind a proxy that sends another Host, only the browser's header decides.
    (b"https://public.example", b"127.0.0.1:4000", "-++----"),
    # Another port, host, or scheme's port; a name with the same beginning; values that are no
    # origin.
    (b"http://topics:8000", b"topics:4000", "-++----"),
    (b"http://topics:40001", b"topics:4000", "-++----"),
    (b"http://localhost:4000", b"127.0.0.1:4000", "-++----"),
    (b"http://topics", b"topics:443", "-++----"),
    (b"https://topics", b"topics:80", "-++----"),
    (b"https://topics", b"topics:4000", "-++----"),
    (b"https://app.example.evil", b"topics", "-++----"),
    (b"http://app.example", b"topics", "-++----"),
    (b"HTTPS://app.example", b"topics", "-++----"),
    (b"null", b"topics", "-++----"),
    (b"null", b"null", "-++----"),
    (b"", b"topics", "-++----"),
    (b"", b"", "-++----"),
    (b"http://", b"", "-++----"),
    (b"://topics", b"topics", "-++----"),
    (b"topics", b"topics", "-++----"),
    (b"file://topics", b"topics", "-++----"),
    (b"http://topics", None, "-++----"),
    (b"http://topics, http://topics", b"topics", "-++----"),
    # A listed origin is allowed whatever the other headers are.
    (b"https://app.example", b"topics", "+++++++"),
    (b"https://app.example", None, "+++++++"),
]
CASES = [
    (origin, site, host, verdict == "+")
    for origin, host, verdicts in TABLE
    for site, verdict in zip(SITES, verdicts, strict=True)
]


@pytest.mark.parametrize(("origin", "site", "host", "expected"), CASES)
def test_the_rule(
    origin: bytes | None, site: bytes | None, host: bytes | None, expected: bool
) -> None:
    found = is_allowed(origin, site, host, allowed=LISTED, is_authorized=False)
    assert found == expected
    assert is_allowed(origin, site, host, allowed=LISTED, is_authorized=True)


CHANGING = ("POST", "PUT", "PATCH", "DELETE")
QUERIES = [
    (b"touch=true", True),
    (b"page_size=1&touch=true", True),
    (b"t%6Fuch=tru%65", True),
    (b"touch=true&touch=false", True),
    (b"", False),
    (b"touch=false", False),
    (b"touch=false&touch=true", False),
    (b"touch=TRUE", False),
    (b"touch", False),
    (b"prefix=touch=true", False),
    (b"touched=true", False),
]


@pytest.mark.parametrize(
    ("method", "query", "claims"), list(product(CHANGING, (b"", b"touch=false"), (True, False)))
)
def test_the_rule_covers_requests_that_change_something(
    method: str, query: bytes, claims: bool
) -> None:
    assert is_concerned(method, query, claims=claims)


@pytest.mark.parametrize(("method", "case"), list(product(("GET", "HEAD"), QUERIES)))
def test_a_read_is_concerned_where_it_claims_or_touches(
    method: str, case: tuple[bytes, bool]
) -> None:
    query, touches = case
    assert is_concerned(method, query, claims=False) == touches
    assert is_concerned(method, query, claims=True)


@pytest.mark.parametrize("query", [query for query, _ in QUERIES])
def test_a_preflight_never_is(query: bytes) -> None:
    assert not is_concerned("OPTIONS", query, claims=True)


def test_a_refusal_repeats_part_of_the_request() -> None:
    headers = {b"origin": b"\xff" * 1000, b"host": b"topics"}
    with pytest.raises(TopicsError) as refused:
        check_origin(headers, LISTED, is_authorized=False)
    assert refused.value.code is Code.FORBIDDEN
    assert refused.value.detail == {"origin": "\xff" * 256}
    assert "TOPICS_CORS_ORIGINS" in refused.value.message
    with pytest.raises(TopicsError) as refused:
        check_origin({b"sec-fetch-site": b"cross-site"}, LISTED, is_authorized=False)
    assert refused.value.detail == {"sec_fetch_site": "cross-site"}
    check_origin(headers, LISTED, is_authorized=True)
