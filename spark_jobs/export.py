"""`topics export`: records as Parquet, NDJSON or Arrow files by topic and day, a little more a run.

A folder belongs to one export: `export.json` names, for each topic, the next seq and every file
with its seqs, size and SHA-256. It is replaced atomically after each file; files that it does not
name (a run that was killed) are removed by the next run, which goes on where the manifest says. So
each record is in exactly one file, whenever a run ends.
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
from urllib.parse import quote

from spark_jobs.exporting import (
    FORMATS,
    RECREATED,
    Chunk,
    ExportError,
    Segments,
    Server,
    span_of,
    split_by_day,
    sync_folder,
    write_file,
)
from spark_jobs.options import names_of
from spark_jobs.query import ANY, BadOption, Names

MANIFEST: Final = "export.json"
ROWS_PER_FILE: Final = 500_000


@dataclass(slots=True)
class Export:
    """One run into one folder."""

    folder: Path
    kind: str
    rows_per_file: int = ROWS_PER_FILE
    advance: Callable[[int], None] = lambda _rows: None
    manifest: dict[str, Any] = field(default_factory=dict)
    rows: int = 0
    files: int = 0

    def open(self) -> None:
        """Read the manifest, and remove what it does not name."""
        path = self.folder / MANIFEST
        if path.exists():
            self.manifest = json.loads(path.read_text("utf-8"))
            if self.manifest.get("version") != 1 or self.manifest["format"] != self.kind:
                raise ExportError(
                    f"{path}: is an export as {self.manifest.get('format')} "
                    f"(version {self.manifest.get('version')}), not as {self.kind}"
                )
        else:
            if any(p.name != ".lock" for p in self.folder.iterdir()):
                raise ExportError(f"{self.folder}: is not empty, and no export is in it")
            self.manifest = {"version": 1, "format": self.kind, "topics": {}}
            self._publish()
        named = {each["path"] for t in self.manifest["topics"].values() for each in t["files"]}
        for found in self.folder.glob("topic=*/day=*/*"):
            if str(found.relative_to(self.folder)) not in named:
                found.unlink()

    def topic(self, name: str, epoch: int | None, source: Any) -> None:
        """Everything that a source has of a topic from its watermark on."""
        state = self.manifest["topics"].setdefault(
            name, {"epoch": epoch, "generation": 0, "next_seq": 1, "files": [], "lost": []}
        )
        if epoch is not None and state["epoch"] not in (None, epoch):
            if epoch < state["epoch"]:
                return  # segments of an incarnation that is gone
            self._begin_anew(name, state, epoch)
        elif epoch is not None:
            state["epoch"] = epoch
        pending: list[Chunk] = []
        day, count, next_seq = "", 0, state["next_seq"]
        for chunk, after, lost in source.chunks(name, state["next_seq"]):
            if lost == [RECREATED]:
                if pending:
                    self._write(name, state, day, pending, None)
                pending, count = [], 0
                self._begin_anew(name, state, None)
                next_seq = 1
                continue
            for each in lost:
                note(f"{name}: seqs {each} were gone before they were exported")
                state["lost"].append(each)
            for part_day, part in split_by_day(chunk) if len(chunk) else ():
                if pending and (part_day != day or count >= self.rows_per_file):
                    self._write(name, state, day, pending, None)
                    pending, count = [], 0
                day = part_day
                pending.append(part)
                count += len(part)
            next_seq = after
        if pending:
            self._write(name, state, day, pending, next_seq)
        elif next_seq != state["next_seq"]:
            state["next_seq"] = next_seq
            self._publish()

    def _begin_anew(self, name: str, state: dict[str, Any], epoch: int | None) -> None:
        """The topic is another one of its name; what was exported of the old one stays."""
        note(f"{name} was dropped and made again: its records are exported from the start")
        state.update(epoch=epoch, generation=state["generation"] + 1, next_seq=1)
        self._publish()

    def _write(
        self, name: str, state: dict[str, Any], day: str, chunks: list[Chunk], after: int | None
    ) -> None:
        first, last, rows = span_of(chunks)
        file_name = f"{state['generation']}-{first:020d}-{last:020d}.{FORMATS[self.kind]}"
        path = self.folder / f"topic={quote(name, safe='')}" / f"day={day}" / file_name
        digest = write_file(path, self.kind, name, state["epoch"], chunks)
        state["files"].append(
            {
                "path": str(path.relative_to(self.folder)),
                "rows": rows,
                "first_seq": first,
                "last_seq": last,
                "bytes": path.stat().st_size,
                "sha256": digest,
            }
        )
        state["next_seq"] = last + 1 if after is None else after
        self._publish()
        self.rows += rows
        self.files += 1
        self.advance(rows)

    def _publish(self) -> None:
        path = self.folder / MANIFEST
        temp = path.with_suffix(".tmp")
        with temp.open("w", encoding="utf-8") as file:
            json.dump(self.manifest, file, indent=1, sort_keys=True)
            file.flush()
            os.fsync(file.fileno())
        temp.rename(path)
        sync_folder(self.folder)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One export at a time into a folder; the kernel lets go when the process ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ExportError(f"{folder}: another export is at work in it") from None
        yield


@contextmanager
def progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar on standard error, if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _rows: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("records", total=total)
        yield lambda rows: bar.update(task, advance=rows)


def note(text: str) -> None:
    """A line for the person who waits."""
    sys.stderr.write(f"topics export: {text}\n")


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="topics export",
        description="Write records as files by topic and day; each run goes on where the last "
        "one stopped.",
    )
    parser.add_argument("topics", nargs="*", metavar="TOPIC", help="names, prefixes*, globs (all)")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="the export's folder")
    parser.add_argument("--format", choices=tuple(FORMATS), default="parquet", help="(parquet)")
    parser.add_argument("--data-dir", metavar="DIR", help="read sealed segments of this directory")
    parser.add_argument("--cold-dir", metavar="DIR", help="its TOPICS_COLD_DIR")
    parser.add_argument(
        "--sealed", action="store_true", help="only what is sealed; asks no server (--data-dir)"
    )
    parser.add_argument("--url", help="server to talk to [env: TOPICS_URL]")
    parser.add_argument("--token", help="key to present [env: TOPICS_TOKEN]")
    parser.add_argument("--rows-per-file", type=int, default=ROWS_PER_FILE, help="(500000)")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """The command line: 0 done, 1 refused, 2 wrong usage."""
    parser = arguments()
    given = parser.parse_args(words)
    if given.sealed and not given.data_dir:
        parser.error("--sealed reads segments: name their --data-dir")
    if given.rows_per_file < 1:
        parser.error("--rows-per-file is at least 1")
    try:
        names = (*names_of(",".join(given.topics)), ANY)[0]
        return _run(given, names)
    except ImportError as error:
        note(f"{error.name} is missing: pip install 'topics-server[spark]'")
        return 2
    except (ExportError, BadOption) as error:
        note(str(error))
        return 1


def _run(given: argparse.Namespace, names: Names) -> int:
    from topics_server.errors import StorageError

    sources: list[Any] = []
    try:
        if given.data_dir:
            sources.append(Segments(given.data_dir, given.cold_dir))
        if not given.sealed:
            url = given.url or os.environ.get("TOPICS_URL") or "http://127.0.0.1:4000"
            sources.append(
                Server(url, given.token or os.environ.get("TOPICS_TOKEN"), given.rows_per_file)
            )
        found = [source.topics(names) for source in sources]
        heads = {name: head for topics in found for name, (_, head) in topics.items()}
        with locked(given.to), progress(sum(heads.values())) as advance:
            export = Export(given.to, given.format, given.rows_per_file, advance)
            export.open()
            for source, topics in zip(sources, found, strict=True):
                for name, (epoch, _) in sorted(topics.items()):
                    export.topic(name, epoch, source)
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
