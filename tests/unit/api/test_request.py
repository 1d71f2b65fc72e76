"""Waiting requests: only a connected client with a valid key gets the result."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest

from tests.garbage import nothing_for_the_collector
from topics_server.api.request import Request, held_by
from topics_server.api.request_body import ClientGoneError
from topics_server.auth.api_keys import EVERYBODY, Caller, KeyRing
from topics_server.values.errors import Code, TopicsError
from topics_server.values.texts.key_list import parse_keys

pytestmark = pytest.mark.anyio


def asked(caller: Caller = EVERYBODY, gone: Callable[[], Awaitable[None]] | None = None) -> Request:
    return Request("GET", "t", {}, b"", b"", 0.0, gone or asyncio.Event().wait, caller)  # type: ignore[arg-type]


def keyed() -> tuple[KeyRing, Caller]:
    ring = KeyRing(parse_keys("one,two"))
    caller = ring.find(b"one")
    assert caller is not None
    return ring, caller


async def come(value: str) -> str:
    await asyncio.sleep(0)
    return value


async def test_what_comes_is_told() -> None:
    _, caller = keyed()
    for who in (EVERYBODY, caller):
        assert await held_by(asked(who), come("page")) == "page"
    assert caller.key is not None
    assert not caller.key.open, "nobody is left to be told of the key's end"


async def test_what_it_fails_with_is_raised() -> None:
    async def fail() -> None:
        raise TopicsError(Code.TOPIC_NOT_FOUND, "gone")

    with pytest.raises(TopicsError, match="gone"):
        await held_by(asked(), fail())


async def test_who_hangs_up_ends_the_wait() -> None:
    coming = asyncio.ensure_future(asyncio.Event().wait())
    with pytest.raises(ClientGoneError):
        await held_by(asked(gone=lambda: asyncio.sleep(0)), coming)
    await asyncio.wait((coming,))
    assert coming.cancelled()


@pytest.mark.parametrize("keys", ["two", "one:write,two"])
async def test_a_key_that_is_taken_away_or_changed_ends_the_wait(keys: str) -> None:
    ring, caller = keyed()
    coming = asyncio.ensure_future(asyncio.Event().wait())
    waiting = asyncio.ensure_future(held_by(asked(caller), coming))
    await asyncio.sleep(0)
    ring.replace(parse_keys(keys))
    with pytest.raises(TopicsError) as caught:
        await waiting
    assert caught.value.code is Code.UNAUTHORIZED
    await asyncio.wait((coming,))
    assert coming.cancelled()


async def test_a_key_of_others_ends_nothing() -> None:
    ring, caller = keyed()
    came: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(held_by(asked(caller), came))
    await asyncio.sleep(0)
    ring.replace(parse_keys("one,three"))
    await asyncio.sleep(0)
    came.set_result("page")
    assert await waiting == "page"


async def test_what_came_in_the_turn_that_took_the_key_away_is_not_told() -> None:
    ring, caller = keyed()
    came: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(held_by(asked(caller), came))
    await asyncio.sleep(0)
    came.set_result("page")
    ring.replace(parse_keys("two"))
    with pytest.raises(TopicsError) as caught:
        await waiting
    assert caught.value.code is Code.UNAUTHORIZED


async def test_of_a_key_that_was_gone_before_nothing_is_waited_for() -> None:
    ring, caller = keyed()
    ring.replace(parse_keys("two"))
    with pytest.raises(TopicsError) as caught:
        await held_by(asked(caller), asyncio.Event().wait())
    assert caught.value.code is Code.UNAUTHORIZED


async def test_an_error_leaves_nothing_for_the_collector() -> None:
    async def fail() -> None:
        raise TopicsError(Code.TOPIC_NOT_FOUND, "gone")

    with nothing_for_the_collector(), contextlib.suppress(TopicsError):
        await held_by(asked(), fail())
        raise AssertionError("it fails")
