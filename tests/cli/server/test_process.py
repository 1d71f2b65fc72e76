"""`__main__`: the effects of a process before it parses its arguments, seen from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# A program that closes the named descriptors and then becomes the server.
CLOSED = """
import os, sys
for number in map(int, sys.argv[1].split(",")):
    os.close(number)
os.execv(sys.executable, [sys.executable, "-m", "topics_server", *sys.argv[2:]])
"""


def environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TOPICS_")}
    return kept | {
        "TOPICS_PORT": "0",
        "TOPICS_PORT_FILE": str(folder / "port"),
        "TOPICS_DATA_DIR": str(folder / "data"),
    }


def wait_for(path: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None, "the server ended before it listened"
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("closed", ["0", "1", "2", "0,1,2"])
def test_no_file_of_the_server_takes_the_place_of_a_closed_stream(
    tmp_path: Path, closed: str
) -> None:
    numbers = [int(number) for number in closed.split(",")]
    process = subprocess.Popen(
        [sys.executable, "-c", CLOSED, closed, "serve"], env=environment(tmp_path)
    )
    try:
        wait_for(tmp_path / "port", process)
        for number in numbers:
            assert os.readlink(f"/proc/{process.pid}/fd/{number}") == os.devnull
    finally:
        process.terminate()
        assert process.wait(60) == 0


def test_a_verb_with_a_closed_output_ends_as_documented(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CLOSED, "1,2", "config"]
    done = subprocess.run(command, env=environment(tmp_path), timeout=60, check=False)
    assert done.returncode == 0


def test_a_reload_during_the_start_does_not_end_the_server(tmp_path: Path) -> None:
    """The test sends SIGHUP repeatedly, from the moment the process ignores it until it listens."""
    process = subprocess.Popen(
        [sys.executable, "-m", "topics_server", "serve"], env=environment(tmp_path)
    )
    try:
        status = Path(f"/proc/{process.pid}/status")
        deadline = time.monotonic() + 60
        while not ignores_hangup(status.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        while not (tmp_path / "port").exists():
            process.send_signal(signal.SIGHUP)
            assert process.poll() is None, "SIGHUP ended the server"
            assert time.monotonic() < deadline
            time.sleep(0.005)
    finally:
        process.terminate()
        assert process.wait(60) == 0


def ignores_hangup(status: str) -> bool:
    (mask,) = [line.split()[1] for line in status.splitlines() if line.startswith("SigIgn:")]
    return bool(int(mask, 16) >> (signal.SIGHUP - 1) & 1)


# -- the output of a verb --------------------------------------------------------------------------

TOPICS = [sys.executable, "-m", "topics_server"]


@pytest.mark.parametrize("words", [["--help"], ["config", "--json"], ["ls", "--help"]])
def test_a_full_output_is_one_line_and_exit_code_1(tmp_path: Path, words: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*TOPICS, *words],
            stdout=full,
            stderr=subprocess.PIPE,
            env=environment(tmp_path),
            timeout=60,
            check=False,
        )
    assert done.stderr == b"cannot write the output: No space left on device\n"
    assert done.returncode == 1


@pytest.mark.parametrize("words", [["--help"], ["config", "--json"]])
def test_a_reader_that_ends_is_a_success(tmp_path: Path, words: list[str]) -> None:
    """The test acts like `topics config | head -0`: the reader exits before the first byte is
    written.
    """
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        done = subprocess.run(
            [*TOPICS, *words],
            stdout=pipe,
            stderr=subprocess.PIPE,
            env=environment(tmp_path),
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    "words",
    [
        ["ls", "--url", "http://[::1"],
        ["ls", "--url", "http://a..b"],
        ["ls", "--url", "http://localhost:99999"],
        ["ls", "--token", "hush\nhush"],
        ["append", "t", "1", "--token", "h\u00fcsh"],
        ["work", "t", "--token", "hush hush", "--", "true"],
        ["stream", "read", "http://a..b/v1/stream/x"],
        ["verify", "no such folder"],
        ["load", "t", "no such file"],
        ["doctor", "--url", "http://[::1"],
        ["health", "--url", "http://a..b"],
        ["watch", "t", "--url", "http://a..b"],
        ["tail", "t", "--url", "http://a..b"],
        ["pub", "t", "--url", "http://a..b"],
    ],
)
def test_wrong_arguments_are_reported_in_one_sentence(tmp_path: Path, words: list[str]) -> None:
    done = subprocess.run(
        [*TOPICS, *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=environment(tmp_path),
        timeout=60,
        check=False,
        text=True,
    )
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr
    assert "hush" not in done.stderr
    assert "h\u00fcsh" not in done.stderr
    told = [line for line in done.stderr.splitlines() if not line.startswith(("Usage", "Try"))]
    assert len([line for line in told if line]) == 1, done.stderr
