"""The log: text or JSON lines on standard error, written by its own thread.

Whoever logs leaves a line behind and goes on: if nobody reads standard error, only the thread waits
for it. What does not fit the queue then is dropped and counted, and the count is told once there is
room. No line holds a payload or a secret: what looks like a key is blotted out in whatever text a
library or a client's bytes bring along, and paths are told without their query. The access log is
made of values that requests leave behind (`api/access_log`) and put into words by the thread.
Called by `server.py`.
"""

from __future__ import annotations

import io
import json
import logging
import queue
import re
import select
import sys
import threading
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

from topics_server.runtime.clock import now_ms
from topics_server.runtime.metrics import log

# Lines that wait for standard error at most; beyond, they are dropped.
LINES_MAX: Final = 10_000
# How long the end of the process waits for what has not been written yet.
CLOSE_WITHIN_S: Final = 2.0
# Of a path that is told: more is of no use to a reader.
_PATH_CHARS_MAX: Final = 512
_JOINED_LINES_MAX: Final = 200
# What uvicorn logs as errors of ours, and any client can cause: they are answered.
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
        """The least level of our own lines."""
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
        """Of so many requests, one is told if `sampled`; refusals of ours (5xx) always."""
        ...


class Access(NamedTuple):
    """One answered request, as it is told."""

    at_ms: int
    method: str
    path: str
    route: str
    status: int
    bytes: int
    ms: float
    request_id: str


def blotted(text: str) -> str:
    """The text without what follows `Bearer`, `token=` or `ticket=`."""
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

    def access(self, told: Access) -> str:
        """Render one request."""
        at = logging.makeLogRecord({"created": told.at_ms / 1000, "msecs": told.at_ms % 1000})
        request_id = f" {told.request_id}" if told.request_id else ""
        return in_one_line(
            f"{self.formatTime(at)} ACCESS  {told.method} {told.path} {told.status} "
            f"{told.ms:.3f} ms {told.bytes} bytes{request_id}"
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

    def access(self, told: Access) -> str:
        """Render one request."""
        line: dict[str, Any] = {"ts": told.at_ms, "level": "info", "event": "request"}
        for name in ("method", "path", "route", "status", "bytes"):
            line[name] = getattr(told, name)
        line["ms"] = round(told.ms, 3)
        if told.request_id:
            line["request_id"] = told.request_id
        return json.dumps(line)


Lines = TextLines | JsonLines


class LogOutput:
    """The queue of lines, the thread that writes them, and how many nobody took."""

    def __init__(self, lines: Lines, write: Callable[[bytes], None], most: int = LINES_MAX) -> None:
        """`write` may block for as long as it likes, and raise `OSError`."""
        self._lines = lines
        self._write = write
        self._most = most
        self._queue: queue.SimpleQueue[str | Access | None] = queue.SimpleQueue()
        self._untold = 0
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def put(self, line: str | Access) -> None:
        """Leave a line to the thread; never waits."""
        if self._queue.qsize() >= self._most:
            self.dropped += 1
            return
        self._queue.put(line)

    def close(self, within_s: float = CLOSE_WITHIN_S) -> None:
        """Write what waits, if standard error takes it in time."""
        self._queue.put(None)
        self._thread.join(within_s)

    def _run(self) -> None:
        while True:
            first = self._queue.get()
            waiting = [first]
            while waiting[-1] is not None and len(waiting) < _JOINED_LINES_MAX:
                try:
                    waiting.append(self._queue.get_nowait())
                except queue.Empty:
                    break
            self._write_out([line for line in waiting if line is not None])
            if waiting[-1] is None:
                return

    def _write_out(self, lines: list[str | Access]) -> None:
        shown = [self._lines.access(told) if isinstance(told, Access) else told for told in lines]
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
            # Whoever read it is gone: there is nobody to tell.
            self.dropped += len(lines)


class _Handler(logging.Handler):
    """Renders a record where it is made, as what it speaks of may change; writes nothing."""

    def __init__(self, output: LogOutput, lines: Lines) -> None:
        super().__init__()
        self._output = output
        self.setFormatter(lines)

    def emit(self, record: logging.LogRecord) -> None:
        """Hand the line over."""
        self._output.put(self.format(record))


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a line of uvicorn's tells more than that a client sent something wrong."""
    return not str(record.msg).startswith(_CLIENTS_FAULTS)


def set_up(settings: LogSettings) -> LogOutput:
    """Log to standard error from now on; of libraries only warnings and worse.

    Whoever calls this calls `close` of what it returns at the end.
    """
    lines: Lines = JsonLines() if settings.log_format == "json" else TextLines()
    output = LogOutput(lines, standard_error_writer())
    logging.root.handlers[:] = [_Handler(output, lines)]
    logging.root.setLevel(logging.WARNING)
    log.setLevel(settings.log_level.upper())
    uvicorns = logging.getLogger("uvicorn.error")
    uvicorns.filters[:] = [_is_news]
    return output


def standard_error_writer() -> Callable[[bytes], None]:
    """What writes to standard error past its own buffer, whose lock the end of the process takes.

    A thread that waits in that buffer for a reader would keep the process from ending.
    """
    stream = sys.stderr
    try:
        raw = io.FileIO(stream.fileno(), "wb", closefd=False)
    except (OSError, ValueError):
        # Somebody has put a stream there that is no file.
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
    """Says which answers are told: all, or one of so many and every failure of ours."""

    __slots__ = ("_every", "_output", "_passed")

    def __init__(self, output: LogOutput, every: int) -> None:
        """`every`: 1 tells of all."""
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
    """The access log that the settings ask for, if any."""
    match settings.access_log:
        case "full":
            return AccessLog(output, 1)
        case "sampled":
            return AccessLog(output, settings.access_log_sample)
        case _:
            return None
