"""Requests generated from the description (schemathesis), and the checks of their answers.

Half of the requests fit the schemas and half do not. Each is sent as generated, and once more with
names of existing things: a generated name exists nowhere, so alone it would test little but 404.
The checks: no 500; no status, code, header or member that `docs/openapi.json` does not describe;
and afterwards the server is no larger than before.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from tests.contract import described
from tests.contract.driver import Server

# These things are created before each operation is tried; the second name of each kind never
# exists.
THINGS: Final = {
    "topic": ("log", "jobs", "capped", "letters", "nobody"),
    "router": ("log->copy", "nobody->nowhere"),
    "path": ("log", "text", "bytes/of/their own", "nobody"),
}
_CONFIGS: Final[Mapping[str, object]] = {
    "log": {},
    "letters": {},
    "capped": {"cap_records": 3, "discard": "reject", "durability": "memory"},
    "jobs": {"type": "queue", "dead_letter": "letters", "max_deliveries": 2, "lease_ms": 100},
}
# Long waits in a request would only cost time here; the server's settings bound the waits that a
# request cannot set.
_WAIT_MS_MAX: Final = 3
IMPATIENT: Final = {"TOPICS_STREAMS_LONG_POLL_MS": str(_WAIT_MS_MAX)}


class Fuzz:
    """One server and its generated requests; `statuses` counts its answers."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.statuses: Counter[tuple[str, int]] = Counter()
        self._client = httpx.Client(base_url=server.api.url, timeout=30, trust_env=False)
        self._turn = itertools.count()
        document = json.loads(json.dumps(described.document()))
        schema = schemathesis.openapi.from_dict(document)
        found: list[Any] = list(schema.get_all_operations())
        self.operations = [result.ok() for result in found]
        self._document = document
        self._wid = ""

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    @property
    def sent(self) -> int:
        """The number of answered requests."""
        return self.statuses.total()

    def round(self, seed: int, examples: int) -> None:
        """Try every operation with `examples` valid requests and as many invalid ones."""
        for operation in self.operations:
            self.set_up()
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                self._try(operation, mode, seed, examples)
        self.tear_down()

    def _try(self, operation: Any, mode: GenerationMode, seed: int, examples: int) -> None:
        try:
            strategy = operation.as_strategy(generation_mode=mode)
        except Exception:
            assert mode is GenerationMode.NEGATIVE, operation.label
            return

        @seeded(seed)
        @settings(
            max_examples=examples,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
        )
        @given(case=strategy)
        def run(case: Any) -> None:
            self._send(case)

        # An operation without parameters has no invalid requests, so this is no finding.
        with contextlib.suppress(Unsatisfiable):
            run()

    def set_up(self) -> None:
        """Create the things that must exist."""
        for name, config in _CONFIGS.items():
            self._client.put(f"/v0/topics/{name}", json=config)
            records = [{"data": n, "tag": f"t{n}"} for n in range(3)]
            self._client.post(f"/v0/topics/{name}", json={"records": records})
        self._client.put(
            "/v0/routers/" + quote("log->copy"), json={"source": "log", "dest": "copy"}
        )
        self._client.put("/v1/stream/text", headers={"content-type": "text/plain"}, content="x")
        self._client.put(f"/v1/stream/{quote('bytes/of/their own')}", content="x")
        opened = self._client.post("/v0/watch", json={"topics": {"log": {}}})
        if opened.status_code == 200:
            self._wid = opened.json()["wid"]

    def tear_down(self) -> None:
        """Remove every topic and router there is."""
        for kind in ("routers", "topics"):
            page = {"next_cursor": ""}
            while "next_cursor" in page:
                page = self._client.get(f"/v0/{kind}?page_size=1000").json()
                for row in page[kind]:
                    name = quote(row[kind[:-1]], safe="")
                    assert self._client.delete(f"/v0/{kind}/{name}").status_code == 200

    def _send(self, case: Any) -> None:
        kwargs = case.as_transport_kwargs(base_url="http://x")
        path = kwargs["url"].removeprefix("http://x")
        query = urlencode(kwargs.get("params") or {}, doseq=True, errors="replace")
        headers = {
            name: value
            for name, value in kwargs["headers"].items()
            if not name.lower().startswith(("user-agent", "connection", "x-schemathesis"))
        }
        value = kwargs.get("json", kwargs.get("data", b""))
        is_json = "json" in kwargs
        body = _bytes(_impatient(value) if is_json else value, is_json=is_json)
        self._request(case.operation, path, query, headers, body)
        aimed = self._aimed(case.path)
        if aimed is not None or (is_json and _names_topics(value)):
            if is_json:
                body = _bytes(_impatient(_at_things(value)), is_json=True)
            self._request(case.operation, aimed or path, query, headers, body)

    def _aimed(self, template: str) -> str | None:
        """The path of an existing thing; None for a path without a name."""
        if "{wid}" in template:
            return template.replace("{wid}", self._wid)
        for kind, names in THINGS.items():
            if f"{{{kind}}}" in template:
                name = names[next(self._turn) % len(names)]
                return template.replace(f"{{{kind}}}", quote(name))
        return None

    def _request(
        self, operation: Any, path: str, query: str, headers: dict[str, str], body: bytes
    ) -> None:
        method = operation.method.upper()
        url = f"{path}?{query}" if query else path
        sent = {name.encode("latin-1"): value.encode("latin-1") for name, value in headers.items()}
        request = self._client.build_request(method, url, headers=sent, content=body or None)
        response = self._client.send(request, stream=True)
        try:
            is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
            told = b"" if is_stream else response.read()
        finally:
            response.close()
        self.statuses[operation.label, response.status_code] += 1
        shown = f"{method} {url[:300]} {headers} {body[:1000]!r}\n-> {response.status_code} "
        raw_path = request.url.raw_path.decode("ascii").partition("?")[0]
        try:
            assert response.status_code not in (500, 503), "an answer of a server in trouble"
            described.check_answer(method, raw_path, response.status_code, response.headers, told)
        except Exception as error:
            raise AssertionError(f"{shown}{told[:1000]!r}\n{error}") from None


def _bytes(value: Any, *, is_json: bool) -> bytes:
    if is_json:
        value = json.dumps(value)
    if isinstance(value, str):
        return value.encode("utf-8", "replace")
    return value if isinstance(value, bytes) else b""


def _names_topics(body: Any) -> bool:
    return isinstance(body, dict) and bool(body.keys() & {"topics", "source", "dest"})


def _at_things(body: Any) -> Any:
    """The body with names of existing topics."""
    if not _names_topics(body):
        return body
    aimed = dict(body)
    if "source" in aimed:
        aimed |= {"source": "log", "dest": "copy"}
    if isinstance(aimed.get("topics"), dict):
        aimed["topics"] = dict(zip(_CONFIGS, aimed["topics"].values(), strict=False))
    return aimed


def _impatient(body: Any) -> Any:
    if isinstance(body, dict) and isinstance(body.get("wait_ms"), int):
        body = body | {"wait_ms": min(body["wait_ms"], _WAIT_MS_MAX)}
    if isinstance(body, dict) and isinstance(body.get("claim_next"), dict):
        body = body | {"claim_next": _impatient(body["claim_next"])}
    return body


def size_of(pid: int) -> tuple[int, int]:
    """Anonymous memory in KiB and open files of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    resident = next(line for line in status.splitlines() if line.startswith("RssAnon:"))
    return int(resident.split()[1]), len(list(Path(f"/proc/{pid}/fd").iterdir()))


@contextlib.contextmanager
def fuzzing(server: Server) -> Iterator[Fuzz]:
    """A `Fuzz` of a running server."""
    fuzz = Fuzz(server)
    try:
        yield fuzz
    finally:
        fuzz.close()


def settled_size(server: Server) -> tuple[int, int]:
    """The size once removed things are freed: connections close a moment later."""
    assert server.process is not None
    memory, files = size_of(server.process.pid)
    for _ in range(100):
        time.sleep(0.2)
        before, (memory, files) = files, size_of(server.process.pid)
        if files >= before:
            break
    return memory, files
