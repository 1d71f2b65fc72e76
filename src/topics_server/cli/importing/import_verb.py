"""`topics import`: records of files and of other servers, each once and with its time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import click
import msgspec

from topics_server.cli.amounts import seconds
from topics_server.cli.connection import Failure, ServerConnection, server_options
from topics_server.cli.data.cutting import Shape
from topics_server.cli.data.lines import STANDARD_INPUT
from topics_server.cli.data.loading import prefetched
from topics_server.cli.importing.appending import Appending, ImportBatch, SourcePlace
from topics_server.cli.importing.export_folder import files_by_topic
from topics_server.cli.importing.files import FileSource, Tally
from topics_server.cli.importing.other_server import ServerSource, SourceServer, configure_like
from topics_server.cli.importing.stamping import LineStamper
from topics_server.cli.output import format_options, note, show_table, write_line
from topics_server.cli.progress import Advance, progress_bar

BATCH_RECORDS: Final = 1000
# The name goes into a header and into each record.
NAME_MAX: Final = 200


class Imported(msgspec.Struct):
    """The result of an import for one topic; `imported` counts records of this run."""

    topic: str
    source: str
    imported: int
    position: int
    gaps: int
    bad_lines: int
    head_seq: int


class _Plan(msgspec.Struct, frozen=True):
    create: bool
    append_anyway: bool
    retry_s: float


HELP: Final = """Import records, each once, with their original times in `meta`.

\b
topics import events.ndjson.gz orders     lines as read and export print them
topics import EXPORT                      a folder of export --format ndjson
topics import http://other:4000 orders    a topic of another server, or all

Each record keeps its data, tag, node and meta, and gets `meta.$imported` with its source, its
seq and its time there. Run it again and it continues where it stopped, whenever that was; what
is imported is not imported twice. Gaps of the source and bad lines are told, and a file with a
bad line is not begun.
"""


@click.command("import", help=HELP)
@click.argument("source", metavar="FILE|-|FOLDER|URL")
@click.argument("topics", nargs=-1, metavar="[TOPIC]...")
@click.option("--prefix", help="Import the topics whose names start with this.")
@click.option("--into", metavar="TOPIC", help="Import the one topic of the source into this one.")
@click.option("--whole-lines", is_flag=True, help="A line is the data of a record.")
@click.option("--data-field", metavar="NAME", help="Take the data from this field of a line.")
@click.option("--tag-field", metavar="NAME", help="Take the tag from this field (a string).")
@click.option("--node-field", metavar="NAME", help="Take the node from this field (a string).")
@click.option("--meta-field", metavar="NAME", help="Take meta from this field (an object).")
@click.option(
    "--time-field",
    metavar="NAME",
    help="Take the original time from this field: ms since 1970, or RFC 3339.",
)
@click.option("--as", "name", metavar="NAME", help="The name under which the source is known.")
@click.option("--skip-bad", is_flag=True, help="Leave out lines that are no records, and say so.")
@click.option("--append-anyway", is_flag=True, help="Append even if the topic holds other records.")
@click.option("--create/--no-create", default=True, help="Whether to create missing topics.")
@click.option(
    "--config/--no-config",
    "with_config",
    default=True,
    help="Whether a topic that is created gets the source's configuration (of a server).",
)
@click.option(
    "--source-token",
    envvar="TOPICS_SOURCE_TOKEN",
    metavar="KEY",
    help="Key to send to the other server; safer in the environment.  [env: TOPICS_SOURCE_TOKEN]",
)
@click.option(
    "--batch-records",
    type=click.IntRange(1, BATCH_RECORDS),
    default=BATCH_RECORDS,
    show_default=True,
    help="Records of one request.",
)
@click.option(
    "--retry-seconds",
    "--retry",
    "retry_ms",
    type=seconds(),
    default="30s",
    show_default=True,
    help="How long to try again when a server is busy or away; plain: seconds.",
)
@format_options
@server_options
def command(
    source: str,
    topics: tuple[str, ...],
    prefix: str | None,
    into: str | None,
    whole_lines: bool,
    data_field: str | None,
    tag_field: str | None,
    node_field: str | None,
    meta_field: str | None,
    time_field: str | None,
    name: str | None,
    skip_bad: bool,
    append_anyway: bool,
    create: bool,
    with_config: bool,
    source_token: str | None,
    batch_records: int,
    retry_ms: int,
    client: ServerConnection,
    as_json: bool,
) -> None:
    """Import records, see `HELP`."""
    if name is not None and not (
        0 < len(name) <= NAME_MAX and name.isascii() and name.isprintable()
    ):
        raise click.UsageError(f"--as takes 1 to {NAME_MAX} printable ASCII characters")
    if topics and prefix is not None:
        raise click.UsageError("topics and --prefix: give one of them")
    shape = Shape(data_field, tag_field, node_field, meta_field)
    try:
        stamper = LineStamper(shape if whole_lines or shape != Shape() else None, time_field)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    plan = _Plan(create, append_anyway, retry_ms / 1000)
    has_shape = whole_lines or shape != Shape() or time_field is not None

    def of_files(paths: Sequence[str], topic: str) -> Imported:
        found = FileSource(
            paths, stamper, name=name, batch_records=batch_records, skip_bad=skip_bad, tell=note
        )
        return _from_files(client, topic, found, plan)

    if source.startswith(("http://", "https://")):
        if has_shape or skip_bad:
            raise click.UsageError("options about lines are for files, not for a server")
        server = SourceServer(ServerConnection(source, source_token), plan.retry_s, note)
        try:
            names = server.names(topics, prefix)
            results = [
                _from_server(client, server, each, into, plan, name, batch_records, with_config)
                for each in _named(names, into, name, source)
            ]
        finally:
            server.client.close()
    elif source != STANDARD_INPUT and Path(source).is_dir():
        if has_shape:
            raise click.UsageError("the lines of an export have a form: leave these options out")
        chosen = files_by_topic(Path(source), topics, prefix)
        results = [
            of_files(chosen[each], into or each)
            for each in _named(list(chosen), into, name, source)
            if chosen[each]
        ]
    else:
        if prefix is not None or into is not None or len(topics) != 1:
            raise click.UsageError("a file is imported into one topic: topics import FILE TOPIC")
        results = [of_files([source], topics[0])]
    _show(results, as_json=as_json)


def _named(names: list[str], into: str | None, name: str | None, source: str) -> list[str]:
    if not names:
        raise Failure(f"{source}: no topic with such a name")
    if len(names) > 1 and (into is not None or name is not None):
        option = "--into" if into is not None else "--as"
        raise click.UsageError(f"{option} is for one topic, and {len(names)} are chosen")
    return names


def _from_files(client: ServerConnection, topic: str, source: FileSource, plan: _Plan) -> Imported:
    if source.is_empty:
        return Imported(topic, source.name, 0, 0, 0, 0, 0)
    source.check()
    appending = _appending(client, topic, source.name, plan)
    place = appending.resume(append_anyway=plan.append_anyway)
    with progress_bar(source.total_bytes, "records") as advance:
        return _run(appending, source.name, source.batches(place), place, source.tally, advance)


def _from_server(
    client: ServerConnection,
    server: SourceServer,
    topic: str,
    into: str | None,
    plan: _Plan,
    name: str | None,
    batch_records: int,
    with_config: bool,
) -> Imported:
    details = server.details(topic)
    source = ServerSource(server, details, name=name, batch_records=batch_records, tell=note)
    if into is None and server.client.url == client.url:
        raise click.UsageError(
            "source and destination are the same server: name a topic with --into"
        )
    dest = into or topic
    if details.stream is not None:
        note(f"{topic} is a stream there; its records are imported into a topic")
    elif plan.create and with_config:
        configure_like(client, dest, details)
    appending = _appending(client, dest, source.name, plan)
    place = appending.resume(append_anyway=plan.append_anyway)
    with progress_bar(details.head_seq, "records") as advance:
        return _run(appending, source.name, source.batches(place), place, source.tally, advance)


def _appending(client: ServerConnection, topic: str, source: str, plan: _Plan) -> Appending:
    return Appending(client, topic, source, create=plan.create, retry_s=plan.retry_s, tell=note)


def _run(
    appending: Appending,
    source: str,
    batches: Iterator[tuple[ImportBatch | None, int]],
    place: SourcePlace | None,
    tally: Tally,
    advance: Advance,
) -> Imported:
    records = 0
    position = 0 if place is None else place.position
    for batch, done in prefetched(batches):
        if batch is not None:
            appending.send(batch)
            records += len(batch.records)
            position = batch.position
        advance(records, done, batch is not None)
    return Imported(
        appending.topic,
        source,
        records,
        position,
        tally.gaps,
        tally.bad_lines,
        appending.head_seq,
    )


def _show(results: Sequence[Imported], *, as_json: bool) -> None:
    if as_json:
        for result in results:
            write_line(msgspec.json.encode(result))
        return
    names = Imported.__struct_fields__
    rows = [
        [
            f"{value:,}" if isinstance(value, int) else value
            for value in msgspec.structs.astuple(each)
        ]
        for each in results
    ]
    show_table(names, rows, numbers=names[2:])
