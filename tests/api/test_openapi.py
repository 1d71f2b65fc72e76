"""The OpenAPI document is compared with the server that it describes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.api.conftest import Api
from topics_server.api.messages import requests as bodies
from topics_server.api.openapi.document import document, document_bytes
from topics_server.api.queues import requests as queue_bodies
from topics_server.api.routers import requests as router_bodies
from topics_server.api.routes import build_routes
from topics_server.api.watch import requests as watch_bodies
from topics_server.http.error_responses import STATUS_OF
from topics_server.values.errors import Code
from topics_server.values.texts.key_list import SCOPE_NAMES

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "openapi.json"


def operations() -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (path, method, operation)
        for path, item in document()["paths"].items()
        for method, operation in item.items()
        if method != "parameters"
    ]


def test_it_has_exactly_the_paths_and_methods_of_the_route_table() -> None:
    described = {(path, method.upper()) for path, method, _ in operations()}
    served = {
        (route.template, method)
        for route in build_routes().table
        for method in route.handlers
        if method != "HEAD"
    }
    assert described == served


def test_the_file_in_docs_is_this_document() -> None:
    """To renew the file, write the result of `document_bytes()` to docs/openapi.json."""
    assert DOCUMENT.read_bytes() == document_bytes()


def test_every_reference_leads_somewhere_and_every_schema_is_used() -> None:
    named = set(re.findall(rb'"#/components/schemas/(\w+)"', document_bytes()))
    assert {name.decode() for name in named} == set(document()["components"]["schemas"])


def test_refusals_stand_under_the_status_of_their_code() -> None:
    for _, _, operation in operations():
        for status, answer in operation["responses"].items():
            if int(status) >= 400:
                codes = re.findall(r"`(\w+)`", answer["description"])
                assert codes
                assert {STATUS_OF[Code(code)] for code in codes} == {int(status)}


def test_scopes_are_those_that_the_route_table_asks_for() -> None:
    for route in build_routes().table:
        for method, need in route.needs.items():
            if method == "HEAD":
                continue
            operation = document()["paths"][route.template][method.lower()]
            asked = operation["security"]
            scopes = {name for name, scope in SCOPE_NAMES.items() if need > 0 and scope & need}
            wanted = [{"bearer": [s for s in ("read", "write", "delete", "admin") if s in scopes]}]
            where = f"{method} {route.template}"
            assert {} in asked, f"{where}: a server without keys asks for none"
            assert [way for way in asked if "bearer" in way] == wanted, where
            is_stream = route.is_stream and method == "GET"
            assert ("token" in str(asked)) is is_stream, where
            # Probes too: a server without keys refuses foreign `Host` values.
            assert "403" in operation["responses"], where
            assert "401" in operation["responses"], where


def test_operation_ids_are_distinct() -> None:
    ids = [operation["operationId"] for _, _, operation in operations()]
    assert len(ids) == len(set(ids))


def assert_described(value: Any, schema: dict[str, Any], where: str) -> None:
    """The members of an answer are those of its schema, at every level."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        assert_described(value, document()["components"]["schemas"][name], where)
    elif isinstance(value, dict) and "properties" in schema:
        assert set(value) <= set(schema["properties"]), where
        assert set(schema.get("required", ())) <= set(value), where
        for key, member in value.items():
            assert_described(member, schema["properties"][key], f"{where}.{key}")
    elif isinstance(value, list) and "items" in schema:
        for item in value:
            assert_described(item, schema["items"], f"{where}[]")
    else:
        kinds = schema.get("type", ())
        kinds = {kinds} if isinstance(kinds, str) else set(kinds)
        names = {
            bool: {"boolean"},
            int: {"integer", "number"},
            float: {"number"},
            str: {"string"},
            type(None): {"null"},
        }
        assert not kinds or names.get(type(value), {"object"}) & kinds, where


@pytest.mark.anyio
async def test_answers_have_the_members_it_describes(api: Api) -> None:
    await api.http.put("/v0/topics/jobs", json={})
    record = {"data": 1, "tag": "t", "node": "n", "meta": {"a": 1}}
    calls: list[tuple[str, str, Any]] = [
        ("PUT", "/v0/topics/{topic}", {}),
        ("POST", "/v0/topics/{topic}", {"records": [record]}),
        ("POST", "/v0/topics/{topic}/diff", {"include_tags": True}),
        ("GET", "/v0/topics/{topic}", None),
        ("GET", "/v0/topics", None),
        ("POST", "/v0/topics/{topic}/delete", {"before_seq": 1}),
        ("DELETE", "/v0/topics/{topic}", None),
        ("GET", "/v0/health", None),
        ("GET", "/v0/ready", None),
        ("POST", "/v0/topics/{topic}/diff", {"limit": "x"}),
        ("PUT", "/v0/routers/{router}", {"source": "a", "dest": "b"}),
        ("GET", "/v0/routers/{router}", None),
        ("GET", "/v0/routers", None),
        ("DELETE", "/v0/routers/{router}", None),
        ("GET", "/v0/routers/{router}", None),
    ]
    for method, path, body in calls:
        target = path.replace("{topic}", "jobs").replace("{router}", "a->b")
        answer = await api.http.request(method, target, json=body)
        operation = document()["paths"][path][method.lower()]
        described = operation["responses"][str(answer.status_code)]
        schema = described["content"]["application/json"]["schema"]
        assert_described(answer.json(), schema, f"{method} {path}")


@pytest.mark.anyio
async def test_configuration_fields_and_defaults_are_the_server_s(api: Api) -> None:
    answer = await api.http.put("/v0/topics/jobs", json={})
    described = dict(document()["components"]["schemas"]["TopicConfig"]["properties"])
    assert "default" not in described.pop("lease_log"), "it is shown only where it is set"
    assert {name: schema["default"] for name, schema in described.items()} == (
        answer.json()["config"]
    )


@pytest.mark.anyio
async def test_it_is_served(api: Api) -> None:
    answer = await api.http.get("/v0/openapi.json")
    assert answer.status_code == 200
    assert answer.json() == json.loads(document_bytes())


REQUESTS: list[tuple[type[msgspec.Struct], str]] = [
    (bodies._Config, "TopicConfigPatch"),
    (bodies._Diff, "DiffRequest"),
    (bodies._Delete, "DeleteRequest"),
    (queue_bodies._Claim, "ClaimRequest"),
    (queue_bodies._Ack, "AckRequest"),
    (queue_bodies._Nack, "NackRequest"),
    (queue_bodies._Extend, "ExtendRequest"),
    (queue_bodies._Redrive, "RedriveRequest"),
    (router_bodies._Put, "RouterRequest"),
    (watch_bodies._Watch, "WatchRequest"),
]


@pytest.mark.parametrize(("kind", "name"), REQUESTS, ids=[name for _, name in REQUESTS])
def test_a_request_has_the_members_of_the_struct_that_decodes_it(
    kind: type[msgspec.Struct], name: str
) -> None:
    """Msgspec derives the members, and which of them are required, from the struct itself."""
    _, components = msgspec.json.schema_components([kind])
    derived, described = components[kind.__name__], document()["components"]["schemas"][name]
    assert set(described["properties"]) == set(derived["properties"])
    assert set(described.get("required", ())) == set(derived.get("required", ()))
