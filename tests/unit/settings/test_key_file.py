"""`key_file`: who may read the file, and which files are refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from topics_server.settings.key_file import configured_keys
from topics_server.values.texts.key_list import KeysError, parse_keys

OWN = parse_keys("own")


def written(folder: Path, content: bytes, mode: int = 0o600) -> Path:
    path = folder / "keys"
    path.write_bytes(content)
    path.chmod(mode)
    return path


def refusal(path: Path, credentials: str | None = None) -> str:
    with pytest.raises(KeysError) as caught:
        configured_keys(OWN, path, credentials)
    line = str(caught.value)
    assert line.startswith(f"TOPICS_API_KEYS_FILE={path}: ")
    assert "\n" not in line
    assert "hush" not in line
    return line.removeprefix(f"TOPICS_API_KEYS_FILE={path}: ")


def test_without_a_file_there_are_those_of_the_environment() -> None:
    assert configured_keys(OWN, None, None) == OWN


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_file_adds_its_keys(tmp_path: Path, mode: int) -> None:
    path = written(tmp_path, b"# mine\nhush:r\n", mode)
    assert configured_keys(OWN, path, None) == (*OWN, *parse_keys("hush:r"))


@pytest.mark.parametrize("mode", [0o640, 0o620, 0o610, 0o604, 0o602, 0o644, 0o444])
def test_a_file_of_others_too_is_refused(tmp_path: Path, mode: int) -> None:
    assert refusal(written(tmp_path, b"hush\n", mode)) == "others may read it: chmod 600"


def test_what_systemd_hands_over_may_be_its_group_s(tmp_path: Path) -> None:
    path = written(tmp_path, b"hush\n", 0o440)
    assert len(configured_keys(OWN, path, str(tmp_path))) == 2
    assert refusal(path, str(tmp_path / "elsewhere")) == "others may read it: chmod 600"
    path.chmod(0o444)
    assert refusal(path, str(tmp_path)) == "others may read it: chmod 600"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "there is no key"),
        (b"hush:x\n", "line 1 has an unknown scope"),
        (b"h\xc3\xbcsh\n", "it contains characters that are not ASCII"),
        (b"own\n", "it has a key of TOPICS_API_KEYS again"),
        (b"#" * 1_048_577, "it is larger than 1048576 bytes"),
    ],
)
def test_a_malformed_list_of_keys_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    assert refusal(written(tmp_path, content)).startswith(words)


def test_a_path_that_is_no_file_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "absent") == "No such file or directory"
    assert refusal(tmp_path)


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    """No process writes into the pipe, so opening it as a plain file would never return."""
    path = tmp_path / "keys"
    os.mkfifo(path, 0o600)
    assert refusal(path) == "it is not a file"
