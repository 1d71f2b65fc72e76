"""`topics verify DIR`: checks a data directory offline.

Exit code 0: whole. 1: problems, one line each.
"""

from __future__ import annotations

import click
import msgspec

from topics_server.cli.connection import Failure
from topics_server.cli.output import format_options, note, show_table, write_line
from topics_server.values.errors import StorageError


@click.command("verify")
@click.argument("directory", metavar="DIR", type=click.Path(exists=True, file_okay=False))
@click.option(
    "--cold-dir",
    type=click.Path(file_okay=False),
    help="The cold folder, which holds older segments.",
)
@format_options
@click.pass_context
def command(ctx: click.Context, directory: str, cold_dir: str | None, as_json: bool) -> None:
    """Check journal, snapshots, segments and manifests in DIR; changes nothing."""
    from topics_server.wal.fs import OsFs
    from topics_server.wal.tools.dump import verify

    try:
        report = verify(OsFs(), directory, cold_dir)
    except StorageError as error:
        raise Failure(str(error)) from None
    if as_json:
        fields = {"problems": report.problems, "infos": report.infos, "counts": report.counts}
        write_line(msgspec.json.encode(fields, enc_hook=str))
    else:
        show_table(("", ""), [(str(name), str(n)) for name, n in report.counts.items()])
        for info in report.infos:
            note(str(info))
        for problem in report.problems:
            note(f"problem: {problem}")
        note(f"{len(report.problems)} problems" if report.problems else "no problems")
    ctx.exit(1 if report.problems else 0)
