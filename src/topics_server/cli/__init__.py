"""The command `topics`: one module for each verb, imported when the verb runs.

Owns the list of verbs. Exit codes: 0 success, 1 the server (or a file) refused the request or does
not have the named item, 2 wrong usage or no server answered. Results go to standard output,
everything else to standard error.

- `analytics/`: verbs that run Spark and exports.
- `backups/`: verbs on backups.
- `benching/`: the verb that measures a running server.
- `data/`: verbs on records.
- `durable_streams/`: verbs on Durable Streams.
- `following/`: verbs that follow topics.
- `importing/`: the verb that imports records of files and of other servers.
- `queues/`: verbs on queues.
- `routing/`: verbs on routers.
- `server/`: the server's verb, its settings, and the offline tools.
- `topics/`: verbs on topics.
- `torture/`: the verb that tests a server on the user's own disk.
- `views/`: verbs on views.
- `amounts`: option types for durations and sizes.
- `connection`: the HTTP connection of verbs that call a server.
- `details`: prints topics, routers and queues for people: types, ages, sizes, lag.
- `json_input`: checks JSON that a person types.
- `last`: finds the last records of a topic for `read --last` and `tail -n`.
- `listing`: reads the pages of a list and prints its rows.
- `output`: prints results: NDJSON in pipes, tables on terminals.
- `paging`: reads a topic page by page and prints its records and gaps.
- `progress`: a progress bar of verbs that work through lines or records.
- `record_filters`: the options of `read`, `tail` and `watch` that select records.
- `retries`: repeats a request that may be sent again.
- `stopping`: how long-running verbs end: Ctrl-C, or a closed output.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Any, Final, cast

import click
import msgspec

VERBS: Final = {
    "serve": "Start the server.",
    "demo": "Start a server with live example data, and open its console.",
    "put": "Create a topic or replace its configuration.",
    "set": "Change single fields of a topic's configuration.",
    "append": "Append one record, or every line of standard input.",
    "load": "Append every line of an NDJSON file; continue where an earlier run stopped.",
    "import": "Import records of files, exports and other servers, with their times.",
    "read": "Print records from a position on; optionally follow new ones.",
    "tail": "Print new records of one or more topics as they arrive.",
    "watch": "Print the frames of a stream, one JSON value a line.",
    "stream": "Create, append to, read, follow, close and remove Durable Streams.",
    "pub": "Publish each line of standard input as a record, over a WebSocket.",
    "enqueue": "Enqueue one job.",
    "work": "Run a command for every job of a queue.",
    "queue": "Show queues and their leases; redrive dead letters; purge jobs.",
    "router": "Create, show, list and remove routers, which forward records.",
    "routers": "List routers, or draw them with --graph.",
    "consumer": "Make, show, commit and remove consumers: cursors that the server keeps.",
    "view": "Define, query and remove views: tables that follow a topic, in SQL.",
    "ls": "List topics.",
    "info": "Show a topic's state and configuration.",
    "delete": "Delete records by tag or position, for good.",
    "rm": "Remove a topic and all its records, for good.",
    "verify": "Check a data directory offline; change nothing.",
    "dump": "Print the contents of a data directory offline; change nothing.",
    "repair": "Show what a damaged journal has lost; --accept-loss makes it readable.",
    "backup": "Make a backup of a running server, or of a stopped one's directory.",
    "backups": "List, verify, try and prune the backups in a folder.",
    "restore": "Make a data directory from a backup, or as of a moment of an archive.",
    "archive": "List, verify and prune a continuous archive.",
    "export": "Write records as Parquet, NDJSON or Arrow files; each run adds the new ones.",
    "jobs": "List the analytics jobs, or run one of them with Spark.",
    "pipeline": "Export the log to a lake and compute results by day, with one command.",
    "config": "Show the server's settings and where each came from.",
    "doctor": "Check settings, directory, disk, limits and clock; say what to do.",
    "torture": "Kill a server on a disk again and again, and check what it acknowledged.",
    "bench": "Measure how fast a running server is: appends, reads, a reader, a queue.",
    "completion": "Print a script that makes a shell complete verbs and options.",
    "health": "Ask whether a server answers; for health checks.",
    "help": "Print the help of a verb.",
}
# The folder of each verb's module.
FOLDERS: Final = {
    verb: folder
    for folder, verbs in {
        "server": "serve demo verify dump repair config doctor completion health help",
        "benching": "bench",
        "backups": "archive backup backups restore",
        "topics": "put set ls info rm",
        "data": "append load read pub delete consumer",
        "following": "tail watch",
        "importing": "import",
        "durable_streams": "stream",
        "queues": "enqueue work queue",
        "routing": "router routers",
        "torture": "torture",
        "views": "view",
        "analytics": "export jobs pipeline",
    }.items()
    for verb in verbs.split()
}

# Verbs that are keywords of Python, and their modules.
MODULES: Final = {"import": "import_verb"}

# Words of other tools, and the verb of `topics` with the same purpose.
SYNONYMS: Final = {
    "list": "ls",
    "show": "info",
    "describe": "info",
    "get": "read",
    "cat": "read",
    "create": "put",
    "publish": "pub",
    "produce": "append",
    "consume": "tail",
    "subscribe": "tail",
    "remove": "rm",
    "start": "serve",
    "status": "health",
}


@contextlib.contextmanager
def plain_messages() -> Iterator[None]:
    """Turn operating system errors into one line and an exit code, for every verb.

    If the reader of the output ends early (`| head`), the verb succeeds. If the output cannot be
    written, a file is missing or unreadable, or a disk is full, print one sentence and exit with
    code 1.
    """
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        sys.stdout = None  # the interpreter's own flush must print no error
        raise SystemExit(0) from None
    except UnicodeEncodeError as error:
        _tell(_not_text(error))
        raise SystemExit(2) from None
    except msgspec.DecodeError as error:
        # Verbs report errors in their own input, so this error is about the data of a server.
        _tell(f"bad_answer: this answer is not from a topics server: {error}")
        raise SystemExit(1) from None
    except OSError as error:
        where = "cannot write the output" if error.filename is None else error.filename
        _tell(f"{where}: {error.strerror or error}")
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.close()  # the buffered output cannot be written
        sys.stdout = None
        raise SystemExit(1) from None


def _tell(line: str) -> None:
    with contextlib.suppress(OSError):
        click.echo(line, err=True)


def _not_text(error: UnicodeEncodeError) -> str:
    """The message for an argument that is not text, or for an output that cannot encode all of
    Unicode.
    """
    if "\udc80" <= error.object[error.start] <= "\udcff":
        shown = error.object.encode(errors="surrogateescape").decode(errors="replace")
        return f"Error: {shown!r}: this argument is not UTF-8 text"
    return f"the output can encode {error.encoding} only: set PYTHONUTF8=1, or LC_ALL=C.UTF-8"


class Verbs(click.Group):
    """A group that imports a verb's module only when the verb is used."""

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        """Parse the command line; `--help` and `--version` print here."""
        with plain_messages():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb."""
        with plain_messages():
            return super().invoke(ctx)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the verb. The error for an unknown verb suggests the one that was probably meant."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            # Only a mistyped verb needs this module, so do not import it in every run.
            import difflib

            word = args[0].lower()
            near = difflib.get_close_matches(word, VERBS, n=1)
            meant = SYNONYMS.get(word) or (near[0] if near else None)
            if meant is None or args[0] in VERBS:
                raise
            raise click.UsageError(f"{error.message} Did you mean '{meant}'?", ctx) from None

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The verbs, in the order in which a new user needs them."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import `topics_server.cli.FOLDER.VERB` and take its `command`."""
        if cmd_name not in VERBS:
            return None
        name = MODULES.get(cmd_name, cmd_name)
        # httpx would import a command line of its own, with Rich and Pygments: a fifth of a verb's
        # start. It does without, as where they are not installed.
        sys.modules.setdefault("httpx._main", cast(Any, None))
        module = importlib.import_module(f"{__name__}.{FOLDERS[cmd_name]}.{name}")
        if "httpx" in sys.modules and sys.modules.get("httpx._main", sys) is None:
            # It has looked; a program that runs a verb in its process may import that module.
            del sys.modules["httpx._main"]
        command = module.command
        assert isinstance(command, click.Command), f"{cmd_name} has a command"
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the verbs from the table above, without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


HELP: Final = """A durable event log behind plain HTTP.

\b
topics serve                             start a server on 127.0.0.1:4000
topics append jobs '{"n": 1}' --tag a    append a record
topics tail jobs                         print records as they arrive

Verbs that talk to a server take --url and --token, or TOPICS_URL and TOPICS_TOKEN from the
environment. Output is a table on a terminal and one JSON value a line in a pipe; --json and
--table override this. Exit codes: 0 done, 1 refused or not found, 2 wrong usage or no server.
"""


@click.group(cls=Verbs, help=HELP, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="topics-server", prog_name="topics")
def main() -> None:
    """Run the verb that the command line names (see `HELP`)."""
