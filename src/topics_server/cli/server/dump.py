"""`topics dump DIR`: prints the records in a data directory, offline.

A record's `data` and `meta` are printed byte for byte except for line breaks (see `output`). Exit
code 1: part of the journal could not be read; standard error names the part, and everything
readable was printed.
"""

from __future__ import annotations

import click
import msgspec

from topics_server.cli.connection import Failure
from topics_server.cli.output import write_line
from topics_server.values.errors import StorageError


def _as_text(value: object) -> str:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).decode(errors="backslashreplace")
    return str(value)


@click.command("dump")
@click.argument("directory", metavar="DIR", type=click.Path(exists=True, file_okay=False))
@click.option(
    "--cold-dir",
    type=click.Path(file_okay=False),
    help="The cold folder, which holds older segments.",
)
@click.option("--journal", is_flag=True, help="Also print the journal's entries.")
def command(directory: str, cold_dir: str | None, journal: bool) -> None:
    """Print the records in DIR by topic and seq; changes nothing."""
    from topics_server.wal.fs import OsFs
    from topics_server.wal.tools.dump import dump

    encoder = msgspec.json.Encoder(enc_hook=_as_text)
    try:
        for item in dump(OsFs(), directory, cold_dir, with_journal=journal):
            write_line(encoder.encode(item))
    except StorageError as error:
        raise Failure(str(error)) from None
