"""`addresses`: a program's token and URL, and the messages for wrong ones."""

from __future__ import annotations

import pytest

from topics_server.client.addresses import (
    checked_header,
    checked_path,
    checked_token,
    checked_url,
    segment,
)

EXAMPLE = "http://127.0.0.1:4000"


@pytest.mark.parametrize("token", [None, ""])
def test_no_token_is_none(token: str | None) -> None:
    assert checked_token(token) is None


@pytest.mark.parametrize("token", ["key-1", "key-1\n", " key-1\r\n", "\tkey-1 "])
def test_white_space_around_a_token_is_not_part_of_it(token: str) -> None:
    assert checked_token(token) == "key-1"


@pytest.mark.parametrize(
    ("token", "told"),
    [
        ("hush\nhush", "character 5 of the token is white space"),
        ("hush hush", "character 5 of the token is white space"),
        ("hüsh", "character 2 of the token is not a visible ASCII character"),
        ("hush\0", "character 5 of the token is not a visible ASCII character"),
        ("hush\x7f", "character 5 of the token is not a visible ASCII character"),
        ("hush\ud800", "character 5 of the token is not a visible ASCII character"),
        (" \n", "the token is only white space"),
    ],
)
def test_a_token_that_no_header_carries_is_refused_and_never_repeated(
    token: str, told: str
) -> None:
    with pytest.raises(ValueError) as caught:
        checked_token(token)
    assert str(caught.value).startswith(told)
    assert "ush" not in str(caught.value)
    # The cause would put the token into a traceback.
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    "url",
    [
        EXAMPLE,
        "https://events.example.org",
        "http://[::1]:4000/prefix",
        "http://münchen.example",
        "http://localhost",
    ],
)
def test_a_url_of_a_server_is_taken(url: str) -> None:
    assert checked_url(url, EXAMPLE).hostname


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:4000",
        "ftp://localhost",
        "http://",
        "http://[::1",
        "http://a..b",
        "http://" + "a" * 64 + ".example",
        "http://localhost:99999",
        "http://localhost:0",
        "http://localhost:port",
        "http://local host",
        "http://localhost/\n",
        "http://localhost/\x7f",
    ],
)
def test_another_url_is_refused_in_one_line(url: str) -> None:
    with pytest.raises(ValueError, match="not the URL of a server") as caught:
        checked_url(url, EXAMPLE)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["http://me:hush@localhost", "http://hush@[::1", "http://hush@a..b"]
)
def test_credentials_in_a_url_are_refused_and_never_repeated(url: str) -> None:
    with pytest.raises(ValueError) as caught:
        checked_url(url, EXAMPLE)
    assert "hush" not in str(caught.value)


def test_a_name_is_one_segment_and_never_dots() -> None:
    assert segment("a/b c.d") == "a%2Fb%20c.d"
    assert segment("...") == "..."
    for name in (".", ".."):
        with pytest.raises(ValueError, match="is not a name"):
            segment(name)


def test_a_path_has_no_segment_that_a_url_resolves() -> None:
    assert checked_path("/v0/topics/a..b/.c?x=/../") == "/v0/topics/a..b/.c?x=/../"
    for path in ("/v0/..", "/v0/./x", "/v0/%2e%2E/x", "/v0/.%2e", "/v0/a/..?x"):
        with pytest.raises(ValueError, match="segment"):
            checked_path(path)


def test_a_header_has_printable_ascii() -> None:
    assert checked_header("text/plain; charset=utf-8", "x") == "text/plain; charset=utf-8"
    for value in ("a\r\nb", "ü", " a", "a\x7f"):
        with pytest.raises(ValueError, match="the key must be"):
            checked_header(value, "the key")
