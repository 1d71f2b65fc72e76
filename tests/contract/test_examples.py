"""Each request that `/v0/docs` has filled in succeeds, sent in the order of the page.

The test reads the filled-in values from the description like Swagger UI: the example of a
parameter, else the default of its schema, else nothing; the example of a body.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import pytest
import websockets.sync.client

from tests.contract.conftest import NewServer
from tests.contract.described import check_answer, document
from tests.contract.driver import Api, Json, eventually
from topics_server.api.openapi.examples import BODIES, IN_PATH, IN_QUERY, WID

# Text that the answer to an example contains if the example works.
DID: Final[dict[str, Json]] = {
    "putTopic": {"created": True},
    "patchTopic": {"changed": {"lease_ms": [30_000, 60_000]}},
    "dropTopic": {"deleted": True},
    "appendRecords": {"created": True, "count": 4},
    "readRecords": {"caught_up": True, "head_seq": 4},
    "deleteRecords": {"deleted": 1},
    "putConsumer": {"created": True, "seq": 0},
    "commitConsumer": {"moved": True, "seq": 2},
    "claimJobs": {"count": 3},
    "ackJobs": {"acked": 1, "skipped": []},
    "nackJobs": {"nacked": 1, "skipped": []},
    "extendJobs": {"extended": 1, "skipped": []},
    "redriveJobs": {"redriven": 1},
    "putRouter": {"created": True},
    "dropRouter": {"deleted": True},
}


def operations() -> Iterator[tuple[str, str, list[Json], Json]]:
    """(path, method, parameters, operation) in the order of the page: by tag, then in the order of
    the description.
    """
    for tag in document()["tags"]:
        for path, item in document()["paths"].items():
            for method, operation in item.items():
                if method != "parameters" and operation["tags"] == [tag["name"]]:
                    parameters = [*item.get("parameters", ()), *operation["parameters"]]
                    yield path, method, [each for each in parameters if "name" in each], operation


def prefilled(parameter: Json) -> Any:
    return parameter.get("example", parameter["schema"].get("default"))


def request_of(path: str, parameters: list[Json], operation: Json) -> tuple[str, Json]:
    """The URL and the other parts of the request."""
    sent: Json = {"params": {}, "headers": {}}
    for parameter in parameters:
        name, value = parameter["name"], prefilled(parameter)
        if value is None:
            assert not parameter.get("required"), f"{path}: {name} is not filled in"
            continue
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if parameter["in"] == "path":
            path = path.replace(f"{{{name}}}", quote(text, safe=""))
        else:
            sent["params" if parameter["in"] == "query" else "headers"][name] = text
    if "requestBody" in operation:
        media, content = next(iter(operation["requestBody"]["content"].items()))
        assert media == "application/json"
        sent["json"] = content["example"]
    return path, sent


def test_every_example_succeeds_in_the_order_of_the_page(own: NewServer, tmp_path: Path) -> None:
    (tmp_path / "backups").mkdir()
    server = own(TOPICS_BACKUP_DIR=str(tmp_path / "backups"))
    api = server.start()
    wid = ""
    seen: list[str] = []
    for template, method, parameters, operation in operations():
        name = operation["operationId"]
        path, sent = request_of(template, parameters, operation)
        path = path.replace(WID, wid)
        if name == "redriveJobs":
            wait_for_a_dead_letter(api)
        if name == "openWebSocket":
            answer = send_upgrade(api, path)
        else:
            answer = send(api, method, path, sent, operation)
        wid = answer.get("wid", wid)
        for member, value in DID.get(name, {}).items():
            assert answer[member] == value, f"{name}: {answer}"
        seen.append(name)
    assert len(seen) == len(set(seen)) > 35
    assert {*BODIES, *IN_QUERY, *DID} <= {*seen}, "an example of no operation"
    server.stop()


def send(api: Api, method: str, path: str, sent: Json, operation: Json) -> Json:
    """The answer's body, {} if it is not JSON; its status must be a success."""
    request = api.http.build_request(method.upper(), path, **sent)
    media = next(iter(operation["responses"].get("200", {}).get("content", {"*/*": {}})))
    request.headers["accept"] = media
    with closing(api.http.send(request, stream=True)) as response:
        status = response.status_code
        is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
        body = next(response.iter_raw()) if is_stream else response.read()
        assert 200 <= status < 300, f"{operation['operationId']}: {status} {body!r}"
        check_answer(method.upper(), path, status, response.headers, b"" if is_stream else body)
        if not body or not response.headers["content-type"].startswith("application/json"):
            return {}
        found = response.json()
        return found if isinstance(found, dict) else {}


def wait_for_a_dead_letter(api: Api) -> None:
    """Dead letters move after the answer of the call that caused them."""
    eventually(lambda: api.get_state("jobs")["queue"]["dead_lettered"] == 1, "one job is dead")


def send_upgrade(api: Api, path: str) -> Json:
    """A socket that answers a ping, as the page sends it."""
    with websockets.sync.client.connect(f"ws{api.url[4:]}{path}", proxy=None) as socket:
        socket.send('{"op":"ping","request_id":"docs"}')
        assert json.loads(socket.recv(timeout=20))["op"] == "pong"
    return {}


@pytest.mark.parametrize("name", sorted(IN_PATH))
def test_no_example_is_for_a_parameter_that_is_gone(name: str) -> None:
    assert any(f"{{{name}}}" in path for path in document()["paths"])
