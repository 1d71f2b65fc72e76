"""A source that reads the lines of files, one file after the other.

The position is the number of a line over all files; blank lines are not counted. `check` is part of
a hash of all lines up to the position. A second run is refused if a file differs before the
position, and continues a file that has grown since. The first line names the source, so that a file
may be moved and renamed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Final

import msgspec
import xxhash

from topics_server.cli.connection import Failure
from topics_server.cli.data.cutting import BadLine
from topics_server.cli.data.lines import LineBatch, LineFile
from topics_server.cli.importing.appending import CHECK_MASK, ImportBatch, SourcePlace
from topics_server.cli.importing.stamping import GapLine, LineStamper, Stamped
from topics_server.cli.retries import Tell
from topics_server.values.limits import MIB

BATCH_BYTES: Final = MIB
# The most bad lines and gaps that are reported one by one; the others are counted.
SHOWN_MAX: Final = 20
_REASON_MAX: Final = 40


class Tally(msgspec.Struct):
    """Counts of the gaps and bad lines that a source has found."""

    gaps: int = 0
    bad_lines: int = 0


class _Part(msgspec.Struct, frozen=True):
    """A batch of one of the files.

    `lines` counts the lines of all files; `before` of them are in earlier files. `done`: input
    bytes.
    """

    path: str
    before: int
    lines: LineBatch
    done: int

    def failure(self, error: BadLine, rest: str) -> str:
        """The message about a line, with its number in its file."""
        return f"{self.path}: line {error.line - self.before}: {error.reason}{rest}"


class FileSource:
    """A source of the lines of several files that belong together."""

    def __init__(
        self,
        paths: Sequence[str],
        stamper: LineStamper,
        *,
        name: str | None,
        batch_records: int,
        skip_bad: bool,
        tell: Tell,
    ) -> None:
        assert paths, "a source has files"
        self.tally = Tally()
        self._files = [LineFile(path) for path in paths]
        self._stamper = stamper
        self._batch_records = batch_records
        self._skip_bad = skip_bad
        self._tell = tell
        sizes = [file.total_bytes for file in self._files]
        self.total_bytes = None if None in sizes else sum(size or 0 for size in sizes)
        # Standard input can be read only once, and its first line names the source, so read a batch
        # now.
        self._lines: Iterator[_Part] = self._batches()
        first = next(self._lines, None)
        self.is_empty = first is None
        if first is not None:
            self._lines = chain([first], self._lines)
            name = name or f"file:{xxhash.xxh3_64_hexdigest(first.lines.lines[0])}"
        self.name = name or "file:empty"

    def check(self) -> None:
        """Read all lines before the first is sent, if they can be read twice; raises `Failure`."""
        if self._skip_bad or not all(file.is_rewindable for file in self._files):
            return
        for part in self._batches():
            batch = part.lines
            for found in self._stamper.stamped(batch.lines, batch.first_line, self.name):
                if isinstance(found, BadLine):
                    raise Failure(
                        part.failure(found, ". Nothing was imported; --skip-bad leaves it out")
                    )

    def batches(self, place: SourcePlace | None) -> Iterator[tuple[ImportBatch | None, int]]:
        """Yield the batches behind `place`, each with the input bytes read so far.

        Yields None for lines that are imported already. Raises `Failure` at a bad line, and if the
        lines up to `place` are not the imported ones.
        """
        after = 0 if place is None else place.position
        seen = xxhash.xxh3_64()
        line = 0
        for part in self._lines:
            batch, done = part.lines, part.done
            passed = min(len(batch.lines), max(0, after - batch.first_line + 1))
            if passed:
                _feed(seen, batch.lines[:passed])
                line = batch.first_line + passed - 1
                if line == after and place is not None:
                    self._compare(place, seen.intdigest() & CHECK_MASK, part)
            lines = batch.lines[passed:]
            if not lines:
                yield None, done
                continue
            first_line = batch.first_line + passed
            _feed(seen, lines)
            line = batch.last_line
            records = self._records(lines, first_line, part)
            if not records:
                yield None, done
                continue
            check = seen.intdigest() & CHECK_MASK
            what = f"lines {first_line} to {line}" if line > first_line else f"line {line}"
            yield ImportBatch(records, line, check, what), done
        if line < after:
            raise Failure(
                f"{after} lines of this file were imported, and it has {line} now: it is another "
                "file. Give it a name of its own with --as"
            )

    def _compare(self, place: SourcePlace, check: int, part: _Part) -> None:
        if place.check is not None and place.check != check:
            raise Failure(
                f"{part.path}: the first {place.position} lines are not those that were imported: "
                "it is another file. Give it a name of its own with --as"
            )

    def _records(self, lines: Sequence[bytes], first_line: int, part: _Part) -> list[bytes]:
        records: list[bytes] = []
        for found in self._stamper.stamped(lines, first_line, self.name):
            match found:
                case Stamped(text=text):
                    records.append(text)
                case GapLine(first=first, last=last, reason=reason):
                    self.tally.gaps += 1
                    self._tell_gap(first, last, reason)
                case BadLine():
                    self._bad(found, part, first_line)
        return records

    def _tell_gap(self, first: int, last: int, reason: str) -> None:
        """Report the first gaps one by one.

        The reason comes from the file, so make it safe for a terminal.
        """
        if self.tally.gaps <= SHOWN_MAX:
            shown = "".join(char if char.isprintable() else "?" for char in reason[:_REASON_MAX])
            self._tell(f"gap: records {first} to {last} were gone there ({shown})")
        elif self.tally.gaps == SHOWN_MAX + 1:
            self._tell("further gaps are counted")

    def _bad(self, error: BadLine, part: _Part, first_line: int) -> None:
        if not self._skip_bad:
            kept = f". The {first_line - 1} lines before line {first_line} are imported, no other"
            raise Failure(part.failure(error, kept + "; --skip-bad leaves it out"))
        self.tally.bad_lines += 1
        if self.tally.bad_lines <= SHOWN_MAX:
            self._tell(part.failure(error, ": left out"))
        elif self.tally.bad_lines == SHOWN_MAX + 1:
            self._tell("further bad lines are left out and counted")

    def _batches(self) -> Iterator[_Part]:
        """Batches of all files. Counts of lines and input bytes continue over the files."""
        before = done = 0
        for file in self._files:
            last = 0
            for batch in file.batches(self._batch_records, BATCH_BYTES):
                last = batch.last_line
                moved = LineBatch(batch.first_line + before, batch.lines, batch.position)
                yield _Part(file.path, before, moved, done + batch.position)
            before += last
            done += file.total_bytes or 0


def _feed(seen: xxhash.xxh3_64, lines: Sequence[bytes]) -> None:
    seen.update(b"\n".join(lines))
    seen.update(b"\n")
