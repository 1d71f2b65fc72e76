"""Beyond the contract: the page at `/`, and answers without `performance`."""

from __future__ import annotations

import re
import shlex

import pytest

from tests.contract.driver import Api, Server, good

MINIMAL = {"prefer": "return=minimal"}


def test_a_browser_gets_a_page_whose_links_work(api: Api) -> None:
    answer = api.http.get("/", headers={"accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    links = re.findall(r'href="([^"]+)"', answer.text)
    assert "v0/docs" in links
    for link in links:
        assert api.http.get(f"/{link}").status_code == 200, link


def test_curl_gets_text_whose_lines_work(api: Api) -> None:
    answer = api.http.get("/", headers={"accept": "*/*"})
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    lines = [shlex.split(line) for line in answer.text.splitlines() if "curl " in line]
    assert len(lines) == 5
    root = f"{api.url}/my%20app" if Server.door == "mounted" else api.url
    for words in lines:
        url = words[-1]
        assert url.startswith(f"{root}/v0/"), "lines name the server as the client did"
        url = url.removeprefix(root)
        if "--json" in words:
            body = words[words.index("--json") + 1]
            sent = api.http.post(url, content=body, headers={"content-type": "application/json"})
            good(sent)
        else:
            good(api.http.get(url))


def test_a_host_that_is_no_name_is_not_repeated(api: Api) -> None:
    answer = api.http.get("/", headers={"host": 'localhost"><script>', "accept": "text/html"})
    assert "<script>" not in answer.text


def test_head_and_other_methods(api: Api) -> None:
    assert api.http.head("/").content == b""
    assert api.http.post("/").status_code == 405


# -- answers without `performance` -----------------------------------------------------------------


@pytest.mark.parametrize("path", ["direct", "general"])
def test_a_client_may_prefer_answers_without_performance(api: Api, topic: str, path: str) -> None:
    """A request with `Expect` or a gzip body passes through Starlette, all others use the direct
    routes.
    """
    more = {"accept-encoding": "gzip"} if path == "general" else {}
    body = {"records": [{"data": {"performance": {"a": 1}}}]}
    sent = api.http.post(f"/v0/topics/{topic}", json=body, headers=MINIMAL | more)
    assert sent.headers["preference-applied"] == "return=minimal"
    assert "performance" not in good(sent)
    found = api.http.post(f"/v0/topics/{topic}/diff", json={}, headers=MINIMAL | more)
    assert "performance" not in good(found)
    assert good(found)["records"][0]["data"] == {"performance": {"a": 1}}
    for answer in (
        api.http.get(f"/v0/topics/{topic}", headers=MINIMAL | more),
        api.http.get("/v0/topics", headers=MINIMAL | more),
        api.http.put(f"/v0/topics/{topic}", json={}, headers=MINIMAL | more),
    ):
        assert "performance" not in good(answer)


@pytest.mark.parametrize("prefer", ["return=representation", "wait=1", "", "return=minimalist"])
def test_other_preferences_change_nothing(api: Api, topic: str, prefer: str) -> None:
    answer = api.http.post(
        f"/v0/topics/{topic}", json={"records": [{"data": 1}]}, headers={"prefer": prefer}
    )
    assert "performance" in good(answer)
    assert "preference-applied" not in answer.headers


def test_what_a_stream_holds_is_never_touched(api: Api, topic: str) -> None:
    path = f"/v1/stream/{topic}"
    text = b'{"a":1,"performance":{}}'
    kind = {"content-type": "text/plain"}
    assert api.http.put(path, headers=kind).status_code == 201
    assert api.http.post(path, content=text, headers=kind).is_success
    assert api.http.get(path, headers=MINIMAL).content == text
