"""`auth/hosts`: which `Host` values name the server."""

from __future__ import annotations

import pytest

from topics_server.auth.hosts import Hosts
from topics_server.values.errors import Code, TopicsError
from topics_server.values.texts.host_names import LOOPBACK_NAMES

LOCAL = Hosts(LOOPBACK_NAMES)


@pytest.mark.parametrize(
    "host",
    [b"localhost", b"LocalHost:4000", b"localhost.", b"127.0.0.1:1", b"[::1]", b"[0:0::1]:4000"],
)
def test_its_own_names_in_any_spelling_are_taken(host: bytes) -> None:
    for _ in range(2):
        LOCAL.check(host)


@pytest.mark.parametrize(
    "host",
    [
        b"evil.example",
        b"localhost.evil.example",
        b"127.0.0.1.evil.example:4000",
        b"127.0.0.2",
        b"[::2]",
        b"::1",
        b"",
        b":4000",
        b"localhost:4000:5",
        b"localhost:x",
        b"localhost\xff",
        b"a" * 5000,
    ],
)
def test_any_other_is_refused(host: bytes) -> None:
    with pytest.raises(TopicsError) as caught:
        LOCAL.check(host)
    assert caught.value.code is Code.FORBIDDEN
    assert len(caught.value.detail["host"]) <= 256


def test_a_request_without_host_is_no_browser() -> None:
    LOCAL.check(None)


def test_any_name_is_taken_where_there_is_no_list() -> None:
    Hosts().check(b"anything")
