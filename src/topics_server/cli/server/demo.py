"""`topics demo`: runs a server with live events, a router, a queue with workers and a view.

The folder of this server is removed at the end. The demo replays the GitHub webhook events of
`topics_server/demo` into it. The topics have caps, so a demo that is forgotten does not fill a
disk. Ctrl-C, SIGTERM and SIGHUP end the demo and its server.
"""

from __future__ import annotations

import contextlib
import gzip
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import webbrowser
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from xml.sax.saxutils import escape

import click
import msgspec

from topics_server.cli.connection import Failure, ServerConnection, ServerUnreachable
from topics_server.cli.server.child import child_server
from topics_server.client import ClientError, Job, Queue, ViewClient
from topics_server.runtime.clock import monotonic_ms

EVENTS: Final = "webhooks"
JOBS: Final = "triage"
DEAD: Final = "triage.dead"
VIEW: Final = "by-event"
# The events that become jobs of the workers.
ROUTED: Final = "issue*"
WORKERS: Final = 2
PORT: Final = 4000
STATUS_EVERY_MS: Final = 2_000
CLAIM_WAIT_MS: Final = 500
# How long a worker takes for a job, so that jobs in flight are visible.
WORK_S: Final = 0.3
# The number of events in the picture.
BARS: Final = 15

Event = dict[str, Any]


@click.command("demo")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    help=f"Port of the server; default: {PORT} if it is free, else any.",
)
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Keep the data here, and draw a picture of it at the end (events.svg); "
    "default: a temporary folder, removed at the end.",
)
@click.option(
    "--rate",
    type=click.FloatRange(0.1, 1000),
    default=5.0,
    show_default=True,
    metavar="N",
    help="Events a second.",
)
@click.option("--once", is_flag=True, help="Replay the events once at full speed, then end.")
@click.option(
    "--open/--no-open",
    "is_opened",
    default=None,
    help="Open the console in a browser; default: if there is a display, and not with --once.",
)
@click.option("--display", envvar=["DISPLAY", "WAYLAND_DISPLAY"], hidden=True)
def command(
    port: int | None,
    data_dir: Path | None,
    rate: float,
    once: bool,
    is_opened: bool | None,
    display: str | None,
) -> None:
    """Show everything at once: a server with live events, workers, a router and a view.

    For example: topics demo --rate 20
    """
    events = webhook_events()
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: stop.set())
    with contextlib.ExitStack() as held:
        if data_dir is None:
            folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="topics-demo-")))
        else:
            folder = data_dir
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        bound = free_port() if port is None else port
        process, url = held.enter_context(child_server(folder, bound, stop))
        if stop.is_set():
            return
        client = ServerConnection(url)
        set_up(client, url)
        introduce(url, folder, is_kept=data_dir is not None, rate=None if once else rate)
        # Without a display, a text browser would take over the terminal.
        has_display = bool(display) or sys.platform == "darwin"
        if is_opened or (is_opened is None and not once and has_display):
            webbrowser.open(f"{url}/console")
        held.enter_context(working(url, stop, 0.0 if once else WORK_S))
        EventReplay(client, url, events, process, stop).run(rate=None if once else rate)
        if data_dir is not None:
            draw(url, folder)


def webhook_events() -> list[Event]:
    """The events in the package, in mixed order; `demo/README.md` has the licence."""
    path = Path(__file__).parents[2] / "demo" / "github-webhooks.jsonl.gz"
    lines = gzip.decompress(path.read_bytes()).splitlines()
    # The file is sorted by event.
    return [msgspec.json.decode(line) for line in sorted(lines, key=zlib.crc32)]


# -- the data ------------------------------------------------------------------------------------


def free_port() -> int:
    """The usual port, or 0 if another process listens there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", PORT))
        except OSError:
            return 0
    return PORT


def set_up(client: ServerConnection, url: str) -> None:
    """Create the topics, the router and the view, unless they exist."""
    queue = {"type": "queue", "lease_ms": 10_000, "max_deliveries": 2, "dead_letter": DEAD}
    for topic, config in (
        (EVENTS, {"cap_records": 100_000}),
        (DEAD, {"cap_records": 1_000}),
        (JOBS, {**queue, "cap_records": 100_000}),
    ):
        client.call("PUT", f"/v0/topics/{topic}", msgspec.json.encode(config))
    router = {"source": EVENTS, "dest": JOBS, "filter": ["tag", "Glob", ROUTED]}
    client.call("PUT", "/v0/routers/webhooks-%3Etriage", msgspec.json.encode(router))
    with ViewClient(EVENTS, VIEW, url=url) as view:
        view.define(shortcut={"count_by_tag": True})


def introduce(url: str, folder: Path, *, is_kept: bool, rate: float | None) -> None:
    """Print what runs and where to see it."""
    speed = "once, at full speed" if rate is None else f"{rate:g} a second; Ctrl-C ends the demo"
    where = f" --url {url}" if url != f"http://127.0.0.1:{PORT}" else ""
    click.echo(f"""console   {url}/console
data      {folder}{"" if is_kept else " (removed at the end)"}
events    329 GitHub webhooks into {EVENTS}, {speed}
          a router copies those about issues to the queue {JOBS} for {WORKERS} workers,
          jobs about deleted things fail and go to {DEAD}, a view counts the events
try       topics tail {EVENTS}{where}
          topics queue {JOBS}{where}
          topics view query {EVENTS} {VIEW} top{where}""")


# -- the workers ---------------------------------------------------------------------------------


class JobRefused(Exception):
    """A job that the workers of the demo cannot do."""


def triage(job: Job) -> None:
    """Do the work of one job."""
    if job.data["payload"].get("action") == "deleted":
        raise JobRefused("what this is about was deleted")


@contextlib.contextmanager
def working(url: str, stop: threading.Event, work_s: float) -> Iterator[None]:
    """Run workers in threads until the block ends. A job takes `work_s`."""
    over = threading.Event()
    threads = [
        threading.Thread(target=work, args=(url, f"worker-{number}", stop, over, work_s))
        for number in range(1, WORKERS + 1)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def work(url: str, node: str, stop: threading.Event, over: threading.Event, work_s: float) -> None:
    """Claim jobs one by one. Each claim carries the ack of the job before."""
    finished: list[Job] = []
    with Queue(JOBS, url=url, patience_ms=0) as jobs:
        while not over.is_set():
            try:
                claimed = jobs.claim(node, wait_ms=CLAIM_WAIT_MS, finished=finished)
                finished = []
                for job in claimed.jobs:
                    stop.wait(work_s)
                    try:
                        triage(job)
                    except JobRefused as error:
                        jobs.nack(node, [job], error=str(error))
                    else:
                        finished.append(job)
            except ClientError:
                over.wait(1.0)  # the server is away; leases end by themselves
        with contextlib.suppress(ClientError):
            if finished:
                jobs.ack(node, finished)


# -- the events ----------------------------------------------------------------------------------


class EventReplay:
    """Appends the events and prints the progress."""

    def __init__(
        self,
        client: ServerConnection,
        url: str,
        events: list[Event],
        process: subprocess.Popen[bytes],
        stop: threading.Event,
    ) -> None:
        self._client = client
        self._url = url
        self._events = events
        self._process = process
        self._stop = stop
        self._last_seq = 0

    def run(self, rate: float | None) -> None:
        """Replay for ever, or once and wait until the workers have no job left."""
        try:
            if rate is None:
                for event in self._events:
                    if self._stop.is_set():
                        return
                    self._append(event)
                while not self._stop.wait(0.1) and self._jobs()[:2] != (0, 0):
                    continue
                self._tell()
                return
            said_ms = began_ms = monotonic_ms()
            count = 0
            while not self._stop.wait(max(0.0, count / rate - (monotonic_ms() - began_ms) / 1000)):
                self._append(self._events[count % len(self._events)])
                count += 1
                if monotonic_ms() - said_ms >= STATUS_EVERY_MS:
                    said_ms = monotonic_ms()
                    self._tell()
        except (ServerUnreachable, ClientError) as error:
            if self._process.poll() is None:
                raise
            raise Failure("the server of the demo has ended") from error

    def _append(self, event: Event) -> None:
        body = {"records": [{"data": event, "tag": event["event"]}], "node": "github"}
        answer = self._client.call("POST", f"/v0/topics/{EVENTS}", msgspec.json.encode(body))
        self._last_seq = msgspec.json.decode(answer)["last_seq"]

    def _jobs(self) -> tuple[int, int, int]:
        """The counts of waiting, leased and dead jobs."""
        state = msgspec.json.decode(self._client.call("GET", f"/v0/topics/{JOBS}"))
        counters = state["queue"]
        waiting = state["count"] - counters["in_flight"]
        return waiting, counters["in_flight"], counters["dead_lettered"]

    def _tell(self) -> None:
        waiting, in_flight, dead = self._jobs()
        with ViewClient(EVENTS, VIEW, url=self._url) as view:
            rows = view.query(name="top", after=self._last_seq).dicts()[:3]
        top = ", ".join(f"{row['tag']} {row['count']}" for row in rows)
        click.echo(
            f"{EVENTS} {self._last_seq}; {JOBS} {waiting} waiting, {in_flight} in flight, "
            f"{dead} dead; most: {top}"
        )


# -- the picture ---------------------------------------------------------------------------------


def draw(url: str, folder: Path) -> None:
    """Write a bar chart of the most frequent events to the folder."""
    with ViewClient(EVENTS, VIEW, url=url) as view:
        rows = view.query(name="top").dicts()[:BARS]
    path = folder / "events.svg"
    path.write_text(bar_chart([(row["tag"], row["count"]) for row in rows]), "utf-8")
    click.echo(f"picture   {path}")


def bar_chart(bars: Sequence[tuple[str, int]]) -> str:
    """Horizontal bars with their names and counts, as an SVG for bright and dark backgrounds."""
    most = max((count for _, count in bars), default=1)
    height = 24 * len(bars) + 16
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {height}" width="720" '
        f'height="{height}" font-family="sans-serif" font-size="13" role="img" '
        'aria-label="Webhook events by name">',
        f'<rect width="720" height="{height}" fill="#fff"/>',
    ]
    for index, (name, count) in enumerate(bars):
        top, width = 8 + 24 * index, round(380 * count / most)
        lines += [
            f'<text x="232" y="{top + 16}" text-anchor="end" fill="#222">{escape(name)}</text>',
            f'<rect x="240" y="{top + 3}" width="{width}" height="18" rx="2" fill="#3b6ea8"/>',
            f'<text x="{248 + width}" y="{top + 16}" fill="#222">{count:,}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])
