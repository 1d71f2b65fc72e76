"""Callers from web pages: which pages may change data through a user's browser.

The tests call a server without keys as a browser would: with `Origin` and `Sec-Fetch-Site`, and
with requests that need no preflight.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract.conftest import URL, NewServer, new_name
from tests.contract.driver import Api, RawResponse, Server, good, refused

JSON = "Content-Type: application/json"
TEXT = "Content-Type: text/plain"
STREAM = "Accept: text/event-stream"
LISTED = "http://pages.example"
OWN = "Origin: http://localhost"
# The headers of a page elsewhere, of an image in it, and of a page that hides its origin.
FOREIGN = [
    ("Origin: http://localhost:8000", "Sec-Fetch-Site: same-site"),
    ("Origin: http://other.example", "Sec-Fetch-Site: cross-site"),
    ("Sec-Fetch-Site: cross-site",),
    ("Sec-Fetch-Site: same-site",),
    ("Origin: null",),
    ("Origin: http://other.example",),
    ("Origin: http://localhost:8000",),
]
# The headers of the server's own pages, listed ones, an address bar and scripts.
ALLOWED = [
    (OWN, "Sec-Fetch-Site: same-origin"),
    (OWN,),
    ("Sec-Fetch-Site: none",),
    (f"Origin: {LISTED}", "Sec-Fetch-Site: cross-site"),
    (f"Origin: {LISTED}",),
    (),
]


@pytest.fixture(scope="module")
def keyless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """A server without keys that lists one origin."""
    if URL:
        pytest.skip("needs a server of its own; TOPICS_CONTRACT_URL names a shared one")
    server = Server(tmp_path_factory.mktemp("callers"), {"TOPICS_CORS_ORIGINS": LISTED})
    yield server.start()
    server.stop()


def _calls(topic: str) -> list[tuple[str, str, bytes, list[str]]]:
    """Every kind of call that changes something, each through its own path in the server."""
    record = b'{"records":[{"data":1}]}'
    lease = b'{"node":"n","seqs":[1]}'
    return [
        ("POST", f"/v1/stream/{topic}", b"1", [JSON]),
        ("POST", f"/v1/stream/{topic}", b"1", [TEXT]),
        ("PUT", f"/v1/stream/{topic}-new", b"", [TEXT]),
        ("DELETE", f"/v1/stream/{topic}", b"", []),
        ("POST", f"/v0/topics/{topic}", record, [JSON]),
        ("POST", f"/v0/topics/{topic}?return_seqs=false", record, [JSON]),
        ("POST", f"/v0/topics/{topic}-new", record, [JSON]),
        ("POST", f"/v0/topics/{topic}/diff", b"{}", [JSON]),
        ("POST", f"/v0/topics/{topic}/delete", b'{"before_seq":9}', [JSON]),
        ("POST", f"/v0/topics/{topic}/claim", b'{"node":"n"}', [JSON]),
        ("POST", f"/v0/topics/{topic}/ack", lease, [JSON]),
        ("POST", f"/v0/topics/{topic}/nack", lease, [JSON]),
        ("POST", f"/v0/topics/{topic}/extend", b'{"node":"n","seqs":[1],"lease_ms":1000}', [JSON]),
        ("PUT", f"/v0/topics/{topic}-new", b"", []),
        ("PATCH", f"/v0/topics/{topic}", b'{"ttl_ms":1}', [JSON]),
        ("DELETE", f"/v0/topics/{topic}", b"", []),
        ("POST", "/v0/admin/seal", b"", []),
        ("POST", "/v0/admin/backup", b"", []),
        ("POST", "/v0/watch", b'{"topics":{"%b":{}}}' % topic.encode(), [JSON]),
        ("PUT", f"/v0/routers/{topic}-r", b'{"source":"%b","dest":"o"}' % topic.encode(), [JSON]),
        ("DELETE", f"/v0/routers/{topic}-r", b"", []),
        ("GET", f"/v0/topics/{topic}/work?node=n", b"", [STREAM]),
        ("GET", f"/v0/topics/{topic}?touch=true", b"", []),
        ("GET", "/v0/topics?t%6Fuch=true", b"", []),
        ("GET", f"/v0/topics/{topic}/live?consumer=c&ack=auto", b"", [STREAM]),
        ("GET", f"/v0/topics/{topic}/live?consumer=c&a%63k=auto", b"", [STREAM]),
    ]


def _queue(api: Api) -> str:
    name = new_name("callers")
    good(api.put(name, {"type": "queue"}))
    api.add(name, "a")
    return name


@pytest.mark.parametrize("said", FOREIGN, ids=str)
def test_a_foreign_page_changes_nothing(keyless: Api, said: tuple[str, ...]) -> None:
    """The server refuses the request before it reads a body, on each path of a request.
    [S-90]
    """
    name = _queue(keyless)
    before = keyless.get_state(name)
    for method, target, body, headers in _calls(name):
        answer = keyless.raw(method, target, body, [*headers, *said])
        assert answer.status == 403, (method, target, answer)
        refused(answer, 403, "forbidden")
    after = keyless.get_state(name)
    for state in (before, after):
        del state["performance"]
    assert after == before
    assert keyless.state(f"{name}-new").status_code == 404


@pytest.mark.parametrize("said", ALLOWED, ids=str)
def test_own_pages_listed_ones_and_scripts_may_call(keyless: Api, said: tuple[str, ...]) -> None:
    """Settled rules of the contract [S-90]"""
    name = _queue(keyless)
    for method, target, body, headers in _calls(name):
        if method == "DELETE" or target.endswith("/work?node=n"):
            continue
        answer = keyless.raw(method, target, body, [*headers, *said])
        assert answer.status != 403, (method, target, answer)
    answer = keyless.raw("DELETE", f"/v0/topics/{name}", b"", list(said))
    assert answer.json()["deleted"] is True


@pytest.mark.parametrize("said", FOREIGN, ids=str)
def test_reads_and_preflights_are_answered_as_before(keyless: Api, said: tuple[str, ...]) -> None:
    """The browser withholds the answer from the page. [S-90]"""
    name = _queue(keyless)
    for method, target in (
        ("GET", f"/v0/topics/{name}"),
        ("GET", f"/v0/topics/{name}?touch=false"),
        ("HEAD", f"/v0/topics/{name}"),
        ("GET", "/v0/topics"),
        ("GET", f"/v1/stream/{name}"),
        ("GET", "/v0/routers"),
        ("GET", "/v0/health"),
        ("OPTIONS", f"/v0/topics/{name}"),
    ):
        answer = keyless.raw(method, target, headers=list(said))
        assert answer.status in (200, 204), (method, target, answer)
        assert "access-control-allow-origin" not in answer.headers


def _ask(api: Api, key: str, *said: str) -> RawResponse:
    headers = [JSON, *said, *([f"Authorization: Bearer {key}"] if key else [])]
    return api.raw("POST", "/v0/topics/t", b'{"records":[{"data":1}]}', headers)


def test_a_valid_key_in_the_header_may_call_from_anywhere(own: NewServer) -> None:
    """No page of another origin can make a browser add the header; a key in the URL proves
    nothing. [S-90]
    """
    api = own(TOPICS_API_KEYS="good-key").start()
    foreign = FOREIGN[1]
    assert _ask(api, "good-key", *foreign).status == 201
    assert _ask(api, "good-key").status == 200
    refused(_ask(api, "other-key", *foreign), 401, "unauthorized")
    refused(_ask(api, "", *foreign), 401, "unauthorized")
    key = ["Authorization: Bearer good-key", JSON]
    assert api.raw("PUT", "/v0/topics/q", b'{"type":"queue"}', key).status == 201
    work = "/v0/topics/q/work?node=n&token=good-key"
    refused(api.raw("GET", work, headers=[STREAM, *foreign]), 403, "forbidden")


def test_a_header_of_a_server_without_keys_is_no_key(keyless: Api) -> None:
    """A header that the server does not check proves nothing. [S-90]"""
    refused(_ask(keyless, "any", *FOREIGN[1]), 403, "forbidden")
