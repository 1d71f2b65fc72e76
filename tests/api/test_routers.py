"""Routers over the application (§6): the calls of the service, and the answers."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.api.conftest import Api
from topics_server.runtime.metrics import ROUTERS_SHOWN_MAX
from topics_server.values.errors import Code, TopicsError
from topics_server.values.model import Guarantee, RouterDefinition, TagMatch
from topics_server.values.router_answers import RouterSpec

pytestmark = pytest.mark.anyio

LEAST = {"source": "orders", "dest": "audit"}
DEFINITION = [
    *("source", "dest", "preserve_node", "preserve_tag", "filter", "allow_cycle", "guarantee")
]


def code_of(answer: httpx.Response) -> tuple[int, str, Any]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error.get("detail", {}).get("field")


async def put(api: Api, name: str, **body: Any) -> httpx.Response:
    return await api.http.put(f"/v0/routers/{name}", json={**LEAST, **body})


async def test_a_new_router_is_201_and_later_puts_are_200(api: Api) -> None:
    made = await put(api, "orders->audit")
    assert made.status_code == 201
    assert list(made.json()) == ["router", "created", *DEFINITION, "performance"]
    assert made.json()["router"] == "orders->audit"
    performance = made.json()["performance"]
    assert (performance["wal_append_ms"], performance["fsync_ms"]) == (0.25, 0.5)
    for body in ({}, {"preserve_tag": False}):
        again = await put(api, "orders->audit", **body)
        assert (again.status_code, again.json()["created"]) == (200, False)


async def test_every_field_reaches_the_service(api: Api) -> None:
    asked = {
        "preserve_node": False,
        "filter": ["tag", "Glob", "public:*"],
        "guarantee": "exactly_once",
        "create_dest": False,
        "from": "earliest",
    }
    answer = await put(api, "r", **asked)
    definition = RouterDefinition(
        "orders",
        "audit",
        preserve_node=False,
        filter=TagMatch("public:", is_prefix=True),
        guarantee=Guarantee.EXACTLY_ONCE,
    )
    assert api.routers.specs == [RouterSpec(definition, create_dest=False, from_earliest=True)]
    told = answer.json()
    assert told["filter"] == ["tag", "Glob", "public:*"]
    assert "from" not in told
    assert "create_dest" not in told


@pytest.mark.parametrize("path", ["orders-%3Eaudit", "orders%2D%3eaudit", "orders->audit"])
async def test_a_name_may_hold_a_sign_that_clients_escape(api: Api, path: str) -> None:
    assert (await put(api, path)).json()["router"] == "orders->audit"
    assert (await api.http.get(f"/v0/routers/{path}")).status_code == 200
    assert list(api.routers.routers) == ["orders->audit"]


@pytest.mark.parametrize(
    "path",
    ["%2F", "a%20b", ">a", ".a", "-a", "a%2Fb", "a%253Eb", "%C3%A4", "a<b", "n" * 256, "a%00", "%"],
)
@pytest.mark.parametrize("method", ["PUT", "GET", "DELETE"])
async def test_an_invalid_name_is_refused(api: Api, method: str, path: str) -> None:
    answer = await api.http.request(method, f"/v0/routers/{path}")
    assert code_of(answer) == (400, "invalid_request", "router")
    assert not api.routers.specs


async def test_a_topic_s_name_takes_no_such_sign(api: Api) -> None:
    answer = await api.http.put("/v0/topics/a-%3Eb", json={})
    assert code_of(answer) == (400, "invalid_request", "topic")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"", "source"),
        (b"{}", "source"),
        (b'{"source":"a"}', "dest"),
        (b'{"source":"a","dest":"a"}', "dest"),
        (b'{"source":"a","dest":"b","filter":["tag","Glob","x"]}', "filter[2]"),
        (b'{"source":"a","dest":"b","from":"tail"}', "from"),
        (b'{"source":"a","dest":"b"', None),
    ],
)
async def test_a_bad_body_does_not_reach_the_service(
    api: Api, body: bytes, field: str | None
) -> None:
    headers = {"content-type": "application/json"}
    answer = await api.http.put("/v0/routers/r", content=body, headers=headers)
    assert code_of(answer) == (400, "invalid_request", field)
    assert not api.routers.specs


async def test_a_body_without_the_media_type_is_415(api: Api) -> None:
    answer = await api.http.put("/v0/routers/r", content=b'{"source":"a","dest":"b"}')
    assert code_of(answer)[:2] == (415, "unsupported_media_type")


@pytest.mark.parametrize(
    ("trouble", "status"),
    [
        (TopicsError(Code.ROUTER_CYCLE, "a cycle", {"cycle": ["A", "B", "A"]}), 409),
        (
            TopicsError(Code.TOPIC_EXISTS_INCOMPATIBLE, "fan-in", {"reason": "router_dest_fan_in"}),
            409,
        ),
        (TopicsError(Code.TOPIC_NOT_FOUND, "absent", {"topic": "audit"}), 404),
        (TopicsError(Code.THROTTLED, "cap", {"limit": "max_routers", "max": 3}), 429),
    ],
)
async def test_refusals_of_the_service_keep_their_message(
    api: Api, trouble: TopicsError, status: int
) -> None:
    api.routers.trouble = trouble
    answer = await put(api, "r")
    assert code_of(answer)[:2] == (status, trouble.code.value)
    assert answer.json()["error"]["detail"] == trouble.detail
    assert ("retry-after" in answer.headers) is (status == 429)


async def test_a_state_has_its_progress_and_the_reason_of_a_stall(api: Api) -> None:
    api.routers.add("r", "a", "b")
    place = ["forwarded_total", "cursor_seq", "lag", "state"]
    told = (await api.http.get("/v0/routers/r")).json()
    assert list(told) == ["router", *DEFINITION, *place, "performance"]
    assert [told[name] for name in place] == [7, 9, 2, "running"]
    api.routers.add("r", "a", "b", ("topic_full", "there is no room"))
    told = (await api.http.get("/v0/routers/r")).json()
    assert told["state"] == "stalled"
    assert told["reason"] == {"code": "topic_full", "message": "there is no room"}


async def test_an_absent_router_is_404_to_read_and_nothing_to_delete(api: Api) -> None:
    answer = await api.http.get("/v0/routers/r")
    assert code_of(answer)[:2] == (404, "router_not_found")
    answer = await api.http.delete("/v0/routers/r")
    assert answer.status_code == 200
    told = answer.json()
    assert told.pop("performance")
    assert told == {"router": "r", "deleted": False}
    api.routers.add("r", "a", "b")
    assert (await api.http.delete("/v0/routers/r")).json()["deleted"] is True
    assert (await api.http.delete("/v0/routers/r")).json()["deleted"] is False


async def test_the_list_pages_and_filters(api: Api) -> None:
    for source, dest in (("a", "b"), ("a", "c"), ("b", "d"), ("a", "e")):
        api.routers.add(f"{source}->{dest}", source, dest)

    async def listed(**query: Any) -> dict[str, Any]:
        answer = await api.http.get("/v0/routers", params=query)
        assert answer.status_code == 200
        told: dict[str, Any] = answer.json()
        return told

    first = await listed(page_size=3)
    assert [row["router"] for row in first["routers"]] == ["a->b", "a->c", "a->e"]
    last = await listed(page_size=3, cursor=first["next_cursor"])
    assert [row["router"] for row in last["routers"]] == ["b->d"]
    assert "next_cursor" not in last
    row = {"router": "b->d", "source": "b", "dest": "d", "guarantee": "at_least_once"}
    assert last["routers"] == [row | {"forwarded_total": 7}]
    assert [r["router"] for r in (await listed(source="b"))["routers"]] == ["b->d"]
    assert [r["router"] for r in (await listed(dest="c", prefix="a->"))["routers"]] == ["a->c"]
    assert (await listed(source="z"))["routers"] == []


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("page_size=x", "page_size"),
        ("cursor=nonsense", "cursor"),
        ("source=a%20b", "source"),
        ("dest=", "dest"),
    ],
)
async def test_a_malformed_query_is_refused(api: Api, query: str, field: str) -> None:
    answer = await api.http.get(f"/v0/routers?{query}")
    assert code_of(answer) == (400, "invalid_request", field)


async def test_the_routers_that_went_with_a_topic_are_named(api: Api) -> None:
    for source, dest in (("jobs", "audit"), ("jobs", "a"), ("in", "jobs"), ("x", "y")):
        api.routers.add(f"{source}->{dest}", source, dest)
    absent = await api.http.delete("/v0/topics/jobs")
    assert (absent.json()["deleted"], absent.json()["routers_removed"]) == (False, [])
    await api.append("jobs", 1)
    kept = await api.http.delete("/v0/topics/jobs", params={"if_empty": "true"})
    assert code_of(kept)[:2] == (409, "topic_not_empty")
    gone = await api.http.delete("/v0/topics/jobs")
    assert gone.json()["routers_removed"] == ["in->jobs", "jobs->a", "jobs->audit"]


@pytest.mark.parametrize(
    ("path", "allow"),
    [("/v0/routers", "GET, HEAD, OPTIONS"), ("/v0/routers/r", "DELETE, GET, HEAD, OPTIONS, PUT")],
)
async def test_other_methods_are_405_with_those_that_work(api: Api, path: str, allow: str) -> None:
    for method in ("POST", "PATCH", *(("PUT", "DELETE") if path == "/v0/routers" else ())):
        answer = await api.http.request(method, path)
        assert code_of(answer)[:2] == (405, "method_not_allowed")
        assert answer.headers["allow"] == allow
    answer = await api.http.options(path)
    assert (answer.status_code, answer.headers["allow"]) == (204, allow)
    api.routers.add("r", "a", "b")
    head, get = await api.http.head(path), await api.http.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]


@pytest.mark.parametrize(
    "path", ["/v0/routers/", "/v0/routers/a/b", "/v0/router", "/v0/routers/a/"]
)
async def test_other_paths_are_404(api: Api, path: str) -> None:
    assert code_of(await api.http.get(path))[:2] == (404, "not_found")


@pytest.mark.parametrize(
    ("phase", "code"), [("replaying", "not_ready"), ("draining", "shutting_down")]
)
async def test_nothing_is_answered_before_and_after(api: Api, phase: Any, code: str) -> None:
    api.routers.add("r", "a", "b")
    api.state.phase = phase
    for method, path in (
        *(("PUT", "/v0/routers/r"), ("GET", "/v0/routers/r"), ("DELETE", "/v0/routers/r")),
        ("GET", "/v0/routers"),
    ):
        answer = await api.http.request(method, path)
        assert code_of(answer)[:2] == (503, code)
    assert list(api.routers.routers) == ["r"]


async def test_figures_of_routers(api: Api) -> None:
    api.routers.add("a->b", "a", "b")
    api.routers.add("a->c", "a", "c", ("topic_full", "there is no room"))
    lines = (await api.http.get("/v0/metrics")).text.splitlines()
    for line in (
        "topics_routers 2.0",
        "topics_router_metrics_truncated 0.0",
        'topics_router_forwarded_total{router="a->b"} 7.0',
        'topics_router_lag{router="a->b"} 2.0',
        'topics_router_stalled{router="a->b"} 0.0',
        'topics_router_stalled{router="a->c"} 1.0',
    ):
        assert line in lines
    values = (await api.http.get("/v0/metrics", headers={"accept": "application/json"})).json()
    assert values["topics_routers"] == 2
    assert values["topics_router_stalled"][1] == {"labels": {"router": "a->c"}, "value": 1}


async def test_the_per_router_block_is_bounded(api: Api) -> None:
    for number in range(ROUTERS_SHOWN_MAX + 1):
        api.routers.add(f"r{number}", "a", f"b{number}")
    values = (await api.http.get("/v0/metrics", headers={"accept": "application/json"})).json()
    assert values["topics_routers"] == ROUTERS_SHOWN_MAX + 1
    assert values["topics_router_metrics_truncated"] == 1
    assert len(values["topics_router_lag"]) == ROUTERS_SHOWN_MAX
