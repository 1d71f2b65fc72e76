"""The log: text or JSON lines on standard error, written by its own thread.

The caller adds a line to a queue and continues: if nothing reads standard error, only the thread
waits. Lines beyond the queue's limit are dropped and counted, and the count is logged once there is
room. No line holds a payload or a secret: keys are removed from texts of libraries and clients, and
paths are logged without their query. The access log stores values of requests (`api/access_log`),
which the thread renders. Called by `server.py`.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import logging.handlers
import queue
import re
import select
import sys
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

from topics_server.runtime.clock import now_ms
from topics_server.runtime.metrics import log

# The maximum of waiting lines; further ones are dropped.
LINES_MAX: Final = 10_000
# How long the end of the process waits for unwritten lines.
CLOSE_WITHIN_S: Final = 2.0
# Characters of a logged path: more are of no use to a reader.
_PATH_CHARS_MAX: Final = 512
_JOINED_LINES_MAX: Final = 200
# Marks the end of the queue: nothing is written after it.
_LAST: Final = "\0last"
# Events that uvicorn logs as errors of the server. Any client can cause them, and each gets an
# answer.
_CLIENTS_FAULTS: Final = (
    "ASGI callable returned without completing handshake",
    "Invalid UTF-8 sequence received from client",
)
_SECRET: Final = re.compile(
    r"((?:[?&;\s]|^)(?:token|ticket)=|\bbearer\s+|\btopics\.bearer\.)[^\s&;,\"'\\]+", re.IGNORECASE
)
_BREAKS: Final = re.compile(r"\s*[\r\n\v\f\x1c-\x1e\x85\u2028\u2029]\s*")
_CONTROLS: Final = re.compile(r"[\x00-\x1f\x7f]")


class LogSettings(Protocol):
    """The settings of the log; `settings.Settings` has them."""

    @property
    def log_level(self) -> str:
        """The lowest level of the server's own lines that is logged."""
        ...

    @property
    def log_format(self) -> str:
        """`text` or `json`."""
        ...

    @property
    def access_log(self) -> str:
        """`off`, `sampled` or `full`."""
        ...

    @property
    def access_log_sample(self) -> int:
        """`sampled` logs one in this many requests, and every server error (5xx)."""
        ...


class Access(NamedTuple):
    """One answered request, with the fields of its line."""

    at_ms: int
    method: str
    path: str
    route: str
    status: int
    bytes: int
    ms: float
    request_id: str


def blotted(text: str) -> str:
    """The text without the secrets after `Bearer`, `token=` and `ticket=`."""
    return _SECRET.sub(r"\1***", text)


def in_one_line(text: str) -> str:
    """The text with its lines joined and no control character."""
    return _CONTROLS.sub("?", _BREAKS.sub(" | ", text.strip()))


class TextLines(logging.Formatter):
    """Time, level, event; a traceback is in the same line."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Render one log record."""
        return in_one_line(blotted(super().format(record)))

    def access(self, request: Access) -> str:
        """Render one request."""
        at = logging.makeLogRecord({"created": request.at_ms / 1000, "msecs": request.at_ms % 1000})
        request_id = f" {request.request_id}" if request.request_id else ""
        return in_one_line(
            f"{self.formatTime(at)} ACCESS  {request.method} {request.path} {request.status} "
            f"{request.ms:.3f} ms {request.bytes} bytes{request_id}"
        )


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, event."""

    def format(self, record: logging.LogRecord) -> str:
        """Render one log record."""
        line = {
            "ts": int(record.created * 1000),
            "level": record.levelname.lower(),
            "event": blotted(record.getMessage()),
        }
        if record.exc_info:
            line["traceback"] = blotted(self.formatException(record.exc_info))
        return json.dumps(line)

    def access(self, request: Access) -> str:
        """Render one request."""
        line: dict[str, Any] = {"ts": request.at_ms, "level": "info", "event": "request"}
        for name in ("method", "path", "route", "status", "bytes"):
            line[name] = getattr(request, name)
        line["ms"] = round(request.ms, 3)
        if request.request_id:
            line["request_id"] = request.request_id
        return json.dumps(line)


Lines = TextLines | JsonLines


class LogOutput(logging.handlers.QueueListener):
    """The queue of lines, the thread that writes them, and the number of dropped lines.

    The listener's thread takes one line and all lines queued after it, and writes them in one call.
    """

    queue: queue.SimpleQueue[str | Access | None]

    def __init__(self, lines: Lines, write: Callable[[bytes], None], most: int = LINES_MAX) -> None:
        """`write` may block for any time, and may raise `OSError`."""
        super().__init__(queue.SimpleQueue())
        self._lines = lines
        self._write = write
        self._most = most
        self._untold = 0
        self.dropped = 0
        self.start()

    def put(self, line: str | Access) -> None:
        """Queue a line; never waits."""
        if self.queue.qsize() >= self._most:
            self.dropped += 1
            return
        self.queue.put(line)

    def close(self, within_s: float = CLOSE_WITHIN_S) -> None:
        """Write the waiting lines, if standard error takes them in time."""
        self.queue.put(_LAST)
        self.enqueue_sentinel()
        thread = self._thread
        assert thread is not None, "close once"
        thread.join(within_s)

    def handle(self, record: Any) -> None:
        """Write this line and the lines queued after it; runs on the log's thread."""
        waiting = [record]
        while record is not _LAST and len(waiting) < _JOINED_LINES_MAX:
            try:
                record = self.dequeue(False)
            except queue.Empty:
                break
            waiting.append(record)
        self._write_out([line for line in waiting if line is not _LAST])

    def _write_out(self, lines: list[str | Access]) -> None:
        shown = [
            self._lines.access(request) if isinstance(request, Access) else request
            for request in lines
        ]
        lost = self.dropped - self._untold
        if lost:
            self._untold += lost
            event = f"{lost} lines of the log were dropped: standard error was not read"
            made = {"msg": event, "levelname": "WARNING", "levelno": logging.WARNING}
            shown.append(self._lines.format(logging.makeLogRecord(made)))
        if not shown:
            return
        try:
            self._write("".join(f"{line}\n" for line in shown).encode("utf-8", "replace"))
        except OSError:
            # The reader of standard error has ended.
            self.dropped += len(lines)


class LineHandler(logging.handlers.QueueHandler):
    """Renders a record at once, because the objects in it may change later; writes nothing."""

    def __init__(self, output: LogOutput, lines: Lines) -> None:
        super().__init__(output.queue)
        self._output = output
        self.setFormatter(lines)

    def prepare(self, record: logging.LogRecord) -> str:
        """Render the record to its line."""
        return self.format(record)

    def enqueue(self, line: Any) -> None:
        """Queue the line; past the bound it is dropped and counted."""
        self._output.put(line)


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a line of uvicorn reports more than a client's mistake."""
    return not str(record.msg).startswith(_CLIENTS_FAULTS)


def set_up(settings: LogSettings) -> LogOutput:
    """Log to standard error from now on; from libraries only warnings and worse.

    The caller closes the returned output at the end.
    """
    lines: Lines = JsonLines() if settings.log_format == "json" else TextLines()
    output = LogOutput(lines, standard_error_writer())
    logging.root.handlers[:] = [LineHandler(output, lines)]
    logging.root.setLevel(logging.WARNING)
    log.setLevel(settings.log_level.upper())
    uvicorns = logging.getLogger("uvicorn.error")
    uvicorns.filters[:] = [_is_news]
    return output


def standard_error_writer() -> Callable[[bytes], None]:
    """A writer to standard error that bypasses Python's buffer.

    The exit takes the buffer's lock: a thread that waits in the buffer would keep the process from
    ending.
    """
    stream = sys.stderr
    try:
        raw = io.FileIO(stream.fileno(), "wb", closefd=False)
    except (OSError, ValueError):
        # A program has replaced standard error with a stream that is not a file.
        return lambda text: (stream.write(text.decode()), stream.flush())[1]

    def write(text: bytes) -> None:
        rest = memoryview(text)
        while rest:
            count = raw.write(rest)
            if count is None:
                # Standard error is non-blocking and full: sleep until its reader makes room.
                select.select([], [raw], [])
                continue
            rest = rest[count:]

    return write


class AccessLog:
    """Decides which answers are logged: all of them, or a sample and every server error."""

    __slots__ = ("_every", "_output", "_passed")

    def __init__(self, output: LogOutput, every: int) -> None:
        """`every`: log one in this many; 1 logs all."""
        self._output = output
        self._every = every
        self._passed = 0

    def note(
        self,
        method: str,
        raw_path: bytes,
        route: str,
        status: int,
        size: int,
        took_ms: float,
        request_id: bytes,
    ) -> None:
        """See `api.access_log.Noted`."""
        self._passed += 1
        if self._passed < self._every and status < 500:
            return
        if self._passed >= self._every:
            self._passed = 0
        path = raw_path[:_PATH_CHARS_MAX].partition(b"?")[0].decode("latin-1")
        request = request_id.decode("latin-1")
        self._output.put(Access(now_ms(), method[:32], path, route, status, size, took_ms, request))


def access_log(settings: LogSettings, output: LogOutput) -> AccessLog | None:
    """The access log according to the settings; None if it is off."""
    match settings.access_log:
        case "full":
            return AccessLog(output, 1)
        case "sampled":
            return AccessLog(output, settings.access_log_sample)
        case _:
            return None


def log_defect(task: asyncio.Task[None]) -> None:
    """Log the traceback of background work that ended with an error; a callback of its task."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("background work ended", exc_info=error)
