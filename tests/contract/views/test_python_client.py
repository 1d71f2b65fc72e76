"""Views through the Python client, blocking and on a loop."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from tests.contract.clients.both import on_loop
from tests.contract.conftest import NewServer
from tests.contract.driver import Api, good
from tests.ports import lasting_port
from topics_server.client import (
    AsyncViewClient,
    Client,
    InvalidRequest,
    NotFound,
    Unavailable,
    Unreachable,
    ViewClient,
)


def test_a_view_is_defined_queried_and_dropped(api: Api, topic: str) -> None:
    good(api.put(topic))
    with ViewClient(topic, "by-tag", url=api.url) as view:
        made = view.define(shortcut={"count_by_tag": True})
        assert made.created
        assert made.apply[0].startswith("INSERT INTO counts")
        seq = api.add(topic, 1, 2, 3, tag="a")["last_seq"]
        sql = "SELECT tag, count FROM counts WHERE tag = :tag"
        answer = view.query(sql, {"tag": "a"}, after=seq)
        assert answer.dicts() == [{"tag": "a", "count": 3}]
        assert answer.processed_sequence == seq
        assert not answer.truncated
        assert view.query(name="all").rows[0][:2] == ["a", 3]
        assert view.query("SELECT ? + ?", [1, 2]).rows == [[3]]
        stats = view.stats()
        assert (stats.view_name, stats.processed_sequence, stats.lag) == ("by-tag", seq, 0)
        view.rebuild()
        assert view.query(sql, {"tag": "a"}, after=seq).rows == [["a", 3]]
        for rows in view.live("get", tag="a"):
            assert rows.rows[0][:2] == ["a", 3]
            break
        with pytest.raises(InvalidRequest):
            view.query("DELETE FROM counts")
        with pytest.raises(InvalidRequest):
            view.define(schema="CREATE TABLE t (a)", apply="INSERT INTO t VALUES (random())")
        with pytest.raises(ValueError, match="either sql or the name"):
            view.query()
        assert view.drop()
        assert not view.drop()
        with pytest.raises(NotFound):
            view.query("SELECT 1")


def test_a_record_that_stops_the_view_is_told_and_passed(api: Api, topic: str) -> None:
    good(api.put(topic))
    with ViewClient(topic, "strict", url=api.url) as view:
        table = "CREATE TABLE t (n INTEGER CHECK (n > 0))"
        view.define(schema=[table], apply="INSERT INTO t VALUES (:data)")
        api.add(topic, 1, -1, 2)
        while (error := view.stats().last_error) is None:
            pass
        assert (error.seq, error.statement[:6]) == (2, "INSERT")
        view.rebuild(skip=2)
        assert view.query("SELECT n FROM t", after=3).rows == [[1], [2]]


def test_a_wait_that_ends_is_tried_again_and_then_told(own: NewServer) -> None:
    """[V-09]"""
    server = own(TOPICS_VIEW_AFTER_MS="100")
    api = server.start()
    good(api.put("t"))

    async def script() -> None:
        async with AsyncViewClient("t", "v", url=api.url, patience_ms=20_000) as view:
            await view.define(shortcut={"count_by_tag": True})
            waiting = asyncio.ensure_future(view.query("SELECT count FROM counts", after=1))
            # The wait is longer than the server's limit, so the client asks again.
            await asyncio.sleep(0.3)
            assert not waiting.done()
            await asyncio.to_thread(api.add, "t", 1, tag="a")
            assert (await waiting).rows == [[1]]
            async for rows in view.live("all"):
                assert rows.processed_sequence == 1
                break
        async with AsyncViewClient("t", "v", url=api.url, patience_ms=0) as view:
            with pytest.raises(Unavailable) as late:
                await view.query("SELECT 1", after=9)
            assert (late.value.status, late.value.code) == (504, "view_timeout")
            assert (await view.stats()).lag == 0
        async with AsyncViewClient("t", "v", url="http://127.0.0.1:1", patience_ms=0) as view:
            with pytest.raises(Unreachable):
                await view.query("SELECT 1")

    asyncio.run(script())


@pytest.mark.parametrize("kind", ["blocking", "async"])
def test_live_rows_go_on_over_a_kill(own: NewServer, kind: str) -> None:
    server = own(TOPICS_PORT=str(lasting_port()))
    api = server.start()
    good(api.put("t", {"durability": "fsync"}))
    api.add("t", 1, tag="a")
    with contextlib.ExitStack() as stack:
        if kind == "blocking":
            client: Any = stack.enter_context(Client(api.url, patience_ms=60_000))
        else:
            loop = asyncio.new_event_loop()
            stack.callback(loop.close)
            stack.callback(lambda: loop.run_until_complete(loop.shutdown_asyncgens()))
            client = stack.enter_context(on_loop(loop, api.url, patience_ms=60_000))
        view = client.view("t", "v")
        view.define(shortcut={"count_by_tag": True})
        view.query(name="all", after=1)
        with contextlib.closing(view.live("all")) as results:
            assert [row[:2] for row in next(results).rows] == [["a", 1]]
            api = server.crash()
            # The rows on the new connection are unchanged, so the next rows that the client yields
            # are those after the append.
            api.add("t", 2, tag="a")
            assert [row[:2] for row in next(results).rows] == [["a", 2]]
