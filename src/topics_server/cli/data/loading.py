"""The work of `topics load`: compares topic and file, sends the rest.

Records must keep the order of the lines, so one request is in flight at a time. Meanwhile a thread
prepares the next bodies (reading, inflating, cutting). A few batches and the window of fingerprints
bound the memory. Each request has an idempotency key, made from all bytes of the file up to the end
of the request and from the expected seq. So a request that is repeated, in this run or right after
it was stopped, appends once.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Final, TypeVar

import msgspec
import xxhash

from topics_server.cli.connection import (
    CallRefused,
    Failure,
    ServerConnection,
    ServerUnreachable,
    topic_path,
)
from topics_server.cli.data.cutting import BadLine, Cutter, fingerprint
from topics_server.cli.data.lines import LineBatch, LineFile
from topics_server.cli.data.resume import (
    Mismatch,
    PrefixCheck,
    TailRecord,
    TailSearch,
    TopicTail,
    Unclear,
)
from topics_server.cli.paging import pages
from topics_server.cli.progress import Advance
from topics_server.cli.retries import Tell, is_passing, repeated
from topics_server.runtime.clock import monotonic_ms
from topics_server.values.limits import MIB

T = TypeVar("T")
# The number of records that are compared: enough for a batch, and little to transfer.
WINDOW_RECORDS_MAX: Final = 10_000
WINDOW_RECORDS_MIN: Final = 16
WINDOW_BYTES: Final = 32 * MIB
PREPARED_BODIES: Final = 3


class _Config(msgspec.Struct):
    idempotency_window_ms: int = 0


class _State(msgspec.Struct):
    head_seq: int
    count: int
    bytes: int
    config: _Config


_STATE: Final = msgspec.json.Decoder(_State)


class _Appended(msgspec.Struct):
    first_seq: int
    last_seq: int
    deduped: bool = False


_APPENDED: Final = msgspec.json.Decoder(_Appended)


class _Record(msgspec.Struct):
    seq: int = msgspec.field(name="$seq")
    data: msgspec.Raw
    tag: str | None = msgspec.field(name="$tag", default=None)
    node: str | None = msgspec.field(name="$node", default=None)
    meta: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_RECORD: Final = msgspec.json.Decoder(_Record)


class LoadPlan(msgspec.Struct, frozen=True):
    """The source and the options of a load. Sizes in bytes, times in seconds."""

    topic: str
    batch_records: int
    batch_bytes: int
    from_line: int | None
    append_anyway: bool
    create: bool
    retry_s: float


class Result(msgspec.Struct):
    """The result of a load.

    `lines` counts the whole file; `stored` counts the lines that the topic already had.
    """

    topic: str
    lines: int
    stored: int
    loaded: int
    head_seq: int
    elapsed_ms: int


class _Body(msgspec.Struct, gc=False):
    first_line: int
    last_line: int
    position: int
    count: int
    text: bytes  # empty: nothing to send, because the topic has the lines


def prefetched(items: Iterator[T], depth: int = PREPARED_BODIES) -> Iterator[T]:
    """Yield the same items, made by a thread up to `depth` ahead; re-raise its exceptions here.

    The thread is a daemon, so a thread that waits for standard input does not keep the process
    alive.
    """
    made: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(depth)

    def make() -> None:
        try:
            for item in items:
                made.put((item, None))
        except BaseException as error:  # the reader of the queue raises it again
            made.put((None, error))
        else:
            made.put((None, StopIteration()))

    threading.Thread(target=make, name="prepare", daemon=True).start()
    while True:
        item, error = made.get()
        if isinstance(error, StopIteration):
            return
        if error is not None:
            raise error
        assert item is not None
        yield item


class Loading:
    """One load of one file into one topic."""

    def __init__(
        self, client: ServerConnection, file: LineFile, cutter: Cutter, plan: LoadPlan, tell: Tell
    ) -> None:
        self._client = client
        self._tell = tell
        self._file = file
        self._cutter = cutter
        self._plan = plan
        self._window_ms = 0
        self._next_seq = 1
        self.strangers = 0  # requests after another client had appended

    def run(self, advance: Advance) -> Result:
        """Compare the topic with the file and send the rest; raises `Failure`."""
        started_ms = monotonic_ms()
        tail = self._read_tail()
        self._next_seq = tail.head_seq + 1
        stored, check = self._where_to_begin(tail)
        lines = loaded = 0
        try:
            for body in prefetched(self._bodies(stored, check)):
                if body.text:
                    appended = self._send(body)
                    loaded += body.count
                    self.strangers += appended.first_seq != self._next_seq
                    self._next_seq = appended.last_seq + 1
                lines = body.last_line
                advance(lines, body.position, bool(body.text))
        except BadLine as error:
            raise Failure(
                f"{self._file.path}: {error} ({self._progress(stored, loaded)})"
            ) from None
        except Mismatch as error:
            raise self._refusal(error) from None
        if check is not None:
            try:
                check.stored(lines)
            except Mismatch as error:
                raise self._refusal(error) from None
        elapsed_ms = round(monotonic_ms() - started_ms)
        topic = self._plan.topic
        return Result(topic, lines, min(stored, lines), loaded, self._next_seq - 1, elapsed_ms)

    def _progress(self, stored: int, loaded: int) -> str:
        """Text for the error about a wrong line: the stored lines, and the effect of a second
        run.
        """
        if not stored + loaded:
            return "nothing was appended"
        return (
            f"{loaded} records were appended; a second run continues after line {stored + loaded}"
        )

    def _refusal(self, reason: object) -> Failure:
        return Failure(
            f"the records of topic {self._plan.topic} are not the first lines of "
            f"{self._file.path}: {reason}. Nothing was appended. Load the file into another topic, "
            "or pass --append-anyway to append all of it, or --from-line N to begin at line N"
        )

    # -- compare with the topic ----------------------------------------------------------------

    def _read_tail(self) -> TopicTail:
        path = topic_path(self._plan.topic, "?touch=false")
        try:
            state = _STATE.decode(self._client.call("GET", path, repeatable=True))
        except CallRefused as error:
            if error.code != "topic_not_found":
                raise
            self._window_ms = 120_000  # the configuration of a topic that this load creates
            return TopicTail(0)
        self._window_ms = state.config.idempotency_window_ms
        if state.head_seq == 0 or self._plan.from_line is not None:
            return TopicTail(state.head_seq)
        average = max(1, state.bytes // max(1, state.count))
        window = max(WINDOW_RECORDS_MIN, min(WINDOW_RECORDS_MAX, WINDOW_BYTES // average))
        records: list[TailRecord] = []
        after = max(0, state.head_seq - window)
        for page in pages(self._client, self._plan.topic, after, {"include_tags": True}):
            for raw in page.records:
                record = _RECORD.decode(raw)
                meta = None if record.meta is msgspec.UNSET else bytes(record.meta)
                print_ = fingerprint(bytes(record.data), record.tag, record.node, meta)
                if record.seq <= state.head_seq:
                    records.append(TailRecord(record.seq, print_))
            if page.next_from_seq >= state.head_seq:
                break  # another client may append faster than this one reads
        return TopicTail(state.head_seq, tuple(records))

    def _where_to_begin(self, tail: TopicTail) -> tuple[int, PrefixCheck | None]:
        """Return the number of stored lines.

        While a check still reads lines, this is only an assumption: `tail.head_seq`.
        """
        if self._plan.from_line is not None:
            return self._plan.from_line - 1, None
        if tail.head_seq == 0:
            return 0, None
        try:
            check = PrefixCheck(tail)
            if not self._plan.append_anyway:
                return tail.head_seq, check
            if not self._file.is_rewindable:
                raise Failure(
                    "--append-anyway reads a file twice where the topic is not empty: give a file "
                    "instead of standard input, or --from-line N"
                )
            return self._checked(check), None
        except Mismatch as error:
            if not self._plan.append_anyway:
                raise self._refusal(error) from None
        return self._searched(TailSearch(tail)), None

    def _checked(self, check: PrefixCheck) -> int:
        lines = 0
        for batch in self._batches():
            self._compare(check, batch)
            lines = batch.last_line
        return check.stored(lines)

    def _searched(self, search: TailSearch) -> int:
        try:
            for batch in prefetched(self._batches()):
                cuts = self._cutter.cut(batch.lines, batch.first_line)
                search.feed(self._cutter.prints(cuts))
            return search.stored()
        except BadLine as error:
            raise Failure(f"{self._file.path}: {error} (nothing was appended)") from None
        except Unclear as error:
            raise Failure(
                f"cannot tell how much of {self._file.path} is in {self._plan.topic}: {error}. "
                "Say it with --from-line N (1 = all of it)"
            ) from None

    def _compare(self, check: PrefixCheck, batch: LineBatch) -> None:
        if check.wants(batch.first_line, len(batch.lines)):
            cuts = self._cutter.cut(batch.lines, batch.first_line)
            check.feed(batch.first_line, self._cutter.prints(cuts))

    # -- send the rest -------------------------------------------------------------------------

    def _batches(self) -> Iterator[LineBatch]:
        return self._file.batches(self._plan.batch_records, self._plan.batch_bytes)

    def _bodies(self, stored: int, check: PrefixCheck | None) -> Iterator[_Body]:
        """Yield bodies in order, with empty ones for stored batches. Runs in the other thread."""
        seen = xxhash.xxh3_128()
        expected_seq = self._next_seq
        for batch in self._batches():
            seen.update(b"\n".join(batch.lines))
            seen.update(b"\n")
            if check is not None:
                self._compare(check, batch)
            skipped = min(len(batch.lines), max(0, stored - batch.first_line + 1))
            lines = batch.lines[skipped:]
            first_line = batch.first_line + skipped
            text = b""
            if lines:
                if check is not None:
                    check.stored(batch.last_line)  # fails before it sends the first byte
                key = f"load-{seen.hexdigest()}-{expected_seq}"
                cuts = self._cutter.cut(lines, first_line)
                text = self._cutter.body(cuts, key, create=self._plan.create)
                expected_seq += len(lines)
            yield _Body(first_line, batch.last_line, batch.position, len(lines), text)

    def _send(self, body: _Body) -> _Appended:
        """Append one batch; retry after 429, restarts and broken connections.

        Report the first failure of each kind when it happens, and the end of the retries.
        """
        path = topic_path(self._plan.topic, "?return_seqs=false")
        lines = f"lines {body.first_line} to {body.last_line}"
        if body.first_line == body.last_line:
            lines = f"line {body.first_line}"
        try:
            answer, was_reported = repeated(
                lambda: self._client.call("POST", path, body.text),
                self._may_repeat,
                self._plan.retry_s,
                lines,
                self._tell,
            )
        except CallRefused as error:
            if error.most_records is not None:
                raise Failure(
                    f"{error.message} in a request; run it again with "
                    f"--batch-records {error.most_records}"
                ) from None
            raise Failure(_unconfirmed(error, lines)) from None
        except ServerUnreachable as error:
            raise ServerUnreachable(_unconfirmed(error, lines), sent=error.sent) from None
        if was_reported:
            self._tell(f"the server has appended {lines} now")
        return _APPENDED.decode(answer)

    def _may_repeat(self, error: CallRefused | ServerUnreachable) -> bool:
        if isinstance(error, CallRefused):
            return is_passing(error)
        # The server may have executed the request, so repeating it is safe only with its key.
        return not error.sent or self._window_ms >= 2000 * self._plan.retry_s


def _unconfirmed(error: Failure, lines: str) -> str:
    return f"{error.message} ({lines} not confirmed; run it again to continue)"
