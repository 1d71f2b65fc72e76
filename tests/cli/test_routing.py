"""Routers as a user runs them: verbs, pictures, and the example, against a real server."""

from __future__ import annotations

import os
import pty
import subprocess
from pathlib import Path

from tests.cli.conftest import COMMAND, Topics
from tests.contract.driver import ROOT, Api, eventually
from tests.contract.routers.routing import Routing


def test_a_router_is_put_shown_listed_and_removed(topics: Topics, topic: str, api: Api) -> None:
    name, dest = f"{topic}->b", f"{topic}.b"
    words = ("router", "put", name, "--source", topic, "--dest", dest)
    made = topics.good(*words, "--filter-prefix", "a:", "--exactly-once").value
    assert (made["created"], made["filter"]) == (True, ["tag", "Glob", "a:*"])
    topics.good("append", topic, "1", "--tag", "a:1")
    topics.good("append", topic, "2")
    Routing(api).settled(name)
    assert [record["data"] for record in topics.good("read", dest).lines] == [1]
    state = topics.good("router", "get", name).value
    assert (state["forwarded_total"], state["lag"], state["state"]) == (1, 0, "running")
    (row,) = topics.good("router", "ls", "--source", topic).lines
    assert (row["router"], row["guarantee"]) == (name, "exactly_once")
    assert topics.good("routers", "--dest", dest).lines == [row]
    topics.env = {"COLUMNS": "300"}
    assert name in topics.good("router", "ls", "--table").out.decode()
    again = topics.good(*words).value
    assert (again["created"], again["filter"]) == (False, None)
    assert topics.good("router", "rm", name, "--yes").value["deleted"] is True
    for more in (("get", name), ("rm", name, "--yes")):
        ran = topics("router", *more)
        assert (ran.code, ran.message.partition(":")[0]) == (1, "router_not_found")
    assert topics.good("routers", "--source", topic).out == b""


def test_a_refusal_of_the_server_is_exit_code_1(topics: Topics, topic: str) -> None:
    ends = ("--source", topic, "--dest", f"{topic}.b")
    ran = topics("router", "put", f"{topic}.r", *ends, "--no-create-dest")
    assert (ran.code, ran.message.partition(":")[0]) == (1, "topic_not_found")
    topics.good("router", "put", f"{topic}.r", *ends)
    back = ("--source", f"{topic}.b", "--dest", topic)
    ran = topics("router", "put", f"{topic}.s", *back)
    assert (ran.code, ran.message.partition(":")[0]) == (1, "router_cycle")
    topics.good("router", "put", f"{topic}.s", *back, "--allow-cycle")
    ran = topics("router", "put", "a b", *ends)
    assert (ran.code, ran.message.partition(":")[0]) == (1, "invalid_request")


def test_pictures_of_what_flows_where(topics: Topics, topic: str) -> None:
    for source, dest in (("", ".b"), ("", ".c"), (".b", ".d")):
        ends = ("--source", topic + source, "--dest", topic + dest)
        topics.good("router", "put", f"{topic}{source}->{topic}{dest}", *ends)
    asked = ("routers", "--prefix", topic, "--graph")
    assert topics.good(*asked, "tree").out.decode().splitlines() == [
        topic,
        f"├── {topic}.b",
        f"│   └── {topic}.d",
        f"└── {topic}.c",
    ]
    drawn = topics.good(*asked).out.decode()
    assert drawn.startswith("digraph")
    assert f'"{topic}.b" -> "{topic}.d";' in drawn
    ours, theirs = pty.openpty()
    verb = topics.spawn(*asked, stdout=theirs, stdin=theirs)
    os.close(theirs)
    seen = bytearray()
    try:
        while block := os.read(ours, 65536):
            seen.extend(block)
    except OSError:
        pass  # a terminal whose other end is closed
    finally:
        os.close(ours)
    assert verb.wait(20) == 0
    assert f"└── {topic}.c" in seen.decode()


def test_the_example_of_a_split_topic(topics: Topics, api: Api, tmp_path: Path) -> None:
    command = tmp_path / "topics"
    command.write_text("#!/bin/sh\nexec " + " ".join(f"'{word}'" for word in COMMAND) + ' "$@"\n')
    command.chmod(0o755)
    script = ROOT / "examples" / "routing" / "split.sh"
    topics.env = {"TOPICS": str(command), "HOOKS": "split", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [script], capture_output=True, env=topics.environment(), timeout=120, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr).decode()
    assert b"7 pushes, 18 checks, 41 jobs, 329 in all" in done.stdout
    assert b"41 jobs done" in done.stdout
    assert "├── split.audit" in done.stdout.decode()
    assert Routing(api).names(prefix="split") == []
    eventually(lambda: api.topics(prefix="split").json()["topics"] == [], "nothing is left")
