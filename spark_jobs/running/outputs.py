"""Folders that jobs write to: which folders are allowed, and how a result replaces the last one.

A folder is refused if it is, contains or lies inside a data directory or a cold folder. Folders are
compared by device and inode. So links, `..`, bind mounts, trailing slashes, and names in another
case on a file system that ignores case, all give the same result. A job writes to a folder that is
not empty only if it has the marker file of the same job. A job removes only files that it wrote.
Called by `job`, `export` and the pipeline; driver only.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import xxhash

from spark_jobs.reader.places.opening import ARCHIVE, is_archive
from topics_server.wal import layout

MARKER: Final = "_topics_output.json"
# The schema of a folder of partitions, in Spark's JSON. With it, readers do not turn a topic called
# `007` into a number.
SCHEMA: Final = "_schema.json"
NAMES: Final = "_names.json"
VERSION: Final = 1
_MARK_BYTES: Final = 1_000_000
_STORE_ID: Final = re.compile(rb'"store_id"\s*:\s*"([0-9a-f]{32})"')
FOLDER_BYTES_MAX: Final = 255
_KEPT_CHARS: Final = 70  # a character may take three bytes
# A result is written under this name before it replaces the last result; readers skip such names.
_NEXT: Final = "_next"
_WRITTEN: Final = re.compile(r"(part-.*|_SUCCESS|\..*\.crc|_temporary|_next|_topics_output\.json)")
# Spark's name for the folder of an unfinished partition-wise overwrite.
_STAGING: Final = ".spark-staging-"
_PARTITION: Final = re.compile(r"[a-z_]+=.*")
_PICTURES: Final = (".svg", ".png")


class OutputRefused(ValueError):
    """A folder that must not be written to; the message is one line with the reason."""


# -- allowed folders ------------------------------------------------------------------------------


def resolve(folder: Path, stores: Iterable[str | Path | None], *, may_hold: bool = False) -> Path:
    """The real path of a folder to write to. Raises `OutputRefused`.

    `stores`: the data directory and the cold folder that are read, if named. `may_hold`: the folder
    may hold one of them, because the job writes only a single file.
    """
    real = Path(os.path.realpath(folder))
    if real.exists() and not real.is_dir():
        raise OutputRefused(f"{folder}: is not a folder")
    above = list(_identities(real))
    for store in stores:
        if store is None:
            continue
        place = Path(os.path.realpath(str(store)))
        identity = _identity(place)
        if identity is None:
            continue
        if identity in above:
            raise OutputRefused(f"{folder}: is, or lies inside, {store}, which is read")
        own = _identity(real)
        if not may_hold and own is not None and own in _identities(place):
            raise OutputRefused(f"{folder}: holds {store}, which is read")
    for ancestor in (real, *real.parents):
        kind = _kind_of_store(ancestor)
        if kind is not None:
            raise OutputRefused(f"{folder}: is, or lies inside, {ancestor}, {kind}")
    return real


def check_picture(file: Path, stores: Iterable[str | Path | None]) -> None:
    """Refuse a picture file that lies in a store or would replace another kind of file."""
    if file.suffix.lower() not in _PICTURES:
        raise OutputRefused(f"{file}: a picture's name ends in {' or '.join(_PICTURES)}")
    real = Path(os.path.realpath(file))
    if real.suffix.lower() not in _PICTURES or real.is_dir():
        raise OutputRefused(f"{file}: leads to {real}, which is not a picture")
    resolve(real.parent, stores, may_hold=True)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise OutputRefused(f"{path}: cannot be examined: {error.strerror}") from None
    return found.st_dev, found.st_ino


def _identities(path: Path) -> Iterator[tuple[int, int]]:
    """The identities of a folder and of all its parents, as far as they exist."""
    for each in (path, *path.parents):
        identity = _identity(each)
        if identity is not None:
            yield identity


def _kind_of_store(folder: Path) -> str | None:
    """The file which shows that a folder belongs to a server, if any.

    The folder's name does not matter.
    """
    try:
        names = set(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    except OSError as error:
        raise OutputRefused(f"{folder}: cannot be read: {error.strerror}") from None
    if layout.FORMAT in names and names & {layout.SEGMENTS, layout.WAL, layout.LOCK}:
        return "a data directory"
    if ARCHIVE in names and b'"archive_id"' in _content(folder / ARCHIVE):
        return "an archive"
    if layout.WAL in names and layout.SEGMENTS in names:
        return "what is left of a data directory"
    if layout.STORE in names and b'"store_id"' in _content(folder / layout.STORE):
        return "a cold folder"
    if any(_holds_segments(folder / name) for name in names if layout.parse_topic_dir(name)):
        return "a folder of segments"
    return None


def _content(file: Path) -> bytes:
    """The beginning of a file; empty if it cannot be read."""
    try:
        with file.open("rb") as opened:
            return opened.read(_MARK_BYTES)
    except OSError:
        return b""


def store_id_of(data_dir: str | Path) -> str | None:
    """The id of the store of a data directory, or of an archive in a folder.

    None for a store of an older version, and for a bucket.
    """
    folder = Path(data_dir)
    name = ARCHIVE if is_archive(str(data_dir)) else layout.FORMAT
    found = _STORE_ID.search(_content(folder / name))
    return None if found is None else found[1].decode()


def _holds_segments(folder: Path) -> bool:
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    return any(name == layout.MANIFEST or layout.parse_segment_file(name) for name in names)


# -- claiming a folder --------------------------------------------------------------------------


def claim(folder: Path, job: str, details: Mapping[str, Any] | None = None) -> None:
    """Claim a resolved folder for this job, or check that the job has it. Raises `OutputRefused`.

    `details` must not change between runs, for example the form of payloads.
    """
    marker = folder / MARKER
    wanted = {"version": VERSION, "job": job, **(details or {})}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = [name for name in os.listdir(folder) if name != f"{MARKER}.tmp"]
        if not names:
            publish_json(marker, wanted)
            return
        known = _marker_of(marker)
    except OSError as error:
        raise OutputRefused(f"{folder}: cannot be written: {error.strerror}") from None
    if known is None:
        raise OutputRefused(
            f"{folder}: is not empty and is not the output of {job} (it has no {MARKER}); "
            "name an empty or a new folder"
        )
    if known.get("version") != VERSION:
        raise OutputRefused(f"{marker}: is of version {known.get('version')}, not {VERSION}")
    for name, value in wanted.items():
        if known.get(name) != value and (name != "store" or None not in (known.get(name), value)):
            raise OutputRefused(
                f"{folder}: is an output of {name} {known.get(name)}, not of {name} {value}"
            )


def is_output(folder: Path) -> bool:
    """Whether a folder has a marker."""
    return (folder / MARKER).is_file()


def _marker_of(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, UnicodeDecodeError):
        raise OutputRefused(f"{path}: is not the marker of an output") from None
    return found if isinstance(found, dict) else None


def publish_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a small JSON file atomically."""
    temp = path.with_name(f"{path.name}.tmp")
    with temp.open("w", encoding="utf-8") as file:
        json.dump(content, file, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    temp.rename(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that the names in it are durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Allow one run at a time in a claimed folder; the kernel releases the lock when the process
    ends.
    """
    with (folder / MARKER).open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputRefused(f"{folder}: another run is writing it") from None
        for left in folder.glob(f"{_STAGING}*"):
            shutil.rmtree(left)  # left by a killed run
        yield


def names_of(folder: Path) -> dict[str, str]:
    """The full names of topics by their cut names in a folder of partitions."""
    try:
        found: dict[str, str] = json.loads((folder / NAMES).read_text("utf-8"))
    except FileNotFoundError:
        return {}
    return found


# -- writing -----------------------------------------------------------------------------------


def replace_files(frame: Any, folder: Path) -> None:
    """Write a frame as the Parquet files of a claimed folder and replace those of the last run.

    The new files are complete before the first old one is removed; after a kill the next run
    replaces the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in os.listdir(folder):
        if not _WRITTEN.fullmatch(name) and name != f"{MARKER}.tmp":
            raise OutputRefused(f"{folder / name}: was not written by this job; it is not removed")
    following = folder / _NEXT
    frame.write.mode("overwrite").parquet(str(following))
    for path in sorted(folder.iterdir()):
        if path.name not in (_NEXT, MARKER) and path.is_file():
            path.unlink()
    for path in sorted(following.iterdir()):
        path.rename(folder / path.name)
    shutil.rmtree(following)


def cut_names(names: Iterable[str]) -> dict[str, str]:
    """The cut names for topics whose folder `topic=NAME`, escaped, would be too long."""
    found = {}
    for name in names:
        if len(quote(name, safe="")) + len("topic=") > FOLDER_BYTES_MAX:
            digest = xxhash.xxh3_64_hexdigest(name.encode())
            found[name] = f"{name[:_KEPT_CHARS]}~{digest}"
    return found


def replace_partitions(
    frame: Any, folder: Path, columns: tuple[str, ...], names: Iterable[str] = ()
) -> None:
    """Write a frame into a claimed folder by partition; only partitions with rows are replaced.

    `names`: the topics that the frame may have. Names that are too long for a folder are cut; the
    file `NAMES` has the full names.
    """
    cut = cut_names(names)
    if cut:
        from pyspark.sql import functions as F

        known = {value: name for name, value in cut.items()}
        publish_json(folder / NAMES, {**names_of(folder), **known})
        column = F.col("topic")
        for name, value in cut.items():
            column = F.when(F.col("topic") == name, F.lit(value)).otherwise(column)
        frame = frame.withColumn("topic", column)
    for name in os.listdir(folder):
        if not _WRITTEN.fullmatch(name) and not _PARTITION.fullmatch(name):
            if name.startswith((_STAGING, f"{MARKER}.", SCHEMA, NAMES)):
                continue
            raise OutputRefused(f"{folder / name}: was not written by this job; move it away")
    publish_json(folder / SCHEMA, json.loads(frame.schema.json()))
    writer = frame.write.mode("overwrite").option("partitionOverwriteMode", "dynamic")
    writer.partitionBy(*columns).option("compression", "zstd").parquet(str(folder))
