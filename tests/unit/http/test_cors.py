"""`cors`: the headers for a page of a listed origin."""

from __future__ import annotations

from topics_server.http.cors import cors_headers

ORIGIN = (b"access-control-allow-origin", b"http://a")
VARY = (b"vary", b"origin")


def test_an_answer_may_be_read_with_what_it_exposes() -> None:
    exposed = (
        b"access-control-expose-headers",
        b"allow, retry-after, x-request-id, producer-epoch, producer-seq, producer-expected-seq, "
        b"producer-received-seq, topic-first-seq, topic-last-seq, "
        b"stream-next-offset, stream-cursor, stream-up-to-date, stream-closed, stream-ttl, "
        b"stream-expires-at, stream-sse-data-encoding, topics-page, topics-tombstone, etag, "
        b"location, content-encoding",
    )
    for method in ("GET", "POST", "OPTIONS"):
        assert cors_headers(method, {b"origin": b"http://a"}, ()) == (ORIGIN, VARY, exposed)


def test_only_options_is_a_preflight() -> None:
    asked = {b"origin": b"http://a", b"access-control-request-method": b"PUT"}
    names = [name for name, _ in cors_headers("OPTIONS", asked, ((b"allow", b"GET, PUT"),))]
    assert names == [
        b"access-control-allow-origin",
        b"vary",
        b"access-control-allow-methods",
        b"access-control-allow-headers",
        b"access-control-max-age",
    ]
    told = dict(cors_headers("OPTIONS", asked, ((b"allow", b"GET, PUT"),)))
    assert told[b"access-control-allow-methods"] == b"GET, PUT"
    assert b"access-control-allow-methods" not in dict(cors_headers("GET", asked, ()))


def test_a_preflight_of_no_endpoint_tells_no_methods() -> None:
    asked = {b"origin": b"http://a", b"access-control-request-method": b"PUT"}
    assert cors_headers("OPTIONS", asked, ()) == (ORIGIN, VARY)
