"""`topics backups drill FOLDER`, `topics archive drill URL`: try a restore in a scratch folder.

The restored directory is read twice: by `dump`, which reads the files, and by a server that starts
on it. Both must show the same records of every topic, and as many topics as the backup or moment
has. The scratch folder is always removed. Nobody else can read the restored store: only this user
can open the folder, and the server requires a key that only this process has.

The comparison ignores changes that a running server may make: records of a topic with a TTL expire,
and routers append behind the last restored record.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click
import msgspec
import xxhash

from topics_server.cli.amounts import duration
from topics_server.cli.backups.archive_source import finder, opened
from topics_server.cli.connection import Failure, ServerConnection, topic_path
from topics_server.cli.listing import rows_of
from topics_server.cli.output import format_options, note, write_line
from topics_server.cli.paging import pages
from topics_server.cli.server.child import child_server
from topics_server.runtime.clock import monotonic_ms, random_hex
from topics_server.values.errors import StorageError
from topics_server.wal.fs import Fs, OsFs
from topics_server.wal.tools.dump import dump, verify

if TYPE_CHECKING:
    from topics_server.archive.continuous.moments import Moments, RestorePoint

_KEY_BYTES: Final = 32
# The most problems that are shown; the others are only counted.
SHOWN_MAX: Final = 10


class TopicDigest(msgspec.Struct):
    """The number of a topic's records, the last seq, and a hash of the records in order."""

    records: int = 0
    last_seq: int = 0
    hash: Any = msgspec.field(default_factory=xxhash.xxh3_64)

    def add(self, seq: int, ts: int, tag: str | None, data: bytes) -> None:
        """Add the next record."""
        self.records += 1
        self.last_seq = seq
        shown_tag = b"" if tag is None else msgspec.json.encode(tag)
        self.hash.update(b"%d %d %b %d " % (seq, ts, shown_tag, len(data)))
        self.hash.update(data)


class Drilled(msgspec.Struct, kw_only=True):
    """The result of a drill. Without `problems`, the restored store equals the original store."""

    made: str
    topics: int
    records: int = 0
    damaged_records: int = 0
    segment_bytes: int = 0
    hash: str = ""
    seconds: float = 0.0
    problems: list[str] = []

    @property
    def name(self) -> str:
        """The name of the restored backup or moment, for people."""
        raise NotImplementedError


class BackupDrilled(Drilled, kw_only=True):
    """The result of a drill of a backup."""

    backup: int

    @property
    def name(self) -> str:
        """See `Drilled`."""
        return f"backup {self.backup}"


class MomentDrilled(Drilled, kw_only=True):
    """The result of a drill of a moment in an archive.

    `base` identifies the base; `lsn` is that of the newest entry.
    """

    base: int
    lsn: int

    @property
    def name(self) -> str:
        """See `Drilled`."""
        return f"lsn {self.lsn:,} on base {self.base}"


class _Record(msgspec.Struct):
    data: msgspec.Raw
    seq: int = msgspec.field(name="$seq")
    ts: int = msgspec.field(name="$ts")
    tag: str | None = msgspec.field(name="$tag", default=None)
    encoding: str | None = msgspec.field(name="$encoding", default=None)


_RECORD: Final = msgspec.json.Decoder(_Record)


class _Named(msgspec.Struct):
    topic: str


_NAMED: Final = msgspec.json.Decoder(_Named)


class _Config(msgspec.Struct):
    ttl_ms: int = 0


class _State(msgspec.Struct):
    config: _Config


_STATE: Final = msgspec.json.Decoder(_State)


_SCRATCH: Final = click.option(
    "--scratch",
    metavar="DIR",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Restore into a new folder in DIR, on a disk with room; default: the folder for "
    "temporary files.",
)
_START_WITHIN: Final = click.option(
    "--start-within",
    "start_within_ms",
    type=duration(1000),
    default="10m",
    show_default=True,
    help="How long the server may take to start.",
)


@click.command("drill")
@click.argument("folder", metavar="FOLDER", type=click.Path(exists=True, file_okay=False))
@_SCRATCH
@click.option(
    "--backup", "number", type=click.IntRange(1), metavar="NUMBER", help="Default: the newest one."
)
@_START_WITHIN
@format_options
@click.pass_context
def drill(
    ctx: click.Context,
    folder: str,
    scratch: Path | None,
    number: int | None,
    start_within_ms: int,
    as_json: bool,
) -> None:
    """Restore the newest backup of FOLDER to a scratch folder, start a server on it, and compare.

    For cron: one line, exit code 0 if everything comes back, and the scratch folder is removed.
    """
    _run(ctx, scratch, start_within_ms, lambda data: from_folder(folder, data, number), as_json)


@click.command("drill")
@click.argument("url", metavar="URL")
@_SCRATCH
@click.option(
    "--to-time",
    metavar="TIME",
    help="The moment to restore, 2026-01-31T12:00:00Z or ms; default: the newest one.",
)
@_START_WITHIN
@format_options
@click.pass_context
def drill_archive(
    ctx: click.Context,
    url: str,
    scratch: Path | None,
    to_time: str | None,
    start_within_ms: int,
    as_json: bool,
) -> None:
    """Restore the newest moment of the archive at URL, start a server on it, and compare.

    For cron: one line, exit code 0 if everything comes back, and the scratch folder is removed.
    """
    find = finder(None, to_time, None)
    _run(ctx, scratch, start_within_ms, lambda data: _from_archive(url, data, find), as_json)


def _run(
    ctx: click.Context,
    scratch: Path | None,
    start_within_ms: int,
    restore: Callable[[str], tuple[Drilled, bool]],
    as_json: bool,
) -> NoReturn:
    """Run one drill, print its line, and return its exit code."""
    # SIGTERM must end the server and remove the folder, too.
    signal.signal(signal.SIGTERM, lambda *_: ctx.exit(1))
    try:
        made = tempfile.mkdtemp(prefix="topics-drill-", dir=scratch)
    except OSError as error:
        raise Failure(f"{scratch or tempfile.gettempdir()}: {error.strerror or error}") from None
    try:
        found = drilled(OsFs(), Path(made), start_within_ms, restore)
    except StorageError as error:
        raise Failure(f"the drill failed: {error}") from None
    finally:
        shutil.rmtree(made, ignore_errors=True)
    if as_json:
        write_line(msgspec.json.encode(found))
    else:
        verdict = f"{len(found.problems)} problems" if found.problems else "all came back"
        click.echo(
            f"{found.name} of {found.made}: {found.topics:,} topics, "
            f"{found.records:,} records, {found.seconds:.1f} s: {verdict}"
        )
    for problem in found.problems[:SHOWN_MAX]:
        note(f"problem: {problem}")
    if len(found.problems) > SHOWN_MAX:
        note(f"and {len(found.problems) - SHOWN_MAX} more")
    ctx.exit(1 if found.problems else 0)


def from_folder(folder: str, data: str, number: int | None) -> tuple[Drilled, bool]:
    """Restore a backup. Returns whether it names segments that were damaged when it was made."""
    from topics_server.archive.object_store import FolderStore
    from topics_server.archive.repository import Repository
    from topics_server.archive.restore import restore

    fs = OsFs()
    store = FolderStore.open(fs, folder, write=False)
    restored = restore(fs, store, data, number)
    facts = Repository(store).facts(restored.backup)
    found = BackupDrilled(
        backup=facts.number,
        made=_utc(facts.ts_ms),
        topics=facts.topics,
        segment_bytes=facts.segment_bytes,
    )
    return found, bool(facts.damaged_segments)


def _from_archive(
    url: str, data: str, find: Callable[[Moments], RestorePoint]
) -> tuple[Drilled, bool]:
    """Restore a moment.

    Returns whether its base names segments that were damaged when it was made.
    """
    from topics_server.archive.continuous.restoring import restore_moment

    points: list[RestorePoint] = []

    def noted(moments: Moments) -> RestorePoint:
        points.append(find(moments))
        return points[0]

    made = restore_moment(OsFs(), opened(url), data, noted)
    base = points[0].base
    found = MomentDrilled(
        base=base.part,
        lsn=made.lsn,
        made=_utc(made.ts),
        topics=made.topics,
        segment_bytes=made.segment_bytes,
    )
    return found, bool(base.backup.facts.damaged_segments)


def _utc(ts_ms: int) -> str:
    return datetime.fromtimestamp(ts_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def drilled(
    fs: Fs, scratch: Path, start_within_ms: int, restore: Callable[[str], tuple[Drilled, bool]]
) -> Drilled:
    """Restore into `scratch`, and compare. Raises `StorageError` if the restore fails."""
    began_ms = monotonic_ms()
    data = scratch / "data"
    found, is_damaged = restore(str(data))
    if not is_damaged:
        found.problems += verify(fs, str(data)).problems
    wanted = _by_files(fs, str(data), found)
    if found.damaged_records and not is_damaged:
        found.problems.append(f"{found.damaged_records} records are damaged")
    found.records = sum(digest.records for digest in wanted.values())
    whole = xxhash.xxh3_64()
    for name, digest in sorted(wanted.items()):
        whole.update(f"{name} {digest.hash.hexdigest()} ".encode())
    found.hash = whole.hexdigest()
    keys = scratch / "keys"
    key = random_hex(_KEY_BYTES)
    keys.touch(mode=0o600)
    keys.write_text(f"{key}\n")
    options = ["--api-keys-file", str(keys)]
    try:
        with child_server(
            scratch, 0, threading.Event(), options, start_within_ms=start_within_ms
        ) as (_, url):
            client = ServerConnection(url, key)
            try:
                found.problems += _by_server(client, found.topics, wanted, is_damaged=is_damaged)
            finally:
                client.close()
    except Failure as failure:
        found.problems.append(failure.message)
    found.seconds = round((monotonic_ms() - began_ms) / 1000, 1)
    return found


def _by_files(fs: Fs, data_dir: str, found: Drilled) -> dict[str, TopicDigest]:
    """The live records of each topic, read from the files."""
    digests: dict[str, TopicDigest] = {}
    for item in dump(fs, data_dir):
        if "damaged" in item:
            found.damaged_records += 1
        elif not item["deleted"]:
            digest = digests.setdefault(item["topic"], TopicDigest())
            is_text = "encoding" in item
            data = item["data"].encode() if is_text else bytes(item["data"] or b"null")
            digest.add(item["seq"], item["ts"], item["tag"], data)
    return digests


def _by_server(
    client: ServerConnection, topics: int, wanted: dict[str, TopicDigest], *, is_damaged: bool
) -> Iterator[str]:
    """Compare the answers of a server with the files. Yields a line for each difference."""
    rows = rows_of(client, "/v0/topics", "topics", {})
    names = [_NAMED.decode(row).topic for row in rows]
    if len(names) != topics:
        yield f"it has {topics} topics, and the restored server {len(names)}"
    for name in sorted(wanted.keys() - set(names)):
        yield f"topic {name} is missing in the restored server"
    for name in names:
        digest = wanted.get(name, TopicDigest())
        state = _STATE.decode(client.call("GET", topic_path(name)))
        shown = _shown(client, name, digest.last_seq)
        if shown.records > digest.records:
            yield f"topic {name} has {shown.records} records, and {digest.records} in the files"
        elif state.config.ttl_ms or is_damaged:
            continue
        elif shown.records < digest.records:
            yield f"topic {name} has {shown.records} records, and {digest.records} in the files"
        elif shown.hash.digest() != digest.hash.digest():
            yield f"topic {name} has other records than the files"


def _shown(client: ServerConnection, topic: str, last_seq: int) -> TopicDigest:
    """The records that the server shows, up to a seq."""
    digest = TopicDigest()
    for page in pages(client, topic, 0, {"include_tags": True}):
        for raw in page.records:
            record = _RECORD.decode(raw)
            if record.seq > last_seq:
                return digest
            data = bytes(record.data)
            if record.encoding is not None:
                data = msgspec.json.decode(data, type=str).encode()
            digest.add(record.seq, record.ts, record.tag, data)
    return digest
