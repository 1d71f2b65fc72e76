"""Keys beyond the matrix: what no answer reveals, the owner of a session, rotation, browsers."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from tests.contract.access.callers import INSIDE, KEYS, OUTSIDE, Guarded, said
from tests.contract.conftest import URL, NewServer
from tests.contract.driver import Server, eventually

QUEUE: Final[dict[str, object]] = {"type": "queue", "lease_ms": 100}
RECORD: Final[dict[str, object]] = {"records": [{"data": 1}]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    if URL:
        pytest.skip("needs a server of its own; TOPICS_CONTRACT_URL names a shared one")
    guarded = Guarded(tmp_path_factory.mktemp("access"))
    yield guarded
    guarded.close()


@pytest.fixture
def empty(server: Guarded) -> Guarded:
    """The server without any topic."""
    while topics := server.good("GET", "/v0/topics")["topics"]:
        for topic in topics:
            server.good("DELETE", f"/v0/topics/{topic['topic']}")
    return server


def pages(server: Guarded, what: str, query: str = "page_size=1") -> tuple[list[str], list[Any]]:
    """All names in the lists for the key with a prefix, and the cursors of the pages."""
    names: list[str] = []
    cursors: list[Any] = []
    path = f"/v0/{what}?{query}"
    for _ in range(100):
        told = server.ask("prefix", "GET", path).json()
        names += [entry[what[:-1]] for entry in told[what]]
        if "next_cursor" not in told:
            return names, cursors
        cursor = told["next_cursor"]
        cursors.append(json.loads(base64.urlsafe_b64decode(cursor + "==")))
        path = f"/v0/{what}?{query}&cursor={cursor}"
    raise AssertionError("pages without an end")


# --- what no answer reveals -----------------------------------------------------------------------


def test_lists_show_the_names_inside_and_their_cursors_too(empty: Guarded) -> None:
    """Contract §0.2 [0.2-24]"""
    inside = ["t.a", "t.b", "t.c"]
    for name in (*inside, "s.z", "t", "tz", "t-x", "u.a"):
        empty.good("PUT", f"/v0/topics/{name}", {})
    for query in ("page_size=1", "page_size=2", "page_size=1&prefix=t", "prefix=t."):
        names, cursors = pages(empty, "topics", query)
        assert names == inside
        assert all("t." in json.dumps(cursor) for cursor in cursors)
    assert pages(empty, "topics", "prefix=u") == ([], [])
    assert pages(empty, "topics", "prefix=t.b") == (["t.b"], [])


def test_routers_are_listed_that_stay_inside(empty: Guarded) -> None:
    """Contract §0.2 [0.2-24]"""
    for name, source, dest in (
        ("t.r1", "t.a", "t.b"),
        ("t.r2", "x.a", "t.c"),
        ("t.r3", "t.a", "x.b"),
        ("x.r4", "t.a", "t.d"),
        ("t.r5", "t.a", "t.e"),
    ):
        empty.good("PUT", f"/v0/routers/{name}", {"source": source, "dest": dest})
    names, _ = pages(empty, "routers")
    assert names == ["t.r1", "t.r5"]
    assert pages(empty, "routers", "source=t.a")[0] == ["t.r1", "t.r5"]
    for method, body in (
        ("GET", None),
        ("PUT", {"source": "t.a", "dest": "t.f"}),
        ("DELETE", None),
    ):
        told = empty.ask("prefix", method, "/v0/routers/t.r2", body)
        assert (told.status, told.code) == (403, "forbidden")
        assert b"x." not in told.body
    # The answer lists the routers removed with a topic, but only those inside the prefix.
    gone = empty.ask("prefix", "DELETE", "/v0/topics/t.a").json()
    assert gone["routers_removed"] == ["t.r1", "t.r5"]


def test_conflicts_of_routers_name_nothing_outside(empty: Guarded) -> None:
    put = "/v0/routers/"
    empty.good("PUT", f"{put}x.1", {"source": "t.b", "dest": "x.mid"})
    empty.good("PUT", f"{put}x.2", {"source": "x.mid", "dest": "t.a"})
    told = empty.ask("prefix", "PUT", f"{put}t.r", {"source": "t.a", "dest": "t.b"})
    assert (told.status, told.code) == (409, "router_cycle")
    assert told.json()["error"]["detail"]["cycle"] == ["t.a", "t.b", "t.a"]
    assert b"x." not in told.body
    whole = empty.ask("all", "PUT", f"{put}t.r", {"source": "t.a", "dest": "t.b"}).json()
    assert whole["error"]["detail"]["cycle"] == ["t.a", "t.b", "x.mid", "t.a"]
    told = empty.ask("prefix", "PUT", f"{put}t.r", {"source": "t.c", "dest": "t.a"})
    assert (told.status, told.code) == (409, "topic_exists_incompatible")
    assert told.json()["error"]["detail"] == {"reason": "router_dest_fan_in", "dest": "t.a"}
    assert b"x." not in told.body


def test_a_state_names_no_topic_outside(empty: Guarded) -> None:
    config = {**QUEUE, "dead_letter": OUTSIDE, "lease_log": "x.log"}
    empty.good("PUT", f"/v0/topics/{INSIDE}", config)
    told = empty.ask("prefix", "GET", f"/v0/topics/{INSIDE}")
    assert told.json()["config"]["dead_letter"] is None
    assert b"x." not in told.body
    assert empty.good("GET", f"/v0/topics/{INSIDE}")["config"]["dead_letter"] == OUTSIDE


def test_metrics_show_the_topics_and_routers_inside(empty: Guarded) -> None:
    empty.good("PUT", "/v0/routers/t.r", {"source": "t.a", "dest": "t.b"})
    empty.good("PUT", "/v0/routers/x.r", {"source": "x.a", "dest": "x.b"})
    told = empty.ask("prefix", "GET", "/v0/metrics").body.decode()
    assert 'topic="t.a"' in told
    assert 'router="t.r"' in told
    assert '"x.' not in told
    assert 'topic="x.a"' in empty.ask("all", "GET", "/v0/metrics").body.decode()


def test_the_set_of_paths_is_public(server: Guarded) -> None:
    """The set of paths is public; the content is not."""
    assert server.ask("none", "GET", "/v0/nothing").status == 404
    wrong = server.ask("none", "TRACE", "/v0/topics/t.a")
    assert (wrong.status, wrong.headers["allow"]) == (
        405,
        "DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT",
    )
    assert server.ask("none", "OPTIONS", "/v0/topics/t.a").status == 204
    # Only a caller with a key learns that a name is malformed.
    assert server.ask("none", "GET", "/v0/topics/a%20b").status == 401
    assert server.ask("prefix", "GET", "/v0/topics/a%20b").status == 400


def test_a_client_without_a_key_is_refused_before_the_body_is_read(server: Guarded) -> None:
    headers = {"content-type": "text/plain", "content-encoding": "zip"}
    for caller, status in (("none", 401), ("wrong", 401), ("read", 403), ("write", 415)):
        sent = {"authorization": f"Bearer {KEYS[caller]}"} if KEYS[caller] else {}
        told = server.api.http.post("/v0/topics/t.a", content=b"x", headers=headers | sent)
        assert told.status_code == status


@pytest.mark.parametrize(
    "header", ["Bearer", "Basic c2VjcmV0LWFsbA==", "secret-all", "Bearer secret-all x"]
)
def test_a_malformed_header_is_no_key(server: Guarded, header: str) -> None:
    """Contract §0.2 [0.2-02]"""
    told = server.api.http.get("/v0/topics", headers={"authorization": header})
    assert told.status_code == 401
    assert told.json()["error"]["code"] == "unauthorized"


# --- sessions -------------------------------------------------------------------------------------


def session(server: Guarded, caller: str, query: str = "") -> Any:
    """A watch session of this caller over `t.in`."""
    server.good("POST", f"/v0/topics/{INSIDE}", RECORD)
    told = server.ask(caller, "POST", f"/v0/watch{query}", {"topics": {INSIDE: {}}})
    assert told.status == 200, told.body
    return told.json()


def test_a_session_is_opened_by_the_key_that_made_it_only(server: Guarded) -> None:
    """Contract §7.1 [0.2-28, 0.2-29, 7.1-06, 7.7-02]"""
    url = session(server, "prefix")["stream_url"]
    assert server.ask("prefix", "GET", url).status == 200
    for caller in ("none", "wrong", "all", "read"):
        told = server.ask(caller, "GET", url)
        assert (told.status, told.code) == (401, "unauthorized")
    assert server.ask("write", "GET", url).status == 403


def test_whose_a_session_is_outlives_a_restart_and_a_crash(tmp_path: Path) -> None:
    """Contract §7.1 [0.2-28]"""
    guarded = Guarded(tmp_path)
    url = session(guarded, "prefix")["stream_url"]
    for again in (guarded.server.restart, guarded.server.crash):
        guarded.api = again()
        assert guarded.ask("all", "GET", url).status == 401
        assert guarded.ask("prefix", "GET", url).status == 200
    # The key may use fewer names now, so it may no longer open the earlier session.
    keys = f"{KEYS['all']},{KEYS['prefix']}::u."
    guarded.server.env = {"TOPICS_API_KEYS": keys}
    guarded.api = guarded.server.restart()
    assert guarded.ask("prefix", "GET", url).status == 403
    guarded.close()


def test_a_token_in_the_url_opens_streams_and_nothing_else(server: Guarded) -> None:
    """Contract §7.1 [7.1-06, 7.1-08, 7.1-09]; a header wins."""
    server.good("PUT", "/v0/topics/t.jobs", QUEUE)
    url = session(server, "all")["stream_url"]
    token = f"token={KEYS['all']}"
    assert server.ask("none", "GET", f"{url}?{token}").status == 200
    assert server.ask("none", "GET", f"{url}?token=secret%2Dall&token=x").status == 200
    assert server.ask("none", "GET", f"{url}?token=x&{token}").status == 401
    assert server.ask("none", "GET", f"{url}?token=").status == 401
    assert server.ask("wrong", "GET", f"{url}?{token}").status == 401
    assert server.ask("none", "GET", f"/v0/topics/t.jobs/work?node=n&{token}").status == 200
    for path in ("/v0/topics", "/v0/topics/t.jobs", "/v0/metrics", "/v0/ws"):
        assert server.ask("none", "GET", f"{path}?{token}").status == 401
    assert server.ask("none", "POST", f"/v0/topics/t.jobs?{token}", RECORD).status == 401


def test_a_ticket_opens_one_stream_once(server: Guarded) -> None:
    told = session(server, "prefix", "?ticket=true")
    other = session(server, "prefix")
    assert told["ticket_ttl_ms"] <= 60_000
    url, ticket = told["stream_url"], told["ticket"]
    assert "ticket" not in other
    assert server.ask("none", "GET", f"{url}?ticket={ticket}x").status == 401
    assert server.ask("none", "GET", f"{url}?ticket={ticket}").status == 200
    assert server.ask("none", "GET", f"{url}?ticket={ticket}").status == 401
    # The ticket does not open another session, and this use consumes it.
    told = session(server, "prefix", "?ticket=true")
    elsewhere = f"{other['stream_url']}?ticket={told['ticket']}"
    assert server.ask("none", "GET", elsewhere).status == 401
    assert server.ask("none", "GET", f"{told['stream_url']}?ticket={told['ticket']}").status == 401
    # The ticket opens only its own stream.
    told = session(server, "prefix", "?ticket=true")
    assert server.ask("none", "GET", f"/v0/topics?ticket={told['ticket']}").status == 401


def test_a_browser_hands_its_key_to_a_socket_as_a_subprotocol(server: Guarded) -> None:
    def coded(secret: str) -> str:
        return "topics.bearer." + base64.urlsafe_b64encode(secret.encode()).decode().rstrip("=")

    with server.socket("none", subprotocols=["topics.v0", coded("secret-read")]) as socket:
        assert socket.subprotocol == "topics.v0"
        assert said(socket, op="publish", topic=INSIDE, **RECORD)["code"] == "forbidden"
    with server.socket("none", subprotocols=[coded("secret-read"), "topics.v0"]) as socket:
        assert socket.subprotocol == "topics.v0"
    for offered in ([coded("secret-rea"), "topics.v0"], ["topics.bearer.", "topics.v0"]):
        with pytest.raises(InvalidStatus) as refused, server.socket("none", subprotocols=offered):
            pass
        assert refused.value.response.status_code == 401


# --- rotation -------------------------------------------------------------------------------------


@pytest.mark.connection(reason="`topics serve` reads its file of keys on SIGHUP")
def test_a_file_of_keys_is_read_anew_on_sighup(own: NewServer, tmp_path: Path) -> None:
    """Contract §12 [12-04]: SIGHUP does not change the keys of the environment."""
    file = tmp_path / "keys"
    file.write_text("# ours\nstays-key\nleaves-key:rw\nshrinks-key::t.\n")
    file.chmod(0o600)
    server = own(TOPICS_API_KEYS="own-key", TOPICS_API_KEYS_FILE=str(file))
    api = server.start()

    def status(key: str, path: str = "/v0/topics") -> int:
        return api.http.get(path, headers=bearer(key)).status_code

    api.http.put("/v0/topics/t.a", json={}, headers=bearer("own-key")).raise_for_status()
    keys = ("own-key", "stays-key", "leaves-key", "shrinks-key")
    assert [status(key) for key in keys] == [200] * 4
    with contextlib.ExitStack() as stack:
        sockets = {key: stack.enter_context(opened(api.url, key)) for key in keys}
        streams = {key: watching(api.http, key) for key in ("stays-key", "leaves-key")}
        for stream in streams.values():
            stack.callback(stream.close)
        file.write_text("stays-key\nshrinks-key:r:t.\nnew-key\n")
        reload(server)
        eventually(lambda: status("new-key") == 200, "the new key is known", 30)
        assert [status(key) for key in keys] == [200, 200, 401, 200]
        for key in ("leaves-key", "shrinks-key"):
            told = json.loads(sockets[key].recv(timeout=30))
            assert (told["op"], told["code"]) == ("error", "unauthorized")
            with pytest.raises(ConnectionClosed) as closed:
                sockets[key].recv(timeout=30)
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1008
        assert b'"code":401' in b"".join(streams["leaves-key"].iter_raw())
        for key in ("own-key", "stays-key"):
            assert said(sockets[key], op="ping")["op"] == "pong"
        # A file that cannot be used changes nothing.
        for text, mode in (("broken-key:x\n", 0o600), ("", 0o600), ("open-key\n", 0o644)):
            file.write_text(text)
            file.chmod(mode)
            before = server.log.read_text().count("the keys stay as they are")
            reload(server)
            eventually(
                lambda before=before: (  # type: ignore[misc]
                    server.log.read_text().count("the keys stay as they are") > before
                ),
                "it is logged",
                30,
            )
            file.chmod(0o600)
        assert [status(key) for key in ("own-key", "stays-key", "new-key")] == [200] * 3
        assert said(sockets["stays-key"], op="ping")["op"] == "pong"
        assert not streams["stays-key"].is_closed
    told = server.log.read_text()
    assert not any(f"{name}-key" in told for name in ("own", "stays", "leaves", "broken", "open"))
    server.stop()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644])
def test_a_file_that_others_may_read_refuses_the_start(
    own: NewServer, tmp_path: Path, mode: int
) -> None:
    file = tmp_path / "keys"
    file.write_text("some-key\n")
    file.chmod(mode)
    (line,) = own(TOPICS_API_KEYS_FILE=str(file)).refusal().splitlines()
    assert line == f"TOPICS_API_KEYS_FILE={file}: others may read it: chmod 600"


def bearer(key: str) -> dict[str, str]:
    """The header of a key."""
    return {"authorization": f"Bearer {key}"}


def opened(url: str, key: str) -> Any:
    """A WebSocket of this key."""
    target = url.replace("http://", "ws://") + "/v0/ws"
    return connect(target, additional_headers=bearer(key), open_timeout=30, proxy=None)


def watching(http: httpx.Client, key: str) -> httpx.Response:
    """An open stream of this key."""
    made = http.post("/v0/watch", json={"topics": {"t.a": {}}}, headers=bearer(key))
    url = made.raise_for_status().json()["stream_url"]
    request = http.build_request("GET", url, headers=bearer(key))
    return http.send(request, stream=True).raise_for_status()


def reload(server: Server) -> None:
    """Make the server read its keys again, by SIGHUP."""
    assert server.process is not None
    server.process.send_signal(signal.SIGHUP)


# --- browsers, ids, logs --------------------------------------------------------------------------


def test_the_names_of_the_server_are_a_setting(own: NewServer) -> None:
    plain = own().start()
    for host in ("127.0.0.1", "LOCALHOST:80", "[::1]:4000", "localhost."):
        assert plain.http.get("/v0/topics", headers={"host": host}).status_code == 200
    for host in (
        "evil.example",
        "topics",
        "127.0.0.1.evil.example:4000",
        "localhost.evil",
        "[::2]",
    ):
        told = plain.http.get("/v0/topics", headers={"host": host})
        assert told.status_code == 403
        assert told.json()["error"]["code"] == "forbidden"
        assert plain.http.get("/v0/health", headers={"host": host}).status_code == 403
    listed = own(TOPICS_ALLOWED_HOSTS="topics.example, ::5").start()
    for host, status in (("topics.example:8080", 200), ("[::5]", 200), ("x.example", 403)):
        assert listed.http.get("/v0/topics", headers={"host": host}).status_code == status
    keyed = own(TOPICS_API_KEYS="some-key").start()
    told = keyed.http.get("/v0/topics", headers={"host": "any.example"} | bearer("some-key"))
    assert told.status_code == 200


def test_every_answer_has_an_id_its_own_or_its_client_s(server: Guarded) -> None:
    made = set()
    for path, status in (("/v0/topics", 200), ("/v0/nothing", 404), ("/v0/topics/t.none", 404)):
        answer = server.api.http.get(path, headers=bearer("secret-all"))
        assert answer.status_code == status
        made.add(answer.headers["x-request-id"])
        for given in ("abc", "a" * 128, "0af7651916cd43dd8448eb211c80319c:1/2=+@_-."):
            headers = bearer("secret-all") | {"x-request-id": given}
            answer = server.api.http.get(path, headers=headers)
            assert answer.headers["x-request-id"] == given
        for odd in ("", "a b", "a,b", "a" * 129, "-a", 'a"', "a;b"):
            headers = bearer("secret-all") | {"x-request-id": odd}
            told = server.api.http.get(path, headers=headers).headers["x-request-id"]
            assert re.fullmatch(r"r[\w-]+\.[0-9a-f]+", told)
            made.add(told)
    assert len(made) == 3 * 8
    with server.socket("all") as socket:
        assert socket.response is not None
        assert socket.response.headers["x-request-id"]


def test_every_answer_is_what_it_says_and_for_who_asked(server: Guarded) -> None:
    for path in ("/v0/topics", "/v0/nothing", "/v0/health", "/v0/metrics", "/v0/openapi.json"):
        headers = server.ask("all", "GET", path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert "cache-control" in headers
        assert headers["content-security-policy"] == "sandbox; default-src 'none'"
    assert server.ask("none", "GET", "/v0/topics").headers["cache-control"] == "no-store"


@pytest.mark.connection(reason="the log is that of `topics serve`")
def test_no_key_is_ever_logged(tmp_path: Path) -> None:
    """Contract §12 [12-01, 0.2-04, 0.2-27]"""
    guarded = Guarded(tmp_path, TOPICS_LOG_LEVEL="debug")
    url = session(guarded, "all", "?ticket=true")["stream_url"]
    for caller in KEYS:
        guarded.ask(caller, "GET", f"{url}?token={KEYS['all']}&ticket=x")
        guarded.ask(caller, "POST", "/v0/topics/t.a", RECORD)
        guarded.ask(caller, "GET", f"/v0/{KEYS['all']}")
    coded = base64.urlsafe_b64encode(b"secret-all").decode().rstrip("=")
    with guarded.socket("none", subprotocols=["topics.v0", f"topics.bearer.{coded}"]):
        pass
    guarded.close()
    log = guarded.server.log.read_text()
    assert "ready on http" in log
    assert "secret" not in log
    assert coded not in log
    # No file that the server wrote contains a key or its digest.
    written = b"".join(
        path.read_bytes() for path in guarded.server.data_dir.rglob("*") if path.is_file()
    )
    assert b"secret-" not in written


@pytest.mark.connection(reason="the log is that of `topics serve`")
def test_without_keys_the_start_says_so_loudly(own: NewServer) -> None:
    """Contract §0.2 [0.2-06]"""
    server = own()
    api = server.start()
    for header in ("Bearer x", "Basic y", "z"):
        assert api.http.get("/v0/topics", headers={"authorization": header}).status_code == 200
    server.stop()
    assert "WARNING NO KEYS" in server.log.read_text()
