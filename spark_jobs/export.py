"""`topics export`: writes records incrementally as Parquet, NDJSON or Arrow files by topic and day.

A folder belongs to one export: `_export.json` names, for each topic, the next seq and every file
with its seqs, size and SHA-256 (`exporting.ExportLedger`). The next run removes the files of a
killed run, which the manifest does not name, and continues at the stored seqs. So each record is in
exactly one file, even if a run is killed. Each incarnation of a topic is exported from its first
record on; files of the previous incarnation stay.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from spark_jobs.exporter.exporting import (
    FORMATS,
    MANIFEST,
    ExportLedger,
    State,
    folder_of,
    remove_empty,
    write_file,
)
from spark_jobs.exporter.records import Rows, schema_json, size_of, span_of, split_by_day
from spark_jobs.exporter.sources import ExportError, SegmentSource, Server, TopicGone
from spark_jobs.reader.options import names_of
from spark_jobs.reader.query import ANY, BadOption, Names
from spark_jobs.running.installing import how, missing
from spark_jobs.running.outputs import (
    NAMES,
    SCHEMA,
    OutputRefused,
    cut_names,
    publish_json,
    resolve,
    store_id_of,
)

ROWS_PER_FILE: Final = 500_000
# A file ends at so many bytes of rows in memory, even if it has few rows.
BYTES_PER_FILE: Final = 128 * 2**20


class _Files:
    """Collects rows of one topic into files: at least one for each day, limited by rows and by
    bytes.

    `changes` maps a file's last seq to the further state changes of its step.
    """

    def __init__(self, export: Export, name: str, changes: Callable[[int], dict[str, Any]]) -> None:
        self._export = export
        self._name = name
        self._changes = changes
        self._day = ""
        self._parts: list[Rows] = []
        self._rows = self._bytes = 0

    @property
    def is_empty(self) -> bool:
        """Whether no row waits for a file."""
        return not self._parts

    def take(self, rows: Rows) -> None:
        """Add rows, which follow the earlier ones."""
        export = self._export
        for day, part in split_by_day(rows) if len(rows) else ():
            is_full = self._rows >= export.rows_per_file or self._bytes >= export.bytes_per_file
            if self._parts and (day != self._day or is_full):
                self.write()
            self._day = day
            self._parts.append(part)
            self._rows += len(part)
            self._bytes += size_of(part)

    def write(self, **changes: Any) -> None:
        """Write the waiting rows; `changes` replaces the state changes of the file's step."""
        export, name = self._export, self._name
        if not self._parts:
            return
        state = export.ledger.state(name)
        first, last, rows = span_of(self._parts)
        file_name = f"{state['generation']}-{first:020d}-{last:020d}.{FORMATS[export.kind]}"
        path = export.folder / folder_of(name) / f"day={self._day}" / file_name
        digest = write_file(path, export.kind, name, state["epoch"], self._parts)
        self._parts, self._rows, self._bytes = [], 0, 0
        file = {
            "path": str(path.relative_to(export.folder)),
            "epoch": state["epoch"],
            "rows": rows,
            "first_seq": first,
            "last_seq": last,
            "bytes": path.stat().st_size,
            "sha256": digest,
        }
        export.ledger.step(name, file=file, **(changes or self._changes(last)))
        export.rows += rows
        export.files += 1
        export.advance(rows)


@dataclass(slots=True)
class Export:
    """One run of an export into one locked folder."""

    folder: Path
    kind: str
    rows_per_file: int = ROWS_PER_FILE
    bytes_per_file: int = BYTES_PER_FILE
    store: str | None = None
    advance: Callable[[int], None] = lambda _rows: None
    rows: int = 0
    files: int = 0
    ledger: ExportLedger = field(init=False)

    def open(self) -> None:
        """Read the manifest and remove files that it does not name."""
        self.ledger = ExportLedger(self.folder, self.kind, self.store)
        self.ledger.sweep()
        if self.kind == "parquet":
            publish_json(self.folder / SCHEMA, schema_json())

    def close(self) -> None:
        """Write the complete manifest, and the full names of topics whose folder names are cut."""
        cut = {value: name for name, value in cut_names(self.ledger.topics).items()}
        if cut:
            publish_json(self.folder / NAMES, cut)
        self.ledger.publish()

    def topic(self, name: str, epoch: int | None, source: Any) -> None:
        """Export all records of a topic that the source has and that are not exported yet."""
        state = self.ledger.state(name)
        if not self._is_current(name, state, epoch):
            return
        try:
            for first, last in list(state["held"]):
                self._judge(name, source, first, last)
            self._read(name, source)
        except TopicGone as error:
            note(str(error))

    def _is_current(self, name: str, state: State, epoch: int | None) -> bool:
        """Whether to export a source's incarnation: the exported one, or a newer one, whose export
        begins here.
        """
        known, is_new = state["epoch"], not state["files"] and state["next_seq"] == 1
        if epoch is None or known == epoch:
            return True
        if known is not None and epoch < known:
            return False  # segments of an incarnation that is gone
        if known is None and (is_new or epoch == 1):
            self.ledger.step(name, epoch=epoch)
        else:
            # An older version did not store the incarnation: exporting records twice is better than
            # not at all.
            self._begin_anew(name, epoch)
        return True

    def _judge(self, name: str, source: Any, first: int, last: int) -> None:
        """Check held-back seqs again: export them, hold them longer, or count them as lost."""
        state = self.ledger.state(name)
        others = [each for each in state["held"] if tuple(each) != (first, last)]
        again: list[list[int]] = []

        def left(after: int) -> dict[str, Any]:
            rest = [[after + 1, last]] if after < last else []
            return {"held": _joined([*others, *again, *rest])}

        files = _Files(self, name, left)
        for chunk in source.chunks(name, state["epoch"], first, last):
            if chunk.held is not None:
                again.append(list(chunk.held))
            self._tell(name, chunk.lost)
            files.take(chunk.rows)
        files.write(**left(last))
        self.ledger.step(name, **left(last))

    def _read(self, name: str, source: Any) -> None:
        """Export everything from the next seq on."""
        state = self.ledger.state(name)
        reached = state["next_seq"]
        files = _Files(self, name, lambda last: {"next_seq": last + 1})
        for chunk in source.chunks(name, state["epoch"], reached):
            if chunk.anew is not None:
                files.write()
                self._begin_anew(name, chunk.anew or None)
            self._tell(name, chunk.lost)
            if chunk.held is not None:
                assert files.is_empty, "times never go back: what expires comes first"
                held = _joined([*state["held"], list(chunk.held)])
                self.ledger.step(name, held=held, next_seq=chunk.held[1] + 1)
            files.take(chunk.rows)
            reached = chunk.next_seq
        files.write(next_seq=reached)
        if reached > state["next_seq"]:
            self.ledger.step(name, next_seq=reached)

    def _tell(self, name: str, lost: Sequence[str]) -> None:
        """Print once which seqs were lost before they were exported."""
        known = self.ledger.state(name)["lost"]
        new = [each for each in lost if each not in known]
        for each in new:
            note(f"{name}: seqs {each} were gone before they were exported")
        if new:
            self.ledger.step(name, lost=new)

    def _begin_anew(self, name: str, epoch: int | None) -> None:
        """Start with the new incarnation of the topic; exported files of the old one stay."""
        note(f"{name} was dropped and made again: its records are exported from the start")
        self.ledger.step(name, begin=epoch)


def _joined(ranges: list[list[int]]) -> list[list[int]]:
    """Sort the ranges and join neighbours."""
    joined: list[list[int]] = []
    for first, last in sorted(ranges):
        if joined and first <= joined[-1][1] + 1:
            joined[-1][1] = max(joined[-1][1], last)
        else:
            joined.append([first, last])
    return joined


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Allow one export at a time into a folder; the kernel releases the lock when the process
    ends.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ExportError(f"{folder}: another export is at work in it") from None
        yield


@contextmanager
def progress(total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on standard error, if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _rows: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("records", total=total)
        yield lambda rows: bar.update(task, advance=rows)


def note(text: str) -> None:
    """Print a line for the user."""
    sys.stderr.write(f"topics export: {text}\n")


def arguments() -> argparse.ArgumentParser:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="topics export",
        description="Write records as files by topic and day; each run goes on where the last "
        "one stopped.",
    )
    parser.add_argument(
        "topics", nargs="*", metavar="TOPIC", help="topics: names, prefixes*, globs (all)"
    )
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="the export's folder")
    parser.add_argument(
        "--format", choices=tuple(FORMATS), default="parquet", help="file format (parquet)"
    )
    parser.add_argument("--data-dir", metavar="DIR", help="read sealed segments of this directory")
    parser.add_argument("--cold-dir", metavar="DIR", help="the server's cold folder")
    parser.add_argument(
        "--sealed", action="store_true", help="only sealed records; needs --data-dir and no server"
    )
    parser.add_argument("--url", help="server to read from [env: TOPICS_URL]")
    parser.add_argument("--token", help="key to send [env: TOPICS_TOKEN]")
    parser.add_argument(
        "--rows-per-file", type=int, default=ROWS_PER_FILE, help="most rows of a file (500000)"
    )
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line: exit code 0 done, 1 refused, 2 wrong usage."""
    parser = arguments()
    given = parser.parse_args(words)
    if given.sealed and not given.data_dir:
        parser.error("--sealed reads segments: name their --data-dir")
    if given.rows_per_file < 1:
        parser.error("--rows-per-file is at least 1")
    if (given.format in ("parquet", "arrow") or given.data_dir) and missing("parquet"):
        what = f"--format {given.format} needs" if given.format != "ndjson" else "--data-dir needs"
        note(how(what, "parquet"))
        return 2
    try:
        names = (*names_of(",".join(given.topics)), ANY)[0]
        return _run(given, names)
    except (ExportError, BadOption, OutputRefused) as error:
        note(str(error))
        return 1


@contextmanager
def _removed_if_empty(folder: Path) -> Iterator[None]:
    """If a run fails before its first file, remove the folder that it made."""
    was_there = folder.exists()
    try:
        yield
    except BaseException:
        if not was_there and not any(folder.glob("topic=*/day=*/*")):
            for name in (".lock", MANIFEST, SCHEMA):
                (folder / name).unlink(missing_ok=True)
            remove_empty(folder)
        raise


def _run(given: argparse.Namespace, names: Names) -> int:
    from topics_server.values.errors import StorageError

    sources: list[Any] = []
    try:
        if given.data_dir:
            sources.append(SegmentSource(given.data_dir, given.cold_dir, names))
        if not given.sealed:
            url = given.url or os.environ.get("TOPICS_URL") or "http://127.0.0.1:4000"
            sources.append(
                Server(url, given.token or os.environ.get("TOPICS_TOKEN"), given.rows_per_file)
            )
        found = [source.topics(names) for source in sources]
        heads = {name: head for topics in found for name, (_, head) in topics.items()}
        folder = resolve(given.to, (given.data_dir, given.cold_dir))
        with (
            _removed_if_empty(folder),
            locked(folder),
            progress(sum(heads.values())) as advance,
        ):
            export = Export(folder, given.format, given.rows_per_file, advance=advance)
            export.store = store_id_of(given.data_dir) if given.data_dir else None
            export.open()
            try:
                for source, topics in zip(sources, found, strict=True):
                    for name, (epoch, _) in sorted(topics.items()):
                        export.topic(name, epoch, source)
            finally:
                export.close()
    except StorageError as error:
        raise ExportError(str(error)) from None
    finally:
        if sources and isinstance(sources[-1], Server):
            sources[-1].close()
    sys.stdout.write(
        json.dumps({"topics": len(heads), "files": export.files, "records": export.rows}) + "\n"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
