"""`topics pub`: publishes standard input over a WebSocket (§7).

The verb sends commands before earlier ones are acknowledged, at most `WINDOW` of them; the server
answers in order. Lines of the input and frames of the server arrive in one queue, so that one
thread, which runs `Publisher`, applies all rules. The verb reads input only as fast as
acknowledgements come.

After a broken connection the verb reconnects. It resends unacknowledged lines only under
idempotency keys. Without keys it cannot know whether they are stored, so it ends and names those
lines.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections.abc import Iterator
from typing import Any, Final

import click
import msgspec
import websockets.exceptions
import websockets.sync.client
from websockets.sync.connection import Connection

from topics_server.cli.amounts import seconds
from topics_server.cli.connection import (
    CONNECT_S,
    CallRefused,
    Failure,
    ServerConnection,
    ServerUnreachable,
    refusal,
    refused,
    server_options,
)
from topics_server.cli.data.cutting import BadLine, Cut, Cutter, Shape, whole_records
from topics_server.cli.output import format_options, note, show_object
from topics_server.runtime.clock import monotonic_ms
from topics_server.values.limits import FRAME_BYTES_MAX, MIB

WINDOW: Final = 32
BATCH_BYTES: Final = MIB
READ_BYTES: Final = 256 * 1024
# Longest wait for the acknowledgement of a command, fsync included.
ANSWER_S: Final = 60.0
RETRY: Final = "30s"
RETRY_PAUSE_S: Final = 0.25
RETRY_PAUSE_MAX_S: Final = 5.0
# Error codes of a server that is stopping or starting.
_PASSING: Final = frozenset({"shutting_down", "not_ready"})
DURABILITIES: Final = ("ephemeral", "memory", "disk", "fsync")


class PublishBatch(msgspec.Struct, gc=False):
    """Records of one command; `first_line` is its request id."""

    first_line: int
    records: list[bytes]

    @property
    def last_line(self) -> int:
        """Number of the batch's last line."""
        return self.first_line + len(self.records) - 1


class PublishPlan(msgspec.Struct, frozen=True):
    """The source and the options of a publish."""

    topic: str
    create: bool | None
    durability: str | None
    prefix: str | None  # of the idempotency keys
    retry_s: float


class PublishSummary(msgspec.Struct):
    """Counts of acknowledged lines. `deduped` counts those that an earlier run had stored."""

    topic: str
    lines: int = 0
    deduped: int = 0
    last_seq: int = 0
    elapsed_ms: int = 0


class _Answer(msgspec.Struct):
    op: str
    request_id: str | None = None
    code: str = ""
    message: str = ""
    last_seq: int = 0
    deduped: bool = False
    detail: dict[str, Any] = {}


_ANSWER: Final = msgspec.json.Decoder(_Answer)


class _Closed(msgspec.Struct):
    """Connection `number` has ended."""

    number: int
    reason: str


class _NoMore(msgspec.Struct):
    """The input has ended, with an error if there is one."""

    error: Failure | None = None


Event = PublishBatch | _Answer | _Closed | _NoMore


@click.command("pub")
@click.argument("topic")
@click.argument("source", metavar="[-]", type=click.Choice(["-"]), default="-")
@click.option("--records", is_flag=True, help="A line is a record: {data, tag, node, meta}.")
@click.option("--node", help="Node of every record whose line names none.")
@click.option(
    "--batch",
    type=click.IntRange(min=1, max=1000),
    default=None,
    metavar="N",
    help="Most records of one command; default: 100.",
)
@click.option("--create/--no-create", default=None, help="Whether to create a missing topic.")
@click.option(
    "--durability",
    type=click.Choice(DURABILITIES),
    help="Durability of the topic, if this creates it.",
)
@click.option(
    "--idempotent",
    metavar="PREFIX",
    help="A key a line, PREFIX and its number: a line that is sent again is stored once.",
)
@click.option(
    "--retry-seconds",
    "--retry",
    "retry_ms",
    type=seconds(),
    default=RETRY,
    show_default=True,
    help="How long to try again when the server is away; plain: seconds.",
)
@format_options
@server_options
def command(
    topic: str,
    source: str,
    records: bool,
    node: str | None,
    batch: int | None,
    create: bool | None,
    durability: str | None,
    idempotent: str | None,
    retry_ms: int,
    client: ServerConnection,
    as_json: bool,
) -> None:
    """Publish the lines of standard input to TOPIC as they arrive.

    A line is one record's data, stored byte for byte; with --records it is a whole record. Blank
    lines are skipped and not counted.

    With --idempotent you may publish the same input again within the topic's idempotency window: no
    line is stored twice.
    """
    assert source == "-"
    if idempotent is not None and batch is not None and batch > 1:
        raise click.UsageError("--idempotent makes a key a line: leave --batch out")
    if sys.stdin.isatty():
        note("one record a line; Ctrl-D ends")
    cutter = Cutter(whole_records() if records else Shape(), node)
    size = 1 if idempotent is not None else batch or 100
    plan = PublishPlan(topic, create, durability, idempotent, retry_ms / 1000)
    publisher = Publisher(client, plan)
    began_ms = monotonic_ms()
    try:
        publisher.run(Input(cutter, node, size))
    except KeyboardInterrupt:
        note(f"stopped; {publisher.summary.lines} lines are acknowledged")
        raise
    finally:
        publisher.close()
    publisher.summary.elapsed_ms = int(monotonic_ms() - began_ms)
    show_object(msgspec.json.encode(publisher.summary), as_json=as_json)


class Input:
    """Standard input as batches of the lines that have arrived, at most `size` lines each."""

    def __init__(self, cutter: Cutter, node: str | None, size: int) -> None:
        self._cutter = cutter
        self._node = None if node is None else msgspec.json.encode(node)
        self._size = size
        # Unbuffered: a thread that waits inside a buffered reader would block the end of the
        # process.
        self._stream = getattr(sys.stdin.buffer, "raw", sys.stdin.buffer)

    def batches(self) -> Iterator[PublishBatch]:
        """Yield every line that is not blank; raises `BadLine` after the lines before it."""
        line = 1
        for lines in self._lines():
            for first in range(0, len(lines), self._size):
                for batch in self._cut(lines[first : first + self._size], line):
                    yield batch
                    line = batch.last_line + 1

    def _lines(self) -> Iterator[list[bytes]]:
        rest: list[bytes] = []
        rest_bytes = 0
        while block := self._stream.read(READ_BYTES):
            *whole, last = block.split(b"\n")
            if whole:
                whole[0] = b"".join([*rest, whole[0]])
                rest, rest_bytes = [], 0
                if lines := [line for line in whole if line and not line.isspace()]:
                    yield lines
            rest.append(last)
            rest_bytes += len(last)
            if rest_bytes > FRAME_BYTES_MAX:
                raise Failure(f"no end of line within {FRAME_BYTES_MAX // MIB} MiB")
        line = b"".join(rest)
        if line and not line.isspace():
            yield [line]

    def _cut(self, lines: list[bytes], first_line: int) -> Iterator[PublishBatch]:
        try:
            cuts = self._cutter.cut(lines, first_line)
        except BadLine as error:
            if good := lines[: error.line - first_line]:
                yield from self._cut(good, first_line)
            raise
        batch = PublishBatch(first_line, [])
        size = 0
        for cut in cuts:
            record = self._render(cut)
            if batch.records and size + len(record) > BATCH_BYTES:
                yield batch
                batch, size = PublishBatch(batch.last_line + 1, []), 0
            batch.records.append(record)
            size += len(record)
        yield batch

    def _render(self, cut: Cut) -> bytes:
        if cut.node is None and self._node is not None:
            cut = Cut(cut.data, cut.tag, self._node, cut.meta)
        return cut.render()


class Publisher:
    """One run of the verb. `summary` is always up to date."""

    def __init__(self, client: ServerConnection, plan: PublishPlan) -> None:
        self.summary = PublishSummary(plan.topic)
        self._client = client
        self._plan = plan
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._slots = threading.Semaphore(WINDOW)
        self._waiting: dict[int, PublishBatch] = {}  # sent and not acknowledged, in order
        self._connection: Connection | None = None
        self._number = 0  # number of the connection; frames of older connections are ignored
        self._open = contextlib.ExitStack()

    def run(self, source: Input) -> None:
        """Publish all lines; raises `Failure` with the refused line."""
        threading.Thread(target=self._read, args=(source,), daemon=True).start()
        ended: _NoMore | None = None
        while ended is None or self._waiting:
            match self._next():
                case PublishBatch() as batch:
                    self._waiting[batch.first_line] = batch
                    if self._connection is None:
                        self._connect()  # sends all waiting lines
                    else:
                        self._send(batch)
                case _Answer() as answer:
                    self._take(answer)
                case _Closed(number=number, reason=reason):
                    if number == self._number:
                        self._lost(reason)
                case _NoMore() as end:
                    ended = end
        if ended.error is not None:
            raise ended.error

    def close(self) -> None:
        """Close the connection if it is open."""
        self._number += 1
        self._connection = None
        self._open.close()

    def _next(self) -> Event:
        try:
            return self._events.get(timeout=ANSWER_S if self._waiting else None)
        except queue.Empty:
            raise ServerUnreachable(
                f"{self._client.url} did not answer within {ANSWER_S:.0f} s; {self._doubt()}",
                sent=True,
            ) from None

    def _read(self, source: Input) -> None:
        """The thread of the input.

        It takes a slot for each batch; the acknowledgement releases the slot.
        """
        end = _NoMore()
        try:
            for batch in source.batches():
                self._slots.acquire()
                self._events.put(batch)
        except BadLine as error:
            end.error = Failure(f"{error}; the lines before it are stored")
        except Failure as error:
            end.error = error
        except OSError as error:
            end.error = Failure(f"standard input: {error.strerror or error}")
        self._events.put(end)

    # -- frames ----------------------------------------------------------------------------------

    def _text(self, batch: PublishBatch) -> bytes:
        plan = self._plan
        head: dict[str, Any] = {
            "op": "publish",
            "request_id": str(batch.first_line),
            "topic": plan.topic,
            "return_seqs": False,
        }
        if plan.create is not None:
            head["create"] = plan.create
        if plan.durability is not None:
            head["config"] = {"durability": plan.durability}
        if plan.prefix is not None:
            assert len(batch.records) == 1, "a key stands for one line"
            head["idempotency_key"] = f"{plan.prefix}:{batch.first_line}"
        return msgspec.json.encode(head)[:-1] + b',"records":[' + b",".join(batch.records) + b"]}"

    def _send(self, batch: PublishBatch) -> None:
        assert self._connection is not None
        try:
            self._connection.send(self._text(batch), text=True)
        except websockets.exceptions.ConnectionClosed:
            pass  # the receiving thread reports the reason

    def _take(self, answer: _Answer) -> None:
        if answer.op == "error" and answer.code in _PASSING and _line_of(answer) in self._waiting:
            return  # the end of the connection follows and decides about the line
        if answer.op == "error":
            raise Failure(self._refusal(answer))
        batch = self._waiting.pop(_line_of(answer), None)
        if answer.op != "ack" or batch is None:
            raise refused(200, "bad_answer", f"{answer.op!r} is not an answer to a publish")
        self._slots.release()
        self.summary.lines += len(batch.records)
        self.summary.deduped += len(batch.records) if answer.deduped else 0
        self.summary.last_seq = max(self.summary.last_seq, answer.last_seq)

    def _refusal(self, answer: _Answer) -> str:
        batch = self._waiting.pop(_line_of(answer), None)
        where = "" if batch is None else f"{_lines(batch.first_line, batch.last_line)}: "
        text = f"{where}{answer.code}: {answer.message}"
        if (most := answer.detail.get("max_batch_records")) is not None:
            text += f" in a command: publish with --batch {most}"
        text += f"; {self.summary.lines} lines are acknowledged"
        return f"{text}, {self._doubt()}" if self._waiting else text

    def _doubt(self) -> str:
        batches = list(self._waiting.values())
        lines = _lines(batches[0].first_line, batches[-1].last_line)
        return f"{lines} may be stored or not"

    # -- the connection --------------------------------------------------------------------------

    def _lost(self, reason: str) -> None:
        self.close()
        if not self._waiting:
            return  # it reconnects when there are lines to send
        if self._plan.prefix is None:
            raise ServerUnreachable(f"the connection broke ({reason}); {self._doubt()}", sent=True)
        note(f"the connection broke ({reason}); trying again")
        self._connect()

    def _connect(self) -> None:
        """Connect, wait for the server except at the first try, and send all unacknowledged
        lines.
        """
        is_first = self._number == 0
        give_up_ms = monotonic_ms() + (0 if is_first else self._plan.retry_s * 1000)
        pause_s = RETRY_PAUSE_S
        while True:
            try:
                self._connection = self._open.enter_context(self._dial())
                break
            except websockets.exceptions.InvalidStatus as error:
                status = error.response.status_code
                if status < 500 or monotonic_ms() > give_up_ms:
                    raise _refused(error) from None
            except (OSError, websockets.exceptions.WebSocketException) as error:
                if monotonic_ms() > give_up_ms:
                    raise ServerUnreachable(
                        _unreachable(self._client.url, error), sent=False
                    ) from None
            threading.Event().wait(pause_s)
            pause_s = min(pause_s * 2, RETRY_PAUSE_MAX_S)
        self._number += 1
        target = self._receive
        threading.Thread(target=target, args=(self._connection, self._number), daemon=True).start()
        for batch in self._waiting.values():
            self._send(batch)

    def _dial(self) -> Connection:
        url = self._client.url
        assert url.startswith("http")
        return websockets.sync.client.connect(
            f"ws{url.removeprefix('http')}/v0/ws",
            additional_headers=self._client.authorization,
            compression=None,
            proxy=None,
            open_timeout=CONNECT_S,
        )

    def _receive(self, connection: Connection, number: int) -> None:
        """The thread of one connection: passes on its frames, then its end."""
        reason = ""
        try:
            for text in connection:
                self._events.put(_ANSWER.decode(text))
        except msgspec.DecodeError as error:
            reason = f"a frame that is not from a topics server: {error}"
        except websockets.exceptions.ConnectionClosed as error:
            reason = str(error)
        self._events.put(_Closed(number, reason or "the server closed it"))


def _line_of(answer: _Answer) -> int:
    line = answer.request_id or ""
    return int(line) if line.isascii() and line.isdigit() else 0


def _lines(first: int, last: int) -> str:
    return f"line {first}" if first == last else f"lines {first} to {last}"


def _refused(error: websockets.exceptions.InvalidStatus) -> CallRefused:
    response = error.response
    retry_after = response.headers.get("Retry-After")
    return refusal(response.status_code, retry_after, bytes(response.body or b""))


def _unreachable(url: str, error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"cannot connect to {url}: no answer within {CONNECT_S:g} s"
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return f"cannot connect to {url}: {reason}"
