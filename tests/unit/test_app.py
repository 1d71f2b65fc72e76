"""`create_app` in this process: its lifespan, mounts, and names in paths."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from topics_server.api.application import mounted_length, own_scope
from topics_server.app import create_app, lifespan, ready
from topics_server.node.boot import Boot
from topics_server.settings import Settings
from topics_server.values.errors import StartRefused

with warnings.catch_warnings():
    # Newer versions of Starlette require another HTTP client than the project's.
    warnings.simplefilter("ignore")
    from starlette.testclient import TestClient

BASE = "http://localhost"


def settings_in(folder: Path) -> Settings:
    return Settings(data_dir=folder / "data", wal_shards=1)


def when_ready(client: TestClient, prefix: str = "") -> None:
    for _ in range(10_000):
        if client.get(f"{prefix}/v0/ready").status_code == 200:
            return
    raise AssertionError("never ready")


def host_of(events: Starlette, path: str) -> Starlette:
    """An application that has the store mounted, and nothing else."""

    @contextlib.asynccontextmanager
    async def living(_host: Starlette) -> AsyncIterator[None]:
        async with lifespan(events):
            await ready(events)
            yield

    return Starlette(routes=[Mount(path, events)], lifespan=living)


def test_what_is_appended_is_there_after_the_next_lifespan(tmp_path: Path) -> None:
    app = create_app(settings_in(tmp_path))
    with TestClient(app, BASE) as client:
        when_ready(client)
        answer = client.post("/v0/topics/jobs", json={"records": [{"data": {"n": 1}}]})
        assert (answer.status_code, answer.json()["first_seq"]) == (201, 1)
    with TestClient(app, BASE) as client:
        when_ready(client)
        page = client.post("/v0/topics/jobs/diff", json={"from_seq": 0}).json()
        assert [record["data"] for record in page["records"]] == [{"n": 1}]


def test_without_its_lifespan_the_store_says_what_is_missing(tmp_path: Path) -> None:
    client = TestClient(create_app(settings_in(tmp_path)), BASE)
    for path in ("/v0/ready", "/v0/topics"):
        answer = client.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
        assert "topics_server.app.lifespan" in answer.json()["error"]["message"]
    assert client.get("/v0/health").status_code == 200
    assert not (tmp_path / "data").exists()


def test_probes_answer_while_it_recovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_start, start = threading.Event(), Boot.start

    async def late(boot: Boot) -> None:
        import asyncio

        await asyncio.to_thread(may_start.wait, 10)
        await start(boot)

    monkeypatch.setattr(Boot, "start", late)
    with TestClient(create_app(settings_in(tmp_path)), BASE) as client:
        answer = client.get("/v0/ready")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
        assert answer.json()["error"]["detail"] == {"replay_progress": 0.0}
        may_start.set()
        when_ready(client)


def test_a_start_that_fails_is_told_and_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(_boot: Boot) -> None:
        raise StartRefused("a file is gone")

    monkeypatch.setattr(Boot, "start", refused)
    app = create_app(settings_in(tmp_path))
    with TestClient(app, BASE) as client:
        for _ in range(10_000):
            message = client.get("/v0/ready").json()["error"]["message"]
            if "log has the reason" in message:
                break
        else:
            raise AssertionError(message)
    with pytest.raises(StartRefused, match="failed"), TestClient(host_of(app, "/x"), BASE):
        pass


def test_a_directory_in_use_ends_the_start(tmp_path: Path) -> None:
    with TestClient(create_app(settings_in(tmp_path)), BASE) as client:
        when_ready(client)
        with (
            pytest.raises(StartRefused),
            TestClient(create_app(settings_in(tmp_path)), BASE),
        ):
            pass


@pytest.mark.parametrize(("path", "url"), [("/events", "/events"), ("/my app", "/my%20app")])
def test_below_a_path_names_stay_as_they_were_sent(tmp_path: Path, path: str, url: str) -> None:
    with TestClient(host_of(create_app(settings_in(tmp_path)), path), BASE) as client:
        answer = client.post(f"{url}/v0/topics/jobs", json={"records": [{"data": 1}]})
        assert answer.status_code == 201, answer.text
        assert client.get(f"{url}/v0/topics/jobs").json()["head_seq"] == 1
        slashed = client.get(f"{url}/v0/topics/a%2Fdiff")
        assert (slashed.status_code, slashed.json()["error"]["code"]) == (400, "invalid_request")
        unknown = client.get(f"{url}/v0/nothing")
        assert unknown.json()["error"]["detail"] == {"path": "/v0/nothing"}
        assert client.get(f"{url}/v0/topics/").status_code == 404, "and no redirect"
        made = client.put(f"{url}/v1/stream/a%20b", headers={"content-type": "text/plain"})
        assert made.headers["location"] == f"{BASE}{url}/v1/stream/a%20b"
        forked = {"content-type": "text/plain", "stream-forked-from": f"{url}/v1/stream/a%20b"}
        assert client.put(f"{url}/v1/stream/c", headers=forked).status_code == 201
        assert client.get(f"{url}/v0/openapi.json").json()["servers"] == [{"url": url}]
        assert f"{BASE}{url}/v0/docs" in client.get(f"{url}/").text
        wrong = client.delete(f"{url}/v0/watch")
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "OPTIONS, POST")


@pytest.mark.parametrize(
    ("raw_path", "root_path", "length"),
    [
        (b"/v0/topics", "", 0),
        (b"/a/v0", "/a", 2),
        (b"/a/v0", "/a/", 2),
        (b"/my%20app/v0", "/my app", 9),
        (b"/m%79%20app/v0", "/my app", 11),
        (b"/%C3%A4/v0", "/ä", 7),
        (b"/a", "/a", 2),
        # A server whose paths lack the mount's prefix, and a path that only begins like the prefix.
        (b"/v0/topics", "/a", 0),
        (b"/ab/v0", "/a", 0),
    ],
)
def test_the_mount_is_cut_by_its_decoded_length(
    raw_path: bytes, root_path: str, length: int
) -> None:
    assert mounted_length(raw_path, root_path) == length


async def _send(_message: Any) -> None: ...


@pytest.mark.parametrize("path", ["/v0/topics/100%25", "/v0/topics/a b", "/v0/topics/ä"])
def test_without_a_raw_path_the_path_is_escaped_again(path: str) -> None:
    found = own_scope({"type": "http", "path": path, "headers": []}, _send)
    from urllib.parse import unquote

    assert unquote(found["path"]) == path
    assert found["raw_path"].decode() == found["path"]
