"""Behind a real nginx with the shipped configuration: TLS, HTTP/2, streams, sockets, restarts.

Times are printed (with `-rP`), with limits that a busy machine also meets.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import httpx
import pytest
import websockets.sync.client

from tests.contract.driver import ROOT, STOP_WITHIN_S, Server, eventually, good, refused
from tests.proxy import nginx
from tests.proxy.nginx import Proxy
from topics_server.values.limits import MIB

HTTP2: Final = ("--http2", "--silent", "--show-error", "--max-time", "60")


@pytest.fixture
def client(proxy: Proxy) -> Iterator[httpx.Client]:
    """HTTP/1.1 over TLS."""
    with httpx.Client(
        base_url=proxy.url, verify=proxy.context(), timeout=60, trust_env=False
    ) as made:
        yield made


def run_curl(curl: str, proxy: Proxy, *arguments: str) -> tuple[str, dict[str, str]]:
    """(body, curl's write-out) of one request, over HTTP/2 if the server has it."""
    told = "\n%{http_code} %{http_version} %{time_total}"
    found = subprocess.run(
        [curl, *HTTP2, "--cacert", str(proxy.certificate), "-w", told, *arguments],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert found.returncode == 0, f"{arguments}: {found.stderr}"
    body, _, line = found.stdout.rpartition("\n")
    return body, dict(zip(("status", "version", "seconds"), line.split(), strict=True))


# -- the tour's commands -------------------------------------------------------------------------


def tour_commands() -> list[list[str]]:
    """The curl lines of the README and the tour, split like a shell would."""
    text = "".join((ROOT / name).read_text() for name in ("README.md", "docs/TOUR.md"))
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    joined = "\n".join(blocks).replace("\\\n", " ")
    lines = [line[2:] for line in joined.splitlines() if line.startswith("$ curl ")]
    return [shlex.split(line.partition(" | ")[0])[1:] for line in lines]


def test_the_curl_lines_of_the_tour_work_through_tls_and_http2(curl: str, proxy: Proxy) -> None:
    wids: dict[str, str] = {}
    commands = tour_commands()
    assert len(commands) >= 10
    for command in commands:
        there = [part.replace("localhost:4000", f"{proxy.url}") for part in command]
        for shown, found in wids.items():
            there = [part.replace(shown, found) for part in there]
        assert any(part.startswith(proxy.url) for part in there), command
        if "/v0/watch/" in " ".join(there):
            frames = first_frames(curl, proxy, there, 2)
            assert frames[0]["topic"] == "orders"
            continue
        body, told = run_curl(curl, proxy, *there)
        assert told["version"] == "2", command
        assert told["status"] in {"200", "201"}, (command, body)
        answer = json.loads(body)
        assert "error" not in answer
        if "wid" in answer:
            names = re.findall(r"wid_[A-Za-z0-9_-]{22}", (ROOT / "docs" / "TOUR.md").read_text())
            wids = dict.fromkeys(names, answer["wid"])


def first_frames(curl: str, proxy: Proxy, arguments: list[str], count: int) -> list[dict[str, str]]:
    """The data of the first frames that a streaming curl prints."""
    kept = [part for part in arguments if part != "-sN"]
    command = [curl, *HTTP2, "-N", "--cacert", str(proxy.certificate), *kept]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        frames: list[dict[str, str]] = []
        for line in process.stdout:
            if line.startswith("data:"):
                frames.append(json.loads(line[5:]))
            if len(frames) == count:
                break
        process.kill()
    assert len(frames) == count
    return frames


# -- TLS and limits ------------------------------------------------------------------------------


def test_plain_http_is_sent_to_https_with_method_and_body_kept(proxy: Proxy) -> None:
    url = f"http://localhost:{proxy.plain_port}/v0/topics/orders/diff?a=b"
    answer = httpx.post(url, json={}, trust_env=False)
    assert answer.status_code == 308
    assert answer.headers["location"] == "https://localhost/v0/topics/orders/diff?a=b"


def test_the_version_of_nginx_is_hidden(proxy: Proxy, client: httpx.Client) -> None:
    assert client.get("/v0/health").headers.get("server") == "nginx"


def test_a_body_of_64_mib_passes_and_a_larger_one_is_refused_in_the_envelope(
    client: httpx.Client,
) -> None:
    record = b'{"data":"' + b"x" * (MIB - 2) + b'"}'
    body = b'{"records":[' + b",".join([record] * 63) + b"]}"
    body += b" " * (64 * MIB - len(body))
    answer = post(client, "/v0/topics/large", body)
    assert good(answer)["last_seq"] == 63
    detail = refused(post(client, "/v0/topics/large", body + b" "), 413, "payload_too_large")
    assert detail == {"limit": "max_body_bytes"}
    assert good(client.get("/v0/topics/large"))["head_seq"] == 63


def post(client: httpx.Client, path: str, body: bytes) -> httpx.Response:
    return client.post(path, content=body, headers={"Content-Type": "application/json"})


@pytest.mark.parametrize("version", ["--http1.1", "--http2"])
def test_ids_and_cursors_of_several_kib_pass(curl: str, proxy: Proxy, version: str) -> None:
    told = run_curl(
        curl, proxy, version, f"{proxy.url}/v0/health", "-H", f"Last-Event-ID: {'i' * 12_000}"
    )[1]
    assert told["status"] == "200"


def test_tls_1_1_is_refused(curl: str, proxy: Proxy) -> None:
    found = subprocess.run(
        [curl, "-sS", "--cacert", str(proxy.certificate), "--tls-max", "1.1", proxy.url],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert found.returncode == 35


# -- streams -------------------------------------------------------------------------------------


def new_session(client: httpx.Client, topic: str, from_seq: int = 0) -> str:
    """The URL of a new session's stream."""
    body = {"topics": {topic: {"from_seq": from_seq}}}
    answer = good(client.post("/v0/watch", json=body))
    url: str = answer["stream_url"]
    return url


@contextlib.contextmanager
def lines_of(curl: str, proxy: Proxy, url: str, version: str) -> Iterator[subprocess.Popen[str]]:
    """A curl that prints a stream as it arrives."""
    command = [curl, "-sSN", version, "--cacert", str(proxy.certificate), url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def next_frame(process: subprocess.Popen[str]) -> dict[str, object]:
    """The next frame with records."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("data:") and '"records"' in line:
            frame: dict[str, object] = json.loads(line[5:])
            return frame
    raise AssertionError("the stream ended")


@pytest.mark.parametrize("version", ["--http1.1", "--http2"])
def test_a_frame_passes_as_soon_as_its_record_is_appended(
    curl: str, proxy: Proxy, behind: Server, client: httpx.Client, version: str
) -> None:
    """If nginx buffered, the frame would wait for further frames, and none come."""
    topic = f"live{version.strip('-').replace('.', '-')}"
    good(client.put(f"/v0/topics/{topic}", json={}))
    url = proxy.url + new_session(client, topic)
    with lines_of(curl, proxy, url, version) as process:
        for number in range(1, 6):
            behind.api.add(topic, number)
            assert next_frame(process)["to_seq"] == number


def test_a_reader_that_leaves_is_gone_at_the_server_too(
    curl: str, proxy: Proxy, behind: Server, client: httpx.Client
) -> None:
    def streams() -> float:
        text = behind.api.http.get("/v0/metrics").text
        found = re.search(r"^topics_sse_connections(?:\{[^}]*\})? (\S+)", text, re.MULTILINE)
        assert found is not None
        return float(found[1])

    eventually(lambda: streams() == 0, "the streams of other tests have ended")
    behind.api.add("left", 1)
    url = proxy.url + new_session(client, "left")
    with lines_of(curl, proxy, url, "--http2") as process:
        next_frame(process)
        assert streams() == 1
    eventually(lambda: streams() == 0, "the stream has ended", 30)


def test_jobs_are_pushed_through_the_proxy(
    curl: str, proxy: Proxy, behind: Server, client: httpx.Client
) -> None:
    good(client.put("/v0/topics/jobs", json={"type": "queue"}))
    url = f"{proxy.url}/v0/topics/jobs/work?node=w1&max=2"
    with lines_of(curl, proxy, url, "--http2") as process:
        assert process.stdout is not None
        for number in range(3):
            behind.api.add("jobs", {"n": number})
            for line in process.stdout:
                if line.startswith("data:") and "lease_id" in line:
                    break
            seqs = [int(seq) for seq in re.findall(r'"\$seq":(\d+)', line)]
            assert seqs == [number + 1]
            good(behind.api.http.post("/v0/topics/jobs/ack", json={"node": "w1", "seqs": seqs}))


def test_events_of_a_stream_pass_as_they_come(proxy: Proxy, client: httpx.Client) -> None:
    """The server's `X-Accel-Buffering` header turns buffering off, wherever streams are mounted."""
    path = "/v1/stream/through/a%20proxy"
    made = client.put(path, headers={"content-type": "text/plain"}, content="one")
    assert made.headers["location"].startswith("https://")
    assert made.headers["location"].endswith(path)
    with client.stream("GET", f"{path}?offset=-1&live=sse") as events:
        lines = events.iter_lines()
        assert "data:one" in [next(lines) for _ in range(6)]
        client.post(path, headers={"content-type": "text/plain"}, content="two")
        assert "data:two" in [next(lines) for _ in range(6)]
    refused(client.get("/v1/stream/through%2Fa"), 400, "invalid_request")
    refused(client.get("/v1/stream/through//a"), 400, "invalid_request")
    assert client.delete(path).status_code == 204


def test_a_websocket_works_through_the_proxy(proxy: Proxy, behind: Server) -> None:
    behind.api.put("socket")
    with websockets.sync.client.connect(
        f"wss://localhost:{proxy.port}/v0/ws", ssl=proxy.context(), proxy=None, max_size=None
    ) as ws:
        ws.send(json.dumps({"op": "ping", "request_id": "p"}))
        assert json.loads(ws.recv(timeout=20)) == {"op": "pong", "request_id": "p"}
        ws.send(json.dumps({"op": "subscribe", "topics": {"socket": {"from_seq": 0}}}))
        large = "x" * 900_000
        for number in range(3):
            behind.api.add("socket", [number, large])
            while True:
                frame = json.loads(ws.recv(timeout=20))
                if frame.get("records"):
                    break
            assert [record["data"] for record in frame["records"]] == [[number, large]]


# -- restarts of the server ----------------------------------------------------------------------


def test_while_the_server_is_down_requests_get_503_and_browsers_reconnect(
    proxy: Proxy, behind: Server, client: httpx.Client
) -> None:
    behind.stop()
    try:
        for path in ("/v0/topics/any", "/v0/health"):
            answer = client.get(path)
            refused(answer, 503, "not_ready")
            assert answer.headers["retry-after"] == "1"
        refused(client.post("/v0/topics/any", json={"records": [{"data": 1}]}), 503, "not_ready")
        stream = client.get("/v0/watch/wid_x", headers={"Accept": "text/event-stream"})
        assert (stream.status_code, stream.text) == (200, "retry: 1000\n\n")
        assert stream.headers["content-type"] == "text/event-stream"
    finally:
        behind.start()


def test_tail_goes_on_over_restarts_with_none_missing_and_none_twice(
    proxy: Proxy, behind: Server, tmp_path: Path
) -> None:
    """The client is the command line: it checks the certificate's name and resumes by itself."""
    behind.api.put("tailed")
    environment = behind.environment() | {
        "SSL_CERT_FILE": str(proxy.certificate),
        "TOPICS_URL": proxy.url,
    }
    errors_path = tmp_path / "errors"
    command = [*python_topics(), "tail", "tailed", "--from-start", "--json", "--limit", "90"]
    seen: list[int] = []
    with (
        errors_path.open("wb") as errors,
        subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        assert process.stdout is not None
        for round_number in range(3):
            for number in range(30):
                behind.api.add("tailed", round_number * 30 + number)
            while len(seen) < 30 * (round_number + 1):
                line = process.stdout.readline()
                assert line, errors_path.read_text()
                seen.append(json.loads(line)["data"])
            if round_number < 2:
                behind.restart()
        process.wait(STOP_WITHIN_S)
    assert seen == list(range(90))


def python_topics() -> list[str]:
    import sys

    return [sys.executable, "-m", "topics_server"]


# -- what nginx forwards -------------------------------------------------------------------------


class Recorder:
    """An upstream that keeps the bytes of each request; it sends `answer` back, or hangs without
    one.
    """

    def __init__(self) -> None:
        self.requests: list[bytes] = []
        self.answer = b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n"
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            with connection:
                connection.settimeout(STOP_WITHIN_S)
                received = b""
                while b"\r\n\r\n" not in received:
                    piece = connection.recv(65536)
                    if not piece:
                        break
                    received += piece
                if received == b"stop\r\n\r\n":
                    return
                if received:
                    self.requests.append(received)
                    connection.sendall(self.answer)

    def close(self) -> None:
        """End the thread."""
        with socket.create_connection(("127.0.0.1", self.port)) as sock:
            sock.sendall(b"stop\r\n\r\n")
        self._thread.join()
        self._listener.close()


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    """A server behind nginx that records the requests which it receives."""
    made = Recorder()
    yield made
    made.close()


def header_of(request: bytes, name: str) -> list[str]:
    head = request.partition(b"\r\n\r\n")[0].decode("latin-1")
    pairs = [line.partition(":") for line in head.split("\r\n")[1:]]
    return [value.strip() for key, _, value in pairs if key.lower() == name.lower()]


def test_forwarding_headers_of_a_client_are_overwritten(
    nginx_path: str, curl: str, recorder: Recorder, tmp_path: Path
) -> None:
    with nginx.running(nginx_path, tmp_path / "nginx", recorder.port) as proxy:
        claims = (
            "X-Forwarded-For: 8.8.8.8",
            "X-Forwarded-Proto: gopher",
            "X-Forwarded-Host: evil.example",
            "X-Forwarded-Port: 1",
            "X-Real-IP: 8.8.8.8",
            "Forwarded: for=8.8.8.8",
        )
        headers = [part for claim in claims for part in ("-H", claim)]
        target = "/v0/topics/a%2Fb?x=%20y&token=t"
        for version in ("--http1.1", "--http2"):
            for path in (target, "/v0/ws", "/v0/watch/wid_1", "/v0/topics/q/work"):
                arguments = [version, "--path-as-is", *headers, proxy.url + path]
                assert run_curl(curl, proxy, *arguments)[1]["status"] == "204"
        arguments = ["--http1.1", "-H", "Upgrade: h2c", "-H", "Connection: Upgrade"]
        run_curl(curl, proxy, *arguments, proxy.url + "/v0/ws")
    assert len(recorder.requests) == 9
    for request in recorder.requests:
        assert header_of(request, "X-Forwarded-For") == ["127.0.0.1"]
        assert header_of(request, "X-Forwarded-Proto") == ["https"]
        assert header_of(request, "X-Forwarded-Host") == [f"localhost:{proxy.port}"]
        assert header_of(request, "X-Forwarded-Port") == [str(proxy.port)]
        assert header_of(request, "X-Real-IP") == ["127.0.0.1"]
        assert header_of(request, "Host") == [f"localhost:{proxy.port}"]
        assert header_of(request, "Forwarded") == []
        assert header_of(request, "Upgrade") == []
    # nginx forwards the path byte for byte.
    assert recorder.requests[0].split()[1].decode() == target


def test_an_append_whose_answer_is_lost_is_not_sent_again(
    nginx_path: str, recorder: Recorder, tmp_path: Path
) -> None:
    recorder.answer = b""
    with nginx.running(nginx_path, tmp_path / "nginx", recorder.port) as proxy:
        with httpx.Client(verify=proxy.context(), trust_env=False) as client:
            answer = client.post(f"{proxy.url}/v0/topics/a", json={"records": [{"data": 1}]})
        refused(answer, 503, "not_ready")
    assert len(recorder.requests) == 1


# -- secrets -------------------------------------------------------------------------------------


def logged(proxy: Proxy) -> list[dict[str, object]]:
    """The access log so far."""
    return [json.loads(line) for line in proxy.access_log.read_text().splitlines()]


def test_no_token_is_ever_logged(proxy: Proxy, behind: Server, client: httpx.Client) -> None:
    """The token is in a query, a header, a subprotocol or a Referer; the rule also holds when nginx
    itself fails.
    """
    secret = "hush-0123456789abcdef"
    headers = {
        "Authorization": f"Bearer {secret}",
        "Sec-WebSocket-Protocol": f"topics.bearer.{secret}",
        "Referer": f"https://example.org/?token={secret}",
        "Accept": "text/event-stream",
    }
    paths = (
        f"/v0/watch/wid_x?token={secret}",
        f"/v0/ws?token={secret}",
        f"/v0/topics/{{}}?{secret}",
    )

    def ask() -> None:
        for path in paths:
            client.get(path, headers=headers)
            port = proxy.plain_port
            httpx.get(f"http://localhost:{port}{path}", headers=headers, trust_env=False)
        # Requests that nginx refuses before it has read them completely.
        for head in (
            f"GET /?{secret} HTTP/9.9",
            f"GET /{{?{secret}",
            f"GET /?{secret}" + "y" * 40_000,
        ):
            with proxy.connect() as sock, contextlib.suppress(OSError):
                sock.sendall(f"{head}\r\nHost: x\r\nAuthorization: {secret}\r\n\r\n".encode())
                sock.recv(1000)

    ask()
    behind.stop()
    ask()
    behind.start()
    wanted = {"/v0/watch/wid_x", "/v0/ws"}
    eventually(lambda: wanted <= {line["path"] for line in logged(proxy)}, "the lines are there")
    assert secret not in proxy.logged
    for number in range(1, behind.starts + 1):
        assert secret not in (behind.directory / f"log-{number}.txt").read_text()


def test_the_access_log_has_the_servers_status(proxy: Proxy, client: httpx.Client) -> None:
    path = "/v0/topics/nobody-made-it"
    client.get(f"{path}?x=1")
    # nginx writes the line after the answer.
    eventually(lambda: any(line["path"] == path for line in logged(proxy)), "the line is there")
    line = next(each for each in reversed(logged(proxy)) if each["path"] == path)
    assert (line["status"], line["upstream"], line["method"]) == (404, "404", "GET")
    assert urlsplit(proxy.url).hostname == "localhost"


def test_doctor_sees_the_way_to_the_server(proxy: Proxy, behind: Server, tmp_path: Path) -> None:
    environment = behind.environment() | {
        "SSL_CERT_FILE": str(proxy.certificate),
        "TOPICS_URL": proxy.url,
        "TOPICS_DATA_DIR": str(tmp_path / "data"),
    }
    done = subprocess.run(
        [*python_topics(), "doctor", "--json"],
        env=environment,
        capture_output=True,
        timeout=60,
        check=False,
    )
    found = {line["check"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert found["server"]["verdict"] == found["ready"]["verdict"] == "ok"
    assert found["way"]["seen"] == "TLS, by nginx"
    assert found["its clock"]["verdict"] == "ok"
