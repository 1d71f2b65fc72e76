"""The files of an export, written atomically and durably, and the manifest that names them.

`_export.json` describes the export at the end of its last run. During a run, each step appends a
line to `_export.log` and syncs it. If a killed run left a log, the next run merges it into the
manifest. So a step costs one line, even in a large export. Called by `export`.

A line is `{"topic", ...}` and the changes: `begin` (another incarnation), `file`, `next_seq`,
`lost`, `held`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any, Final
from urllib.parse import quote

from spark_jobs.exporter.records import Rows, line_of, rows_of, table_of
from spark_jobs.exporter.sources import ExportError
from spark_jobs.running.outputs import cut_names, publish_json, sync_folder

MANIFEST: Final = "_export.json"
# The manifest's name in version 1; readers of Parquet took that file for a data file.
OLD_MANIFEST: Final = "export.json"
LOG: Final = "_export.log"
VERSION: Final = 2
FORMATS: Final = {"parquet": "parquet", "ndjson": "ndjson", "arrow": "arrow"}
FILE_NAME: Final = re.compile(r"\d+-\d{20}-\d{20}\.(parquet|ndjson|arrow)(\.tmp)?")
_GROUP_ROWS: Final = 131_072

State = dict[str, Any]


def folder_of(topic: str) -> str:
    """The folder of a topic: its name; a name that is too long is cut and gets a checksum."""
    return f"topic={quote(cut_names([topic]).get(topic, topic), safe='~')}"


# -- the manifest -------------------------------------------------------------------------------


class ExportLedger:
    """The manifest of an export's folder, in memory and on disk."""

    def __init__(self, folder: Path, kind: str, store: str | None = None) -> None:
        """Read the manifest, merge a log that was left, or begin. Raises `ExportError`.

        `store`: the id of the exported store, if known. Another store has its own seqs and epochs,
        so the export of one store cannot continue with another.
        """
        self._folder = folder
        self._store = store
        self.topics: dict[str, State] = {}
        self._log: IO[str] | None = None
        found = self._read(MANIFEST) or self._read(OLD_MANIFEST)
        if found is None:
            # A run that was killed before its first manifest leaves these.
            left = {".lock", f"{MANIFEST}.tmp"}
            if any(path.name not in left for path in folder.iterdir()):
                raise ExportError(f"{folder}: is not empty, and no export is in it")
        elif found.get("version") not in (1, VERSION) or found["format"] != kind:
            raise ExportError(
                f"{folder}: is an export as {found.get('format')} "
                f"(version {found.get('version')}), not as {kind}"
            )
        else:
            self.topics = found["topics"]
            known = found.get("store")
            if None not in (store, known) and store != known:
                raise ExportError(f"{folder}: is an export of store {known}, not of {store}")
            self._store = store or known
        self._kind = kind
        for state in self.topics.values():
            state.setdefault("held", [])
        self._fold()
        self.publish()
        (folder / OLD_MANIFEST).unlink(missing_ok=True)

    def _read(self, name: str) -> dict[str, Any] | None:
        path = self._folder / name
        try:
            found = json.loads(path.read_text("utf-8"))
        except FileNotFoundError:
            return None
        except ValueError:
            raise ExportError(f"{path}: is not the manifest of an export") from None
        return found if isinstance(found, dict) else {}

    def _fold(self) -> None:
        """Apply the steps of a run that did not end; an incomplete last line is ignored."""
        try:
            text = (self._folder / LOG).read_text("utf-8")
        except FileNotFoundError:
            return
        for line in text.split("\n")[:-1]:
            step = json.loads(line)
            self._apply(step.pop("topic"), step)

    def state(self, topic: str) -> State:
        """The state of a topic."""
        return self.topics.setdefault(
            topic,
            {
                "epoch": None,
                "generation": 0,
                "next_seq": 1,
                "files": [],
                "lost": [],
                "held": [],
            },
        )

    def step(self, topic: str, **changes: Any) -> None:
        """Change a topic's state, durably."""
        if self._log is None:
            self._log = (self._folder / LOG).open("w", encoding="utf-8")
            sync_folder(self._folder)
        self._log.write(json.dumps({"topic": topic, **changes}) + "\n")
        self._log.flush()
        os.fsync(self._log.fileno())
        self._apply(topic, changes)

    def _apply(self, topic: str, changes: dict[str, Any]) -> None:
        state = self.state(topic)
        if "begin" in changes:  # exported files of the previous incarnation stay
            state.update(epoch=changes["begin"], next_seq=1, held=[])
            state["generation"] += 1
        if "epoch" in changes:
            state["epoch"] = changes["epoch"]
        if "file" in changes:
            state["files"].append(changes["file"])
        if "next_seq" in changes:
            state["next_seq"] = changes["next_seq"]
        if "held" in changes:
            state["held"] = changes["held"]
        state["lost"] += changes.get("lost", [])

    def publish(self) -> None:
        """Write the complete manifest; the log is then no longer needed."""
        if self._log is not None:
            self._log.close()
            self._log = None
        content = {
            "version": VERSION,
            "format": self._kind,
            "store": self._store,
            "topics": self.topics,
        }
        publish_json(self._folder / MANIFEST, content)
        (self._folder / LOG).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove files of killed runs that the manifest does not name; remove nothing else."""
        named = {each["path"] for state in self.topics.values() for each in state["files"]}
        for found in self._folder.glob("topic=*/day=*/*"):
            is_ours = FILE_NAME.fullmatch(found.name) is not None
            if is_ours and str(found.relative_to(self._folder)) not in named:
                found.unlink()


# -- files -------------------------------------------------------------------------------------


def write_file(path: Path, kind: str, topic: str, epoch: int | None, parts: list[Rows]) -> str:
    """Write a temporary file, sync it and rename it; return its SHA-256."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = path.with_name(path.name + ".tmp")
    try:
        return _write_file(path, temp, kind, topic, epoch, parts)
    except BaseException:
        temp.unlink(missing_ok=True)
        remove_empty(path.parent)
        remove_empty(path.parent.parent)
        raise


def remove_empty(folder: Path) -> None:
    """Remove an empty folder."""
    try:
        folder.rmdir()
    except OSError:
        pass  # it is not empty, or does not exist


def _write_file(
    path: Path, temp: Path, kind: str, topic: str, epoch: int | None, parts: list[Rows]
) -> str:
    if kind == "ndjson":
        with temp.open("wb") as file:
            for part in parts:
                file.writelines(map(line_of, rows_of(part)))
    else:
        _write_tables(
            temp, kind, parts, lambda part: table_of(part, topic, epoch, folded=kind == "parquet")
        )
    with temp.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
    temp.rename(path)
    sync_folder(path.parent)
    return digest


def _write_tables(
    path: Path, kind: str, parts: Iterable[Rows], made: Callable[[Rows], Any]
) -> None:
    """Write one part after the other, so that the parts are not all in memory twice."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    writer: Any = None
    with pa.OSFile(str(path), "wb") as sink:
        for part in _gathered(parts, made):
            if writer is None and kind == "parquet":
                writer = pq.ParquetWriter(sink, part.schema, compression="zstd")
            elif writer is None:
                writer = pa.ipc.new_file(sink, part.schema)
            writer.write_table(part)
        writer.close()


def _gathered(parts: Iterable[Rows], made: Callable[[Rows], Any]) -> Iterable[Any]:
    """Yield tables of about `_GROUP_ROWS` rows: many small row groups compress badly."""
    import pyarrow as pa

    held: list[Any] = []
    rows = 0
    for part in parts:
        held.append(made(part))
        rows += len(part)
        if rows >= _GROUP_ROWS:
            yield pa.concat_tables(held)
            held, rows = [], 0
    if held:
        yield pa.concat_tables(held)
