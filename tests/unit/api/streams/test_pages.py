"""`api/streams/pages`: the form of a page, and how long it may be cached."""

from __future__ import annotations

from topics_server.api.streams.pages import (
    body_of,
    cursor_after,
    is_known,
    keeping,
    tag_of,
    tag_of_range,
)
from topics_server.streams.values import Position, StreamPage, StreamView

EPOCH_MS = 1_728_432_000_000


def page(
    *datas: bytes,
    kind: str = "text/plain",
    first: int = 1,
    is_up_to_date: bool = True,
    is_closed: bool = False,
) -> StreamPage:
    seqs = range(first, first + len(datas))
    end = Position(first + len(datas) - 1, 7)
    view = StreamView("p", "t", 7, kind, kind == "application/json", end, is_closed)
    return StreamPage(view, datas, seqs, end, is_up_to_date, is_closed)


def test_messages_are_an_array_or_their_bytes() -> None:
    assert body_of(page(b"a", b"b")) == b"ab"
    assert body_of(page(b"1", memoryview(b"2").tobytes(), kind="application/json")) == b"[1,2]"
    assert body_of(page(kind="application/json")) == b"[]"


def test_a_tag_tells_pages_apart() -> None:
    pages = [
        page(b"a"),
        page(b"a", is_up_to_date=False),
        page(b"a", is_closed=True),
        page(b"a", b"b"),
        page(b"b", first=2),
        page(),
    ]
    tags = [tag_of(one, start) for one in pages for start in (None, Position(0, 0), Position(3, 7))]
    assert len(set(tags)) == len(tags)


def test_a_tag_is_known_by_any_of_a_list() -> None:
    tag = b'W/"x"'
    for sent in (b'W/"x"', b'"x"', b'"a", W/"x"', b'"a","x"', b"*"):
        assert is_known({b"if-none-match": sent}, tag)
    for sent in (b"", b"x", b'"a"', b'W/"xx"'):
        assert not is_known({b"if-none-match": sent}, tag)
    assert not is_known({}, tag)


def test_only_what_will_not_change_may_be_kept() -> None:
    kept = b"max-age=60, stale-while-revalidate=300"
    assert keeping(is_final=True, is_private=False)[1] == b"public, " + kept
    assert keeping(is_final=True, is_private=True)[1] == b"private, " + kept
    assert keeping(is_final=False, is_private=False)[1] == b"public, no-cache"
    assert keeping(is_final=False, is_private=True)[1] == b"private, no-cache"


def test_a_range_has_the_tag_of_the_page_that_holds_it() -> None:
    for is_closed in (False, True):
        one = page(b"a", b"b", is_closed=is_closed)
        assert tag_of_range(one, None, 2) == tag_of(one, None)
        assert tag_of_range(one, None, 1) != tag_of(one, None)


def test_cursors_rise() -> None:
    assert cursor_after(None, EPOCH_MS, 5) == 0
    assert cursor_after(None, EPOCH_MS - 1, 5) == 0
    now_ms = EPOCH_MS + 20_000 * 9 + 19_999
    assert cursor_after(None, now_ms, 5) == 9
    assert cursor_after(8, now_ms, 5) == 9
    assert cursor_after(9, now_ms, 0) == 10
    assert {cursor_after(9, now_ms, chance) for chance in range(1000)} == set(range(10, 190))
    assert cursor_after(500, now_ms, 0) == 501
