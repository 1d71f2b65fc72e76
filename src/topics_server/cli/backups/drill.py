"""`topics backups drill FOLDER`: restores a backup to a scratch folder and compares what comes out.

The restored directory is read twice: by `dump`, which reads the files, and by a server that starts
on it. Both must show the same records of every topic, and as many topics as the backup says. The
scratch folder is removed in any case. Nobody else can read the restored store: the folder belongs
to this user alone, and the server asks for a key that only this process knows.

What the server may rightly do to the records is left out of the comparison: records of a topic with
a TTL expire, and routers append behind the last restored record.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import click
import msgspec
import xxhash

from topics_server.cli.amounts import duration
from topics_server.cli.connection import Failure, ServerConnection, topic_path
from topics_server.cli.listing import rows_of
from topics_server.cli.output import format_options, note, write_line
from topics_server.cli.paging import pages
from topics_server.cli.server.child import child_server
from topics_server.runtime.clock import monotonic_ms, random_hex
from topics_server.values.errors import StorageError
from topics_server.wal.fs import Fs, OsFs
from topics_server.wal.tools.dump import dump, verify

_KEY_BYTES: Final = 32
# So many problems are shown; the others are counted.
SHOWN_MAX: Final = 10


class TopicDigest(msgspec.Struct):
    """The records of a topic: how many, up to which seq, and a hash of them in order."""

    records: int = 0
    last_seq: int = 0
    hash: Any = msgspec.field(default_factory=xxhash.xxh3_64)

    def add(self, seq: int, ts: int, tag: str | None, data: bytes) -> None:
        """The next record."""
        self.records += 1
        self.last_seq = seq
        shown_tag = b"" if tag is None else msgspec.json.encode(tag)
        self.hash.update(b"%d %d %b %d " % (seq, ts, shown_tag, len(data)))
        self.hash.update(data)


class Drill(msgspec.Struct):
    """The result of a drill; without `problems` the backup is as good as its store was."""

    backup: int
    made: str
    topics: int
    records: int = 0
    damaged_records: int = 0
    segment_bytes: int = 0
    hash: str = ""
    seconds: float = 0.0
    problems: list[str] = []


class _Record(msgspec.Struct):
    data: msgspec.Raw
    seq: int = msgspec.field(name="$seq")
    ts: int = msgspec.field(name="$ts")
    tag: str | None = msgspec.field(name="$tag", default=None)
    encoding: str | None = msgspec.field(name="$encoding", default=None)


class _Named(msgspec.Struct):
    topic: str


class _Config(msgspec.Struct):
    ttl_ms: int = 0


class _State(msgspec.Struct):
    config: _Config


@click.command("drill")
@click.argument("folder", metavar="FOLDER", type=click.Path(exists=True, file_okay=False))
@click.option(
    "--scratch",
    metavar="DIR",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Restore into a new folder in DIR, on a disk with room; default: the folder for "
    "temporary files.",
)
@click.option(
    "--backup", "number", type=click.IntRange(1), metavar="NUMBER", help="Default: the newest one."
)
@click.option(
    "--start-within",
    "start_within_ms",
    type=duration(1000),
    default="10m",
    show_default=True,
    help="How long the server may take to start.",
)
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
    # SIGTERM as well ends the server and removes the folder.
    signal.signal(signal.SIGTERM, lambda *_: ctx.exit(1))
    try:
        made = tempfile.mkdtemp(prefix="topics-drill-", dir=scratch)
    except OSError as error:
        raise Failure(f"{scratch or tempfile.gettempdir()}: {error.strerror or error}") from None
    try:
        found = drilled(OsFs(), folder, Path(made), number, start_within_ms)
    except StorageError as error:
        raise Failure(f"the drill failed: {error}") from None
    finally:
        shutil.rmtree(made, ignore_errors=True)
    if as_json:
        write_line(msgspec.json.encode(found))
    else:
        verdict = f"{len(found.problems)} problems" if found.problems else "all came back"
        click.echo(
            f"backup {found.backup} of {found.made}: {found.topics:,} topics, "
            f"{found.records:,} records, {found.seconds:.1f} s: {verdict}"
        )
    for problem in found.problems[:SHOWN_MAX]:
        note(f"problem: {problem}")
    if len(found.problems) > SHOWN_MAX:
        note(f"and {len(found.problems) - SHOWN_MAX} more")
    ctx.exit(1 if found.problems else 0)


def drilled(fs: Fs, folder: str, scratch: Path, number: int | None, start_within_ms: int) -> Drill:
    """Restore into `scratch`, and compare. Raises `StorageError` if nothing can be restored."""
    from topics_server.archive.object_store import FolderStore
    from topics_server.archive.repository import Repository
    from topics_server.archive.restore import restore

    began_ms = monotonic_ms()
    store = FolderStore.open(fs, folder, write=False)
    data = scratch / "data"
    restored = restore(fs, store, str(data), number)
    facts = Repository(store).facts(restored.backup)
    moment = datetime.fromtimestamp(facts.ts_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    found = Drill(facts.number, moment, facts.topics, segment_bytes=facts.segment_bytes)
    # The backup names segments that were damaged when it was made.
    is_damaged = bool(facts.damaged_segments)
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
                found.problems += _by_server(client, facts.topics, wanted, is_damaged=is_damaged)
            finally:
                client.close()
    except Failure as failure:
        found.problems.append(failure.message)
    found.seconds = round((monotonic_ms() - began_ms) / 1000, 1)
    return found


def _by_files(fs: Fs, data_dir: str, found: Drill) -> dict[str, TopicDigest]:
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
    """Compare what a server shows; yields what is wrong."""
    rows = rows_of(client, "/v0/topics", "topics", {})
    names = [msgspec.json.decode(row, type=_Named).topic for row in rows]
    if len(names) != topics:
        yield f"the backup has {topics} topics, and the restored server {len(names)}"
    for name in sorted(wanted.keys() - set(names)):
        yield f"topic {name} is missing in the restored server"
    for name in names:
        digest = wanted.get(name, TopicDigest())
        state = msgspec.json.decode(client.call("GET", topic_path(name)), type=_State)
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
            record = msgspec.json.decode(raw, type=_Record)
            if record.seq > last_seq:
                return digest
            data = bytes(record.data)
            if record.encoding is not None:
                data = msgspec.json.decode(data, type=str).encode()
            digest.add(record.seq, record.ts, record.tag, data)
    return digest
