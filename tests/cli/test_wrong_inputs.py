"""Every verb with wrong inputs: one sentence, the documented exit code, no Python traceback.

Most cases run in this process, through the same handler as the command. Cases about the process
itself (a server that cannot start, a closed output) run in a process of their own.
"""

from __future__ import annotations

import http.server
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.cli.conftest import COMMAND, Topics
from tests.contract.driver import Api
from topics_server.cli import VERBS, main

# Texts that only Python, a library or an errno prints.
FOREIGN = ("Traceback", "object at 0x", "<class", "codec", "\\udc", " b'", "[Errno", "PosixPath")
NOT_TEXT = "\udcff"  # byte 0xff of a command line


def run(url: str, words: list[str], stdin: bytes = b"1\n") -> Result:
    """Run the command in this process."""
    env = {name: None for name in os.environ if name.startswith("TOPICS_")}
    return CliRunner().invoke(main, words, input=stdin, env={**env, "TOPICS_URL": url})


def check(ran: Result, code: int | None = None) -> list[str]:
    """Check the sentences of a refusal."""
    assert ran.exception is None or isinstance(ran.exception, SystemExit), repr(ran.exception)
    assert ran.exit_code in ((1, 2) if code is None else (code,)), ran.output
    found = [word for word in FOREIGN if word in ran.stderr]
    assert found == [], ran.stderr
    lines = [line for line in ran.stderr.splitlines() if line]
    told = [line for line in lines if not line.startswith(("Usage", "Try"))]
    assert 1 <= len(told) <= 2, ran.stderr
    return told


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with inputs of the wrong kind."""
    (tmp_path / "file").write_text("not json\n")
    (tmp_path / "dir").mkdir()
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\n")
    (tmp_path / "gz").write_bytes(b"\x1f\x8b\x08\x00broken")
    monkeypatch.chdir(tmp_path)
    return tmp_path


MISSING = "/nowhere/x"
WRONG: list[tuple[int, list[str]]] = [
    (2, ["nope"]),
    (2, ["--nope"]),
    (2, ["put"]),
    (2, ["put", ""]),
    (1, ["put", "a b"]),
    (2, ["put", "t", "--cap-records", "x"]),
    (2, ["put", "t", "--cap-bytes", "64XB"]),
    (2, ["put", "t", "--priority", "high"]),
    (2, ["put", "t", "--ttl", "-5s"]),
    (1, ["put", "t", "--dead-letter", "t", "--type", "queue"]),
    (2, ["set", "t", "--ttl", "1y"]),
    (1, ["set", "absent", "--ttl", "1s"]),
    (1, ["append", "t", "--file", MISSING]),
    (1, ["append", "t", "--file", "dir"]),
    (2, ["append", "t", "--file", "bytes"]),
    (2, ["append", "t", "[" * 3000]),
    (2, ["append", "t", "1", "--meta", "x"]),
    (2, ["append", "t", "1", "--meta", NOT_TEXT]),
    (2, ["append", "t", NOT_TEXT]),
    (1, ["append", "t", "1", "--tag", "x" * 300]),
    (2, ["append", "t", "1", "--producer", "a\nb"]),
    (2, ["append", "t", "1", "--producer", NOT_TEXT]),
    (1, ["load", "l", MISSING]),
    (1, ["load", "l", "dir"]),
    (1, ["load", "l", "file"]),
    (1, ["load", "l", "bytes"]),
    (1, ["load", "l", "gz"]),
    (2, ["load", "l", "file", "--batch-bytes", "x"]),
    (1, ["import", MISSING, "i"]),
    (1, ["import", "dir"]),
    (1, ["import", "dangling", "i"]),
    (1, ["import", "file", "i"]),
    (1, ["import", "bytes", "i"]),
    (1, ["import", "gz", "i"]),
    (2, ["import", "file"]),
    (2, ["import", "file", "i", "--time-field", "at", "--into", "x"]),
    (2, ["import", "http://", "i"]),
    (2, ["import", NOT_TEXT]),
    (1, ["read", "absent"]),
    (2, ["read", "t", "--from", "-1"]),
    (2, ["read", "t", "--last", "0"]),
    (1, ["tail", "absent"]),
    (1, ["tail", "absent", "-n", "3"]),
    (2, ["tail", "t", "--heartbeat", "5m"]),
    (2, ["tail", "t", "--filter", "["]),
    (2, ["tail", "t", "--filter", NOT_TEXT]),
    (2, ["tail", "t", "--tag", NOT_TEXT]),
    (1, ["tail", "t", "--filter", "[]"]),
    (1, ["tail", "t", "--filter", '["Or", 1]']),
    (1, ["tail", "t", "--tag", "x" * 300]),
    (1, ["tail", "t", "--tag-prefix", "x" * 300]),
    (1, ["tail", "t", "--tag-prefix", "a*"]),
    (1, ["tail", "t", "-n", "2", "--filter", "{}"]),
    (1, ["tail", "absent", "--tag", "x"]),
    (1, ["tail", "t", "--consumer", "absent"]),
    (1, ["tail", "t", "--consumer", "a b"]),
    (1, ["tail", "t", "--consumer", ""]),
    (2, ["tail", "t", "--consumer", "c", "-n", "2"]),
    (2, ["tail", "t", "--consumer", "c", "--from", "0"]),
    (2, ["tail", "t", "--consumer", "c", "--from-start"]),
    (2, ["watch", "t", "--filter", "{"]),
    (1, ["watch", "t", "--filter", "7"]),
    (1, ["watch", "t", "--tag", "x" * 300]),
    (1, ["watch", "absent"]),
    (2, ["watch", "t=x"]),
    (1, ["stream", "read", "absent"]),
    (1, ["stream", "append", "absent", "1"]),
    (1, ["stream", "follow", "absent"]),
    (1, ["stream", "close", "absent"]),
    (1, ["stream", "rm", "absent", "--yes"]),
    (1, ["stream", "create", "f", "--fork", "absent"]),
    (2, ["stream", "read", ""]),
    (2, ["stream", "create", "s", "--ttl", "1.5"]),
    (1, ["stream", "create", "s", "--expires-at", "x"]),
    (2, ["stream", "create", "s", "--expires-at", "é"]),
    (2, ["stream", "create", "s", "--content-type", "a\nb"]),
    (2, ["stream", "create", "s", "--fork-offset", "1"]),
    (1, ["pub", "absent", "--no-create"]),
    (2, ["pub", "t", "--durability", "x"]),
    (1, ["enqueue", "absent", "1"]),
    (2, ["enqueue", "t", "x"]),
    (2, ["enqueue", "t", "1", "--delay", "x"]),
    (2, ["enqueue", "t", "1", "--meta", "[]"]),
    (1, ["work", "absent", "--", "true"]),
    (2, ["work", "t", "--", "no-such-command"]),
    (2, ["work", "t", "--node", NOT_TEXT, "--", "true"]),
    (1, ["queue", "absent"]),
    (2, ["queue", "--interval", "x"]),
    (1, ["queue", "leases", "absent"]),
    (1, ["queue", "redrive", "absent"]),
    (1, ["queue", "purge", "absent", "--yes"]),
    (1, ["router", "get", "absent"]),
    (1, ["router", "rm", "absent", "--yes"]),
    (1, ["router", "put", "r", "--source", "a", "--dest", "a"]),
    (2, ["router", "get", ""]),
    (1, ["view", "get", "absent", "v"]),
    (2, ["view", "put", "a", "v"]),
    (2, ["routers", "--graph", "x"]),
    (1, ["consumer", "get", "absent", "c"]),
    (1, ["consumer", "ls", "absent"]),
    (1, ["consumer", "rm", "absent", "c", "--yes"]),
    (2, ["consumer", "commit", "t", "c", "x"]),
    (2, ["demo", "--port", "x"]),
    (2, ["help", "nope"]),
    (1, ["info", "absent"]),
    (2, ["info", ""]),
    (2, ["delete", "t"]),
    (1, ["delete", "absent", "--before", "1", "--yes"]),
    (1, ["rm", "absent", "--yes"]),
    (2, ["verify", MISSING]),
    (2, ["verify", "file"]),
    (1, ["verify", "dir"]),
    (2, ["dump", "file"]),
    (1, ["dump", "dir"]),
    (1, ["repair", MISSING]),
    (1, ["repair", "dir"]),
    (1, ["repair", "dir", "--begin-anew", "x"]),
    (2, ["config", "--port", "x"]),
    (2, ["config", "--keep-alive-ms", "5parsecs"]),
    (1, ["config", "--json", "--api-keys-file", MISSING]),
    (2, ["backup", "dir"]),
    (2, ["backup", "dir", "--into", "file"]),
    (2, ["backups", "ls", MISSING]),
    (2, ["backups", "verify", "file"]),
    (2, ["backups", "prune", "dir", "--keep", "x"]),
    (2, ["backups", "drill", MISSING]),
    (1, ["backups", "drill", "dir"]),
    (2, ["torture", "file"]),
    (2, ["torture", "dir", "--minutes", "-1"]),
    (2, ["torture", "dir", "--size-limit", "1MB"]),
    (1, ["torture", MISSING]),
    (2, ["bench", "--seconds", "0"]),
    (2, ["bench", "--seconds", "1h"]),
    (2, ["bench", "--connections", "0"]),
    (2, ["bench", "--connections", "257"]),
    (2, ["bench", "--only", "append,nope"]),
    (2, ["bench", "--only", ","]),
    (1, ["bench", "--prefix", "a b"]),
    (1, ["bench", "--prefix", "x" * 300]),
    (2, ["bench", "--url", "nope"]),
    (2, ["bench", "--token", NOT_TEXT]),
    (2, ["restore", MISSING, "new"]),
    (1, ["restore", "dir", "new"]),
    (2, ["restore", "dir", "new", "--backup", "0"]),
    (2, ["restore", "dir", "new", "--to-seq", "t=1"]),
    (2, ["restore", "file:///absent", "new", "--to-seq", "t"]),
    (2, ["restore", "file:///absent", "new", "--to-time", "noon"]),
    (2, ["restore", "file:///absent", "new", "--to-time", "2026-01-31T12:00:00"]),
    (2, ["restore", "file:///absent", "new", "--base", "1", "--to-time", "1"]),
    (2, ["restore", "file:///absent", "new", "--backup", "1"]),
    (2, ["restore", "file://user:secret@host/absent", "new"]),
    (1, ["restore", "file:///absent", "new"]),
    (2, ["archive", "ls", "dir"]),
    (1, ["archive", "ls", "file:///absent"]),
    (1, ["archive", "verify", "file:///absent"]),
    (1, ["archive", "drill", "file:///absent"]),
    (2, ["archive", "drill", "dir"]),
    (2, ["archive", "drill", "file:///absent", "--to-time", "soon"]),
    (1, ["archive", "unlock", "file:///absent", "--yes"]),
    (2, ["archive", "unlock", "ftp://host/path"]),
    (2, ["archive", "prune", "file:///absent", "--keep", "x"]),
    (1, ["archive", "prune", "file:///absent", "--keep", "1", "--yes"]),
    (2, ["doctor", "--url", "x"]),
    (2, ["health", "--url", "http://127.0.0.1:1"]),
    (2, ["health", "--token", NOT_TEXT]),
]


@pytest.mark.parametrize(("code", "words"), WRONG, ids=lambda each: repr(each)[:60])
def test_a_wrong_input_is_a_sentence(api: Api, files: Path, code: int, words: list[str]) -> None:
    check(run(api.url, words), code)


NAMED: list[list[str]] = [
    ["put", "NAME"],
    ["set", "NAME", "--ttl", "1s"],
    ["append", "NAME", "1"],
    ["append", "t", "1", "--tag", "NAME"],
    ["append", "NAME", "-"],
    ["load", "NAME", "-"],
    ["import", "-", "NAME", "--whole-lines"],
    ["read", "NAME"],
    ["read", "t", "--node", "NAME"],
    ["tail", "NAME"],
    ["watch", "NAME"],
    ["stream", "read", "NAME"],
    ["stream", "create", "s", "--content-type", "NAME"],
    ["pub", "NAME"],
    ["enqueue", "NAME", "1"],
    ["work", "NAME", "--", "true"],
    ["queue", "NAME"],
    ["queue", "leases", "NAME"],
    ["queue", "redrive", "t", "--from", "NAME"],
    ["queue", "purge", "NAME", "--yes"],
    ["router", "put", "r", "--source", "NAME", "--dest", "b"],
    ["router", "get", "NAME"],
    ["router", "ls", "--prefix", "NAME"],
    ["routers", "--source", "NAME"],
    ["ls", "--prefix", "NAME"],
    ["info", "NAME"],
    ["delete", "t", "--tag", "NAME", "--yes"],
    ["rm", "NAME", "--yes"],
    ["config", "--data-dir", "NAME"],
    ["bench", "--prefix", "NAME"],
]


@pytest.mark.parametrize("words", NAMED, ids=" ".join)
def test_an_argument_that_is_no_text_is_a_sentence(api: Api, words: list[str]) -> None:
    told = check(run(api.url, [NOT_TEXT if word == "NAME" else word for word in words]), 2)
    assert "ASCII" in told[0] or "UTF-8" in told[0]


TALKING: list[list[str]] = [
    ["put", "t"],
    ["put", "t", "--table"],
    ["set", "t", "--ttl", "1s"],
    ["append", "t", "1", "--table"],
    ["append", "t", "1", "--producer", "p"],
    ["append", "t", "-"],
    ["load", "t", "-"],
    ["import", "-", "t", "--whole-lines"],
    ["read", "t"],
    ["read", "t", "--last", "1"],
    ["tail", "t"],
    ["tail", "t", "-n", "1"],
    ["watch", "t"],
    ["stream", "read", "s"],
    ["stream", "follow", "s"],
    ["pub", "t"],
    ["queue"],
    ["queue", "t"],
    ["queue", "leases", "t"],
    ["queue", "redrive", "t"],
    ["queue", "purge", "t", "--yes"],
    ["backup"],
    ["bench"],
    ["consumer", "ls", "t"],
    ["router", "rm", "r", "--yes"],
    ["router", "ls", "--table"],
    ["routers", "--graph"],
    ["ls"],
    ["ls", "--table"],
    ["info", "t", "--table"],
    ["rm", "t", "--yes"],
]


@pytest.mark.parametrize("words", TALKING, ids=" ".join)
def test_no_server_is_a_sentence_and_exit_code_2(words: list[str]) -> None:
    (told,) = check(run("http://127.0.0.1:1", words), 2)
    assert told.startswith("cannot connect to http://127.0.0.1:1")
    assert "Connection refused" in told


class Stranger(http.server.BaseHTTPRequestHandler):
    """A web server that answers every request with a fixed answer."""

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        body: bytes = self.server.says  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = answer

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def stranger() -> Iterator[http.server.ThreadingHTTPServer]:
    """A web server that is not a topics server."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Stranger)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("says", [b"<html>", b"[]", b'{"topics":[{}],"routers":[{}]}'])
@pytest.mark.parametrize("words", TALKING, ids=" ".join)
def test_a_server_of_another_kind_is_recognised(
    stranger: http.server.ThreadingHTTPServer, words: list[str], says: bytes
) -> None:
    stranger.says = says  # type: ignore[attr-defined]
    ran = run(f"http://127.0.0.1:{stranger.server_port}", words)
    if ran.exit_code == 0 and ran.stderr == "":
        return  # for these the verb passes the answer on unchanged, or the answer is partly valid
    check(ran)


def test_every_verb_stands_in_a_table() -> None:
    own = {"serve", "export", "jobs", "pipeline", "completion"}
    here = {words[0] for _, words in WRONG} | {words[0] for words in (*NAMED, *TALKING)}
    assert set(VERBS) - here - own == set()


# -- the process itself ----------------------------------------------------------------------------

STARTS = [
    ["--port", "x"],
    ["--data-dir", "file"],
    ["--data-dir", "/proc/x"],
    ["--data-dir", ""],
    ["--data-dir", "dangling"],
    ["--api-keys-file", MISSING],
    ["--api-keys-file", "dir"],
    ["--cold-dir", "file", "--port", "0"],
    ["--host", "no.such.host.invalid", "--allow-insecure-no-auth", "1"],
]


@pytest.mark.parametrize("words", STARTS, ids=" ".join)
def test_a_server_that_cannot_start_says_why(alone: Topics, files: Path, words: list[str]) -> None:
    ran = alone("serve", *words)
    assert ran.code in (1, 2)
    assert [word for word in FOREIGN if word in ran.err] == []
    assert len(ran.err.splitlines()) == 1, ran.err


PRINTING = [
    ["ls"],
    ["ls", "--table"],
    ["read", "t-head"],
    ["info", "t-head"],
    ["queue"],
    ["completion", "bash"],
    ["doctor"],
    ["tail", "t-head", "-n", "5"],
    ["watch", "t-head"],
]


@pytest.mark.parametrize("words", PRINTING, ids=" ".join)
def test_a_reader_that_has_enough_ends_the_verb_as_a_success(
    topics: Topics, api: Api, words: list[str]
) -> None:
    """The test acts like `topics VERB | head -0`."""
    api.add("t-head", *["x" * 1000] * 200)
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        done = subprocess.run(
            [*COMMAND, *words],
            stdout=pipe,
            stderr=subprocess.PIPE,
            env=topics.environment(),
            cwd=topics.directory,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, b"")
