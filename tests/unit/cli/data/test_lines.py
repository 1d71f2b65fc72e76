"""`cli.data.lines`: whole lines in bounded batches, from plain and gzip files and standard
input.
"""

from __future__ import annotations

import gzip
import io
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topics_server.cli.connection import Failure
from topics_server.cli.data.lines import LineBatch, LineFile

TEXTS = st.lists(st.sampled_from([b"", b"a", b"bb", b" ", b"c\r", b"d" * 50]), max_size=30)


def batches(path: Path, max_records: int = 1000, max_bytes: int = 1_000_000) -> list[LineBatch]:
    """All batches of a file."""
    return list(LineFile(str(path)).batches(max_records, max_bytes))


def every_line(path: Path) -> list[bytes]:
    """All lines of a file."""
    return [line for batch in batches(path) for line in batch.lines]


@given(texts=TEXTS, ends=st.booleans(), records=st.integers(1, 7), size=st.integers(1, 60))
def test_batches_are_the_lines_that_are_not_blank(
    tmp_path_factory: pytest.TempPathFactory,
    texts: list[bytes],
    ends: bool,
    records: int,
    size: int,
) -> None:
    path = tmp_path_factory.mktemp("lines") / "file"
    path.write_bytes(b"\n".join(texts) + (b"\n" if ends else b""))
    found = batches(path, records, size)
    assert [line for batch in found for line in batch.lines] == [t for t in texts if t.strip()]
    first_line = 1
    for batch in found:
        assert batch.first_line == first_line
        assert 1 <= len(batch.lines) <= records
        assert len(batch.lines) == 1 or sum(map(len, batch.lines)) <= size
        first_line = batch.last_line + 1


def test_lines_may_be_longer_than_a_read(tmp_path: Path) -> None:
    path = tmp_path / "long"
    lines = [b"x" * 3_000_000, b"y", b"z" * 2_500_000]
    path.write_bytes(b"\n".join(lines))
    assert every_line(path) == lines


def test_gzip_is_known_by_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "without-a-suffix"
    path.write_bytes(gzip.compress(b"1\n2\n") + gzip.compress(b"3\n"))
    assert every_line(path) == [b"1", b"2", b"3"]
    assert batches(path)[-1].position == path.stat().st_size


def test_damaged_gzip_is_said(tmp_path: Path) -> None:
    path = tmp_path / "cut.gz"
    path.write_bytes(gzip.compress(b"12345\n" * 1000)[:-9])
    with pytest.raises(Failure, match="gzip data are damaged"):
        every_line(path)


def test_a_byte_order_mark_is_no_part_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "marked"
    path.write_bytes(b"\xef\xbb\xbf1\n2\n")
    assert every_line(path) == [b"1", b"2"]


@pytest.mark.parametrize("text", [b"", b"\n\n", b"1"])
def test_the_shortest_files(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "short"
    path.write_bytes(text)
    assert every_line(path) == text.split()


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(Failure, match="No such file"):
        LineFile(str(tmp_path / "missing"))


def test_standard_input_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    data = io.BytesIO(gzip.compress(b"1\n2\n"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(data))
    source = LineFile("-")
    assert not source.is_rewindable
    assert source.total_bytes is None
    assert [batch.lines for batch in source.batches(1, 10)] == [[b"1"], [b"2"]]


def test_a_file_can_be_read_again(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"1\n2\n")
    source = LineFile(str(path))
    assert source.is_rewindable
    assert list(source.batches(5, 5)) == list(source.batches(5, 5))
