"""`topics load`: appends every line of a file once, in order.

This module has the options and the output; `loading` does the work, and `resume` has the rules for
resuming.
"""

from __future__ import annotations

from typing import Final

import click
import msgspec

from topics_server.cli.amounts import seconds, size
from topics_server.cli.connection import ServerConnection, server_options
from topics_server.cli.data.cutting import Cutter, Shape, whole_records
from topics_server.cli.data.lines import LineFile
from topics_server.cli.data.loading import Loading, LoadPlan
from topics_server.cli.output import format_options, note, show_object
from topics_server.cli.progress import progress_bar

BATCH_RECORDS: Final = 2000
RETRY: Final = "30s"


@click.command("load")
@click.argument("topic")
@click.argument("file", metavar="FILE|-")
@click.option("--records", is_flag=True, help="A line is a record: {data, tag, node, meta}.")
@click.option("--data-field", metavar="NAME", help="Take the data from this field of a line.")
@click.option("--tag-field", metavar="NAME", help="Take the tag from this field (a string).")
@click.option("--node-field", metavar="NAME", help="Take the node from this field (a string).")
@click.option("--meta-field", metavar="NAME", help="Take meta from this field (an object).")
@click.option("--node", help="Node of every record whose line names none.")
@click.option("--create/--no-create", default=True, help="Whether to create a missing topic.")
@click.option("--append-anyway", is_flag=True, help="Append even if the topic holds other records.")
@click.option(
    "--from-line", type=click.IntRange(min=1), metavar="N", help="Begin here, without comparing."
)
@click.option(
    "--batch-records",
    type=click.IntRange(min=1),
    default=BATCH_RECORDS,
    show_default=True,
    help="Records of one request.",
)
@click.option(
    "--batch-bytes",
    type=size(1),
    default="1MiB",
    show_default=True,
    help="Approximate bytes of one request.",
)
@click.option(
    "--retry-seconds",
    "--retry",
    "retry_ms",
    type=seconds(),
    default=RETRY,
    show_default=True,
    help="How long to try again when the server is busy or away; plain: seconds.",
)
@format_options
@server_options
def command(
    topic: str,
    file: str,
    records: bool,
    data_field: str | None,
    tag_field: str | None,
    node_field: str | None,
    meta_field: str | None,
    node: str | None,
    create: bool,
    append_anyway: bool,
    from_line: int | None,
    batch_records: int,
    batch_bytes: int,
    retry_ms: int,
    client: ServerConnection,
    as_json: bool,
) -> None:
    """Append the lines of FILE (NDJSON, also gzip; - = standard input) to TOPIC.

    A line is one record's data, stored byte for byte; --records and the --…-field options cut
    records out of lines instead, also byte for byte. Blank lines are skipped.

    Run it again and it continues where it stopped, whenever that was: it compares the topic's last
    records with the file. It refuses a topic that holds anything but a beginning of the file,
    unless --append-anyway or --from-line is given.
    """
    shape = Shape(data_field, tag_field, node_field, meta_field)
    if records and shape != Shape():
        raise click.UsageError("--records already names the fields: leave --…-field out")
    if append_anyway and from_line is not None:
        raise click.UsageError("--append-anyway and --from-line: give one of them")
    try:
        cutter = Cutter(whole_records() if records else shape, node)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    source = LineFile(file)
    plan = LoadPlan(
        topic, batch_records, batch_bytes, from_line, append_anyway, create, retry_ms / 1000
    )
    loading = Loading(client, source, cutter, plan, note)
    with progress_bar(source.total_bytes, "lines") as advance:
        result = loading.run(advance)
    if result.stored and from_line is None:
        note(f"{result.stored} lines were in the topic already")
    if loading.strangers:
        note("other clients appended to this topic meanwhile: a later load cannot resume by itself")
    show_object(msgspec.json.encode(result), as_json=as_json)
