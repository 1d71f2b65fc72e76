"""`cli.routing.router` and `cli.routing.routers`: requests, output, exit codes."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result

from topics_server.cli.routing import router, routers


class Fake(http.server.BaseHTTPRequestHandler):
    """Sends answers from a list to any request, and keeps the requests."""

    protocol_version = "HTTP/1.1"
    asked: list[tuple[str, str, Any]]
    answers: list[tuple[int, Any]]

    def _do(self) -> None:
        length = int(self.headers["Content-Length"] or 0)
        body = self.rfile.read(length)
        self.asked.append((self.command, self.path, json.loads(body) if body else None))
        status, value = self.answers.pop(0)
        told = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(told)))
        self.end_headers()
        self.wfile.write(told)

    do_GET = do_PUT = do_DELETE = _do

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


Served = tuple[str, type[Fake]]


@pytest.fixture
def served() -> Iterator[Served]:
    class Mine(Fake):
        pass

    Mine.asked, Mine.answers = [], []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Mine)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", Mine
    server.shutdown()
    thread.join()
    server.server_close()


def run(served: Served, *words: str) -> Result:
    verb, *rest = words
    command = {"router": router.command, "routers": routers.command}[verb]
    if verb == "router":
        rest = [rest[0], "--url", served[0], *rest[1:]]
    else:
        rest = ["--url", served[0], *rest]
    return CliRunner().invoke(command, rest)


ENDS = ("--source", "a", "--dest", "b")


@pytest.mark.parametrize(
    ("words", "more"),
    [
        ((), {}),
        (("--filter-tag", "x*"), {"filter": ["tag", "Eq", "x*"]}),
        (("--filter-prefix", "x:"), {"filter": ["tag", "Glob", "x:*"]}),
        (("--filter-prefix", ""), {"filter": ["tag", "Glob", "*"]}),
        (("--no-preserve-node",), {"preserve_node": False}),
        (("--no-preserve-tag",), {"preserve_tag": False}),
        (("--no-create-dest",), {"create_dest": False}),
        (("--allow-cycle",), {"allow_cycle": True}),
        (("--exactly-once",), {"guarantee": "exactly_once"}),
        (("--from-earliest",), {"from": "earliest"}),
    ],
)
def test_put_sends_what_is_given(
    served: Served, words: tuple[str, ...], more: dict[str, Any]
) -> None:
    served[1].answers = [(201, {"router": "a->b", "created": True})]
    ran = run(served, "router", "put", "a->b", *ENDS, *words)
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout) == {"router": "a->b", "created": True}
    assert served[1].asked == [("PUT", "/v0/routers/a-%3Eb", {"source": "a", "dest": "b", **more})]


@pytest.mark.parametrize(
    "words",
    [
        ("put", "r", "--source", "a"),
        ("put", "r", "--dest", "a"),
        ("put", *ENDS),
        ("put", "r", *ENDS, "--filter-tag", "a", "--filter-prefix", "b"),
        ("get",),
        ("rm",),
    ],
)
def test_wrong_usage_sends_no_request(served: Served, words: tuple[str, ...]) -> None:
    ran = run(served, "router", *words)
    assert ran.exit_code == 2
    assert served[1].asked == []


def test_get_and_rm_name_the_router(served: Served) -> None:
    served[1].answers = [(200, {"router": "a->b"}), (200, {"router": "a->b", "deleted": True})]
    assert run(served, "router", "get", "a->b").exit_code == 0
    assert json.loads(run(served, "router", "rm", "a->b", "--yes").stdout)["deleted"] is True
    assert served[1].asked == [
        ("GET", "/v0/routers/a-%3Eb", None),
        ("DELETE", "/v0/routers/a-%3Eb", None),
    ]


def test_an_absent_thing_is_exit_code_1(served: Served) -> None:
    refusal = {"error": {"code": "router_not_found", "message": "there is no router"}}
    served[1].answers = [(404, refusal), (200, {"router": "r", "deleted": False})]
    for words in (("get", "r"), ("rm", "r", "--yes")):
        ran = run(served, "router", *words)
        assert ran.exit_code == 1
        assert ran.stderr.startswith("router_not_found: ")
        assert ran.stdout == ""


def row(source: str, dest: str) -> dict[str, Any]:
    """One row of the list."""
    name = f"{source}->{dest}"
    guarantee = "at_least_once"
    return {"router": name, "source": source, "dest": dest, "guarantee": guarantee} | {
        "forwarded_total": 7
    }


@pytest.mark.parametrize("words", [("router", "ls"), ("routers",)])
def test_the_list_follows_its_pages(served: Served, words: tuple[str, ...]) -> None:
    pages = [
        {"routers": [row("a", "b")], "next_cursor": "x="},
        {"routers": [row("a", "c")]},
    ]
    gone = {"error": {"code": "router_not_found", "message": "there is no router"}}
    answers = [(200, page) for page in (*pages, *pages)]
    served[1].answers = [*answers, (200, state("a", "b")), (404, gone)]
    ran = run(served, *words, "--prefix", "a->", "--source", "a")
    assert [json.loads(line) for line in ran.stdout.splitlines()] == [row("a", "b"), row("a", "c")]
    paths = [path for _, path, _ in served[1].asked]
    assert paths == [
        "/v0/routers?prefix=a-%3E&source=a&page_size=1000",
        "/v0/routers?prefix=a-%3E&source=a&page_size=1000&cursor=x%3D",
    ]
    table = run(served, *words, "--table").stdout.splitlines()
    assert table[0].split() == [*router.COLUMNS]
    assert table[1].split() == ["a->b", "a", "b", "at_least_once", "7", "0", "running"]
    assert table[2:] == []  # one router was removed since the list was made


def state(source: str, dest: str) -> dict[str, Any]:
    return row(source, dest) | {"filter": None, "lag": 0, "state": "running", "cursor_seq": 1}


@pytest.mark.parametrize(
    ("words", "first"),
    [
        (("--graph",), "digraph routers {"),
        (("--graph", "dot"), "digraph routers {"),
        (("--graph", "tree"), "a"),
    ],
)
def test_a_graph_is_drawn_of_states(served: Served, words: tuple[str, ...], first: str) -> None:
    gone = {"error": {"code": "router_not_found", "message": "there is no router"}}
    served[1].answers = [
        (200, {"routers": [row("a", "b"), row("a", "c"), row("b", "d")]}),
        (200, state("a", "b")),
        (404, gone),
        (200, state("b", "d")),
    ]
    ran = run(served, "routers", *words)
    assert ran.exit_code == 0, ran.output
    lines = ran.stdout.splitlines()
    assert lines[0] == first
    assert not any('"c"' in line or line.split()[-1] == "c" for line in lines)
    if first == "a":
        assert lines == ["a", "└── b", "    └── d"]


def test_a_server_that_fails_meanwhile_is_reported(served: Served) -> None:
    failed = {"error": {"code": "internal", "message": "m"}}
    served[1].answers = [(200, {"routers": [row("a", "b")]}), (500, failed)]
    ran = run(served, "routers", "--graph", "dot")
    assert (ran.exit_code, ran.stderr) == (1, "internal: m\n")
