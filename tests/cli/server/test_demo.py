"""`topics demo` as a user runs it: once, until Ctrl-C, and where it cannot start."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import threading
from pathlib import Path
from xml.etree import ElementTree

import httpx
import pytest

from tests.cli.conftest import WEBHOOKS, Topics
from tests.contract.driver import eventually
from topics_server.cli.server import demo


def test_the_events_are_those_of_the_examples() -> None:
    events = demo.webhook_events()
    assert len(events) == 329
    assert len({event["event"] for event in events[:50]}) > 10
    data = Path(demo.__file__).parents[2] / "demo"
    assert WEBHOOKS.samefile(data / "github-webhooks.jsonl.gz")
    assert (data / "README.md").read_text() == (WEBHOOKS.parent / "README.md").read_text()


SVG = "{http://www.w3.org/2000/svg}"


def test_the_picture_has_a_bar_for_each_event() -> None:
    root = ElementTree.fromstring(demo.bar_chart([("a<b&c", 1_200), ("d", 300)]))
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts == ["a<b&c", "1,200", "d", "300"]
    widths = [int(rect.attrib["width"]) for rect in root.iter(f"{SVG}rect")]
    assert widths[1] == 4 * widths[2]
    assert ElementTree.fromstring(demo.bar_chart([])).tag == f"{SVG}svg"


@pytest.mark.slow
def test_once_goes_through_everything_and_leaves_a_sound_store(
    alone: Topics, tmp_path: Path
) -> None:
    folder = tmp_path / "kept"
    # Settings in the environment belong to another server, so the demo ignores them.
    alone.env = {"TOPICS_API_KEYS": "key", "TOPICS_MAX_TOPICS": "1", "TOPICS_HOST": "0.0.0.0"}
    ran = alone.good("demo", "--once", "--port", "0", "--data-dir", folder)
    last = re.findall(r"^webhooks 329; .*$", ran.out.decode(), re.MULTILINE)
    assert last == [
        "webhooks 329; triage 0 waiting, 0 in flight, 3 dead; "
        "most: issues 29, pull_request 29, discussion 15"
    ]
    alone.good("verify", folder / "data")
    bars = ElementTree.parse(folder / "events.svg").getroot()
    names = [str(text.text) for text in bars.iter(f"{SVG}text")][::2]
    assert sorted(names[:2]) == ["issues", "pull_request"]
    assert len(names) == demo.BARS
    url = re.findall(r"http://\S+(?=/console)", ran.out.decode())[0]
    with pytest.raises(httpx.ConnectError):
        httpx.get(url, trust_env=False)


@pytest.mark.slow
def test_ctrl_c_ends_the_demo_and_its_server_and_removes_the_folder(alone: Topics) -> None:
    words = ["demo", "--port", "0", "--rate", "100", "--no-open"]
    process = alone.spawn(*words, stderr=subprocess.PIPE)
    lines: list[str] = []
    assert process.stdout is not None
    reader = threading.Thread(
        target=lambda out=process.stdout: lines.extend(line.decode() for line in out)
    )
    reader.start()
    try:
        eventually(lambda: any(line.startswith("webhooks ") for line in lines), "a status", 60)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        reader.join()
        process.stdout.close()
        assert process.stderr is not None
        told = process.stderr.read()
        process.stderr.close()
    assert told == b""
    text = "".join(lines)
    folder = re.findall(r"^data +(\S+) \(removed at the end\)$", text, re.MULTILINE)[0]
    assert not Path(folder).exists()
    with pytest.raises(httpx.ConnectError):
        httpx.get(re.findall(r"http://\S+/console", text)[0], trust_env=False)


def test_a_server_that_cannot_start_is_told_with_its_reason(alone: Topics, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ran = alone("demo", "--once", "--port", str(port), "--data-dir", tmp_path / "kept")
    assert ran.code == 1
    assert "the server did not start" in ran.err
    assert f"port {port}" in ran.err
