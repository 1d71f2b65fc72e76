"""`topics queue`: shows queues, once or as a live board (§10.7).

`topics queue [QUEUE]...` without a command name means `topics queue show`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final
from urllib.parse import urlencode

import click
import msgspec

from topics_server.cli.connection import (
    CallRefused,
    Failure,
    ServerConnection,
    server_options,
    topic_path,
)
from topics_server.cli.details import TopicDetails, age
from topics_server.cli.output import (
    confirm,
    format_options,
    note,
    show_object,
    show_table,
    write_line,
)
from topics_server.cli.queues.queue_board import command as show
from topics_server.runtime.clock import now_ms, random_id
from topics_server.values.texts.amounts import duration_text

_TOPIC_DETAILS: Final = msgspec.json.Decoder(TopicDetails)

CALL_JOBS: Final = 500
# Long enough to acknowledge claimed jobs, short enough to wait for after a crash.
PURGE_LEASE_MS: Final = 60_000
PAGE_SIZE: Final = 1000
COLUMNS: Final = ("job", "held by", "since", "until", "deliveries")
NUMBERS: Final = ("job", "since", "until", "deliveries")


class _Group(click.Group):
    """A group with a default command: a first word that is no command becomes an argument of
    `show`.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert `show` if the first word is no command.

        Completion of an empty word lists all commands.
        """
        if not args and ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        if not args or (args[0] not in self.commands and args[0] not in ctx.help_option_names):
            args = [show.name or "show", *args]
        return super().parse_args(ctx, args)


HELP = """Show queues and their leases, redrive dead letters, and purge jobs.

\b
topics queue                    show a board of all queues
topics queue mails              show one queue, like: topics queue show mails
topics queue leases mails       show which worker holds which job
topics queue redrive mails      turn dead letters into jobs again
topics queue purge mails        delete the jobs that wait
"""


@click.group(
    "queue", cls=_Group, context_settings={"help_option_names": ["-h", "--help"]}, help=HELP
)
def command() -> None:
    """See `HELP`."""


command.add_command(show)


class _Lease(msgspec.Struct):
    seq: int
    node: str
    deadline: int
    deliveries: int
    claimed_ts: int


_LEASE: Final = msgspec.json.Decoder(_Lease)


class _Leases(msgspec.Struct):
    leases: list[msgspec.Raw]
    next_cursor: str | None = None


_LEASES: Final = msgspec.json.Decoder(_Leases)


@command.command("leases")
@click.argument("queue")
@format_options
@server_options
def leases(queue: str, client: ServerConnection, as_json: bool) -> None:
    """Show the leases of QUEUE: job, worker, begin and end of each."""
    rows = _leases(client, queue)
    if as_json:
        for row in rows:
            write_line(bytes(row))
        return
    cells: list[list[str]] = []
    for row in rows:
        lease, now = _LEASE.decode(row), now_ms()
        left_ms = lease.deadline - now
        until = "over" if left_ms <= 0 else f"in {duration_text(max(left_ms // 1000, 1) * 1000)}"
        since = age(lease.claimed_ts, now)
        cells.append([str(lease.seq), lease.node, since, until, str(lease.deliveries)])
    show_table(COLUMNS, cells, numbers=NUMBERS)


def _leases(client: ServerConnection, queue: str) -> Iterator[msgspec.Raw]:
    query = {"page_size": str(PAGE_SIZE)}
    while True:
        path = topic_path(queue, f"/leases?{urlencode(query)}")
        page = _LEASES.decode(client.call("GET", path, repeatable=True))
        yield from page.leases
        if page.next_cursor is None:
            return
        assert page.next_cursor != query.get("cursor"), "a page moves its cursor"
        query["cursor"] = page.next_cursor


# -- redrive ---------------------------------------------------------------------------------------


class RedriveReport(msgspec.Struct):
    """The result of a redrive; `skipped` are requested seqs of the dead-letter topic that were not
    moved.
    """

    topic: str
    source: str = msgspec.field(name="from")
    redriven: int = 0
    skipped: list[int] = []


class _Redriven(RedriveReport):
    more: bool = False
    next_after_seq: int = 0


_REDRIVEN: Final = msgspec.json.Decoder(_Redriven)


@command.command("redrive")
@click.argument("queue")
@click.option(
    "--from",
    "source",
    metavar="TOPIC",
    help="Topic that holds them; default: the dead_letter of QUEUE.",
)
@click.option(
    "--seq", "seqs", type=click.IntRange(min=0), multiple=True, metavar="SEQ", help="Only these."
)
@click.option("--tag", metavar="TAG", help="Only those with exactly this tag.")
@click.option("--tag-prefix", metavar="PREFIX", help="Only those whose tag starts with this.")
@click.option(
    "--max", "most", type=click.IntRange(min=1), metavar="N", help="Most jobs to redrive."
)
@format_options
@server_options
def redrive(
    queue: str,
    source: str | None,
    seqs: tuple[int, ...],
    tag: str | None,
    tag_prefix: str | None,
    most: int | None,
    client: ServerConnection,
    as_json: bool,
) -> None:
    """Make the dead letters of QUEUE jobs of it again; all of them, unless options select some.

    The server moves each letter completely or not at all. After a failed call, run the command
    again: no letter is lost and none is moved twice. A job's deliveries count from the beginning.
    """
    if sum((bool(seqs), tag is not None, tag_prefix is not None)) > 1:
        raise click.UsageError("--seq, --tag and --tag-prefix: give one of them")
    if tag_prefix is not None and "*" in tag_prefix:
        raise click.UsageError("--tag-prefix is taken literally and cannot contain *")
    asked: dict[str, Any] = {"all": True}
    if seqs:
        asked = {"seqs": sorted(set(seqs))}
    elif tag is not None:
        asked = {"tag": tag}
    elif tag_prefix is not None:
        asked = {"match": ["tag", "Glob", f"{tag_prefix}*"]}
    if source is not None:
        asked["from"] = source
    done = _redrive(client, queue, asked, most)
    show_object(msgspec.json.encode(done), as_json=as_json)


def _redrive(
    client: ServerConnection, queue: str, asked: dict[str, Any], most: int | None
) -> RedriveReport:
    """Redrive in several calls. A job that fails again meanwhile stays for the next run."""
    total: RedriveReport | None = None
    after, last, left = 0, None, most
    while True:
        body = {**asked, "after_seq": after, "max": min(CALL_JOBS, left or CALL_JOBS)}
        answer = client.call("POST", topic_path(queue, "/redrive"), msgspec.json.encode(body))
        part = _REDRIVEN.decode(answer)
        if total is None:
            total = RedriveReport(part.topic, part.source)
            last = _head(client, part.source)
        total.redriven += part.redriven
        total.skipped += part.skipped
        if left is not None:
            left -= part.redriven
        if not part.more or left == 0 or (last is not None and part.next_after_seq >= last):
            return total
        assert part.next_after_seq > after, "a redrive moves its position"
        after = part.next_after_seq


def _head(client: ServerConnection, topic: str) -> int | None:
    """The head of the dead-letter topic; `None` for a key that may not read it."""
    try:
        answer = client.call("GET", topic_path(topic, "?touch=false"), repeatable=True)
    except CallRefused:
        return None
    return _TOPIC_DETAILS.decode(answer).head_seq


# -- purge -----------------------------------------------------------------------------------------


class _Job(msgspec.Struct):
    seq: int = msgspec.field(name="$seq")
    lease_id: str


class _Claimed(msgspec.Struct):
    claimed: list[_Job]


_CLAIMED: Final = msgspec.json.Decoder(_Claimed)


class _Acked(msgspec.Struct):
    acked: int


_ACKED: Final = msgspec.json.Decoder(_Acked)


@command.command("purge")
@click.argument("queue")
@click.option("--all", "everything", is_flag=True, help="Also delete delayed and leased jobs.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@format_options
@server_options
def purge(queue: str, everything: bool, yes: bool, client: ServerConnection, as_json: bool) -> None:
    """Delete the jobs of QUEUE that wait for a worker, for good.

    Delayed jobs, jobs that a worker holds and jobs enqueued meanwhile stay. With --all, every job
    that exists now is deleted; a worker that holds one loses its lease.
    """
    answer = client.call("GET", topic_path(queue, "?touch=false"), repeatable=True)
    state = _TOPIC_DETAILS.decode(answer)
    if state.queue is None:
        raise Failure(f"not_a_queue: {queue!r} is a plain log")
    count = state.count if everything else state.queue.ready
    what = "all jobs" if everything else "the waiting jobs"
    confirm(f"Delete {what} of {queue}, {count:,} now, for good?", yes=yes)
    if everything:
        body = msgspec.json.encode({"before_seq": state.head_seq + 1})
        shown = client.call("POST", topic_path(queue, "/delete"), body)
        deleted = msgspec.json.decode(shown)["deleted"]
    else:
        deleted = _purge(client, queue, count)
    result = {"topic": queue, "deleted": deleted}
    show_object(msgspec.json.encode(result), as_json=as_json)


def _purge(client: ServerConnection, queue: str, count: int) -> int:
    """Claim ready jobs, up to `count`, and acknowledge them; return the number of deleted jobs."""
    node = f"purge-{random_id()}"
    deleted = claimed = 0
    while claimed < count:
        asked = {"node": node, "max": min(CALL_JOBS, count - claimed), "lease_ms": PURGE_LEASE_MS}
        body = msgspec.json.encode(asked)
        answer = client.call("POST", topic_path(queue, "/claim"), body)
        jobs = _CLAIMED.decode(answer).claimed
        if not jobs:
            break
        claimed += len(jobs)
        try:
            deleted += _ack(client, queue, node, jobs)
        except BaseException:
            held = duration_text(PURGE_LEASE_MS)
            note(f"{deleted:,} jobs were deleted; {len(jobs)} may be held by this purge for {held}")
            raise
    return deleted


def _ack(client: ServerConnection, queue: str, node: str, jobs: Sequence[_Job]) -> int:
    held = {
        "node": node,
        "seqs": [job.seq for job in jobs],
        "lease_ids": [job.lease_id for job in jobs],
    }
    answer = client.call("POST", topic_path(queue, "/ack"), msgspec.json.encode(held))
    return _ACKED.decode(answer).acked
