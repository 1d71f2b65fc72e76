"""`topics work`: runs a command for every job of a queue (§10).

The worker is that of `topics_server.client`. This module runs the command: one process group for
each job, with the job on its standard input. The group is ended when the lease is lost, or when a
stop has waited for `grace`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Mapping, Sequence
from typing import Final

import click
import msgspec

from topics_server.cli.amounts import duration
from topics_server.cli.connection import (
    CallRefused,
    ServerConnection,
    ServerUnreachable,
    server_options,
)
from topics_server.cli.output import note
from topics_server.client import Backoff, ClientError, Job, Stats, Worker
from topics_server.client import Refused as RefusedForGood

# The wait between SIGTERM and SIGKILL.
KILL_AFTER_S: Final = 2.0
# The wait between two checks of a process group that is ending.
POLL_S: Final = 0.02
_ENV: Final = "env"


class CommandFailed(Exception):
    """The command of a job exited with a code other than 0."""


@click.command("work", context_settings={"ignore_unknown_options": True})
@click.argument("queue")
@click.argument(
    "words", metavar="-- COMMAND [ARGS]...", nargs=-1, required=True, type=click.UNPROCESSED
)
@click.option(
    "--concurrency",
    type=click.IntRange(1, 1000),
    default=1,
    show_default=True,
    metavar="N",
    help="Most commands at a time.",
)
@click.option(
    "--lease-ms",
    "--lease",
    "lease_ms",
    type=duration(100, 86_400_000),
    help="Lease of a job, extended while its command runs; default: the queue's.",
)
@click.option("--node", help="This worker's name; default: host, process and a random part.")
@click.option("--push/--poll", "push", default=None, help="Use only a stream, or only claims.")
@click.option("--whole", is_flag=True, help="Pass the whole job to the command, not only its data.")
@click.option(
    "--retry-ms",
    "--retry",
    "retry_ms",
    type=duration(1),
    default="1s",
    show_default=True,
    help="Back-off after a first failure; doubles, with jitter.",
)
@click.option(
    "--retry-max-ms",
    "--retry-max",
    "retry_max_ms",
    type=duration(1),
    default="5m",
    show_default=True,
    help="The longest back-off.",
)
@click.option(
    "--grace-ms",
    "--grace",
    "grace_ms",
    type=duration(),
    default="20s",
    show_default=True,
    help="How long a stop waits for running commands.",
)
@server_options
def command(
    queue: str,
    words: tuple[str, ...],
    concurrency: int,
    lease_ms: int | None,
    node: str | None,
    push: bool | None,
    whole: bool,
    retry_ms: int,
    retry_max_ms: int,
    grace_ms: int,
    client: ServerConnection,
) -> None:
    """Run COMMAND for every job of QUEUE, until SIGTERM, SIGHUP or Ctrl-C.

    The job's data is its standard input; TOPICS_JOB_SEQ, TOPICS_JOB_DELIVERIES and TOPICS_JOB_TAG
    are in its environment. Exit code 0 deletes the job; any other code, or a signal, releases the
    job for a later try. If a job's lease is lost, its command is ended.

    For example: topics work mails --concurrency 4 -- sh -c 'jq -r .to | xargs send-mail'
    """
    if "=" in words[0] or shutil.which(words[0]) is None:
        raise click.UsageError(f"there is no command {words[0]!r}")
    if retry_max_ms < retry_ms:
        raise click.UsageError("--retry-max-ms must be at least --retry-ms")
    _say_what_happens()
    runner = Runner(words, whole=whole)
    try:
        worker = Worker(
            runner,
            queue,
            url=client.url,
            token=client.token,
            concurrency=concurrency,
            lease_ms=lease_ms,
            node=node,
            push="auto" if push is None else "always" if push else "never",
            backoff=Backoff(base_ms=retry_ms, cap_ms=retry_max_ms),
            grace_ms=grace_ms,
        )
    except UnicodeEncodeError:
        raise  # `main` reports it, as for all verbs
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    try:
        note(_summary(worker.run()))
    except RefusedForGood as error:
        raise CallRefused(error) from None
    except ClientError as error:
        raise ServerUnreachable(str(error), sent=True) from None


def _summary(stats: Stats) -> str:
    counts = msgspec.structs.asdict(stats)
    return "stopped; " + ", ".join(f"{count} {name}" for name, count in counts.items() if count)


class _Lines(logging.Handler):
    """Prints the worker's messages as lines of standard error, without tracebacks."""

    def emit(self, record: logging.LogRecord) -> None:
        # Standard error may be closed; the worker continues.
        with contextlib.suppress(OSError):
            note(record.getMessage())


def _say_what_happens() -> None:
    logger = logging.getLogger("topics_server.client")
    logger.handlers[:] = [_Lines(logging.WARNING)]
    logger.propagate = False


class Runner:
    """The handler of the worker: runs the command for one job."""

    def __init__(self, words: Sequence[str], *, whole: bool) -> None:
        self._words = words
        self._whole = whole

    async def __call__(self, job: Job) -> None:
        """Return when the command exits with 0; raise `CommandFailed` for any other end."""
        # Use a file, not a pipe: if the worker is killed now, the command must not read half a job.
        with tempfile.TemporaryFile() as stdin:
            stdin.write(whole(job) if self._whole else job.raw)
            stdin.seek(0)
            process = await asyncio.create_subprocess_exec(
                _ENV,
                *(f"{name}={value}" for name, value in environment(job).items()),
                *self._words,
                stdin=stdin,
                # Use a new process group: then Ctrl-C on the terminal reaches only the worker, and
                # the worker can end the children.
                start_new_session=True,
            )
        ending = asyncio.create_task(process.wait())
        losing = asyncio.create_task(job.lost.wait_async())
        try:
            await asyncio.wait({ending, losing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            losing.cancel()
            if process.returncode is None and not ending.done():
                await asyncio.shield(_end(process))
            ending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(ending, losing, return_exceptions=True)
        if process.returncode != 0:
            raise CommandFailed(_how(process.returncode))


def environment(job: Job) -> Mapping[str, str]:
    """The variables that a command gets in addition to the worker's environment."""
    found = {"TOPICS_JOB_SEQ": str(job.seq), "TOPICS_JOB_DELIVERIES": str(job.deliveries)}
    # Set all variables: an inherited value would belong to the job of an outer worker.
    return {**found, "TOPICS_JOB_TAG": (job.tag or "").replace("\0", "")}


def whole(job: Job) -> bytes:
    """Return a job as one JSON value, with its data byte for byte."""
    fields: dict[str, object] = {"$seq": job.seq, "$ts": job.ts_ms, "deliveries": job.deliveries}
    if job.tag is not None:
        fields["$tag"] = job.tag
    if job.trace is not None:
        fields["$trace"] = job.trace
    fields["data"] = msgspec.Raw(job.raw)
    if job.raw_meta is not None:
        fields["meta"] = msgspec.Raw(job.raw_meta)
    return msgspec.json.encode(fields)


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        return f"the command was ended by signal {-code}"
    return f"the command exited with {code}"


async def _end(process: asyncio.subprocess.Process) -> None:
    """End the process group of a command: SIGTERM first, then SIGKILL for the rest."""
    _signal_group(process.pid, signal.SIGTERM)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(KILL_AFTER_S):
            await process.wait()
            # The system does not report when a process group becomes empty, so poll.
            while _signal_group(process.pid, 0):  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
    _signal_group(process.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(KILL_AFTER_S):
            await process.wait()
            return
    raise CommandFailed(f"process {process.pid} cannot be ended")


def _signal_group(group: int, number: int) -> bool:
    """Signal a process group (0 only checks it); return whether it still has a process."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True
