"""A client of either kind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.contract.clients.both import on_loop
from topics_server.client import Client

NewClient = Callable[..., Any]


@pytest.fixture(params=["blocking", "async"])
def new_client(request: pytest.FixtureRequest) -> Iterator[NewClient]:
    """Makes clients of one kind with plain calls; they are closed at the end."""
    with ExitStack() as stack:
        if request.param == "blocking":
            yield lambda url, **options: stack.enter_context(Client(url, **options))
            return
        loop = asyncio.new_event_loop()
        stack.callback(loop.close)
        stack.callback(lambda: loop.run_until_complete(loop.shutdown_default_executor()))
        stack.callback(lambda: loop.run_until_complete(loop.shutdown_asyncgens()))
        yield lambda url, **options: stack.enter_context(on_loop(loop, url, **options))
