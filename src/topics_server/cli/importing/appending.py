"""Appends the batches of a source to a topic, each once and in order.

The topic itself stores the position in the source, as the state of a producer: the batch that ends
at position p is sent with `Producer-Epoch` p and `Producer-Seq` 0. A producer's epoch only rises,
and the topic stores it in the same frame as the records. So the epoch shows the progress of the
import, even after a kill of either process, and the server detects a batch that is sent twice. The
epoch's low `CHECK_BITS` bits are a checksum, by which the source detects that it was changed.

Two imports of one source could send batches that overlap. Therefore each batch is appended only if
the head is the one that the importer read before (`if.head_seq`). If another client has appended
meanwhile, the importer reads its position and the head again.

A topic forgets a producer that has appended nothing for 7 days. Then the importer finds the
position from the stamps of the topic's records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from topics_server.cli.connection import (
    Answer,
    CallRefused,
    Failure,
    ServerConnection,
    ServerUnreachable,
    topic_path,
)
from topics_server.cli.importing.stamping import STAMP
from topics_server.cli.paging import pages
from topics_server.cli.retries import Tell, is_passing, repeated
from topics_server.client.producing.targets import (
    JSON,
    NUMBER_MAX,
    Accepted,
    Beaten,
    Repeated,
    StampGap,
    Target,
    number,
)
from topics_server.runtime.clock import now_ms

CHECK_BITS: Final = 13
POSITION_MAX: Final = 2 ** (53 - CHECK_BITS) - 1
CHECK_MASK: Final = 2**CHECK_BITS - 1
# The topic still remembers the producers of records newer than this. It forgets them after 7 days;
# a day is subtracted because clocks may differ.
FORGOTTEN_MS: Final = 6 * 86_400_000
# How often another client may append first before the import gives up.
OVERTAKEN_MAX: Final = 1_000
_PROBE: Final = b'{"records":[{"data":null}],"create":false}'


class SourcePlace(msgspec.Struct, frozen=True):
    """The imported position of a source.

    `check` is None if the position comes from the stamps of records.
    """

    position: int
    check: int | None


class ImportBatch(msgspec.Struct, frozen=True, gc=False):
    """Records to append, as JSON texts, and the place behind them."""

    records: Sequence[bytes]
    position: int
    check: int
    what: str  # for messages: "lines 1 to 9"


class _State(msgspec.Struct):
    head_seq: int


_STATE: Final = msgspec.json.Decoder(_State)


class _Stamp(msgspec.Struct):
    source: str = msgspec.field(name="from", default="")
    line: int = 0
    seq: int = 0


class _Meta(msgspec.Struct):
    stamp: _Stamp | None = msgspec.field(name=STAMP, default=None)


_META: Final = msgspec.json.Decoder(_Meta)


class _StampedRecord(msgspec.Struct):
    seq: int = msgspec.field(name="$seq")
    ts: int = msgspec.field(name="$ts")
    meta: msgspec.Raw = msgspec.Raw()


_STAMPED_RECORD: Final = msgspec.json.Decoder(_StampedRecord)


class Appending:
    """The import of one source into one topic."""

    def __init__(
        self,
        client: ServerConnection,
        topic: str,
        source: str,
        *,
        create: bool,
        retry_s: float,
        tell: Tell,
    ) -> None:
        self.topic = topic
        self.head_seq = 0
        self._client = client
        self._source = source
        self._create = create
        self._retry_s = retry_s
        self._tell = tell
        self._producer = f"import:{source}"
        self._path = topic_path(topic, "?return_seqs=false")
        self._target = Target(url=client.url, path=self._path, content_type=JSON, is_topic=True)
        self._at = 0

    # -- where to continue ------------------------------------------------------------------------

    def resume(self, *, append_anyway: bool) -> SourcePlace | None:
        """The imported position of the source; None if nothing of it is imported. Raises `Failure`.

        A topic with records, but none of this source, is refused unless `append_anyway`.
        """
        self.head_seq = self._head(is_first=True)
        epoch = self._epoch()
        place = None if epoch is None else SourcePlace(epoch >> CHECK_BITS, epoch & CHECK_MASK)
        if place is None and self.head_seq:
            place = self._place_by_stamps()
        if place is None and self.head_seq and not append_anyway:
            raise Failure(
                f"topic {self.topic} has had {self.head_seq} records, and nothing shows that they "
                "came from this source. Nothing was imported. Import into another topic, or pass "
                "--append-anyway to import behind them"
            )
        self._at = 0 if place is None else place.position
        return place

    def _head(self, *, is_first: bool = False) -> int:
        path = topic_path(self.topic, "?touch=false")
        answer = self._asked("GET", path, None, {}, is_first=is_first)
        if answer.status == 404:
            return 0
        if answer.status >= 300:
            raise answer.refusal
        return _STATE.decode(answer.body).head_seq

    def _epoch(self) -> int | None:
        """The producer's epoch in the topic. The request stores nothing."""
        answer = self._asked("POST", self._path, _PROBE, self._headers(0, NUMBER_MAX))
        if answer.status == 404 and answer.refusal.code == "topic_not_found":
            return None
        match self._target.verdict(answer.status, answer.headers, answer.body):
            case StampGap(expected=0):
                return None
            case Beaten(epoch=epoch):
                return epoch
            case Accepted() | Repeated() | StampGap():
                raise Failure("bad_answer: the server does not support producers")
            case _:
                raise answer.refusal

    def _place_by_stamps(self) -> SourcePlace | None:
        """The position from the stamps of records whose producer the topic no longer remembers."""
        until_ms = now_ms() - FORGOTTEN_MS
        position = 0
        name = STAMP.encode()
        for page in pages(self._client, self.topic, 0, {}):
            for raw in page.records:
                record = _STAMPED_RECORD.decode(raw)
                if record.ts > until_ms:
                    return SourcePlace(position, None) if position else None
                if name not in bytes(record.meta):
                    continue
                try:
                    stamp = _META.decode(record.meta).stamp
                except msgspec.ValidationError:
                    continue  # a member of that name which no import wrote
                if stamp is not None and stamp.source == self._source:
                    position = max(position, stamp.line or stamp.seq)
        return SourcePlace(position, None) if position else None

    # -- append --------------------------------------------------------------------------------

    def send(self, batch: ImportBatch) -> None:
        """Append a batch once. Raises `Failure`."""
        assert self._at < batch.position, "positions ascend"
        if batch.position > POSITION_MAX:
            raise Failure(f"a source has at most {POSITION_MAX} positions, not {batch.position}")
        epoch = batch.position << CHECK_BITS | batch.check & CHECK_MASK
        for _ in range(OVERTAKEN_MAX):
            answer = self._posted(batch, epoch)
            match self._target.verdict(answer.status, answer.headers, answer.body):
                case Accepted(first_seq=int(first_seq)):
                    self.head_seq = first_seq + len(batch.records) - 1
                    break
                case Repeated():
                    # An earlier try, or another import of the same source, has stored this batch.
                    last_seq = number(answer.headers, "topic-last-seq")
                    self.head_seq = last_seq if last_seq is not None else self._head()
                    break
                case Beaten():
                    raise self._overtaken()
                case _:
                    self._make_way(answer, batch)
        else:
            raise Failure(
                f"other clients append to topic {self.topic} too often: {batch.what} found no "
                "place. Run it again, or import into a topic of its own"
            )
        self._at = batch.position

    def _make_way(self, answer: Answer, batch: ImportBatch) -> None:
        """After a failed condition: read the head again.

        Raises if another import of this source runs.
        """
        refused = answer.refusal
        if refused.code != "condition_failed":
            if refused.most_records is not None:
                raise Failure(
                    f"{refused.message} in a request; run it again with "
                    f"--batch-records {refused.most_records}"
                )
            raise Failure(f"{refused.message} ({batch.what}; nothing of them was imported)")
        epoch = self._epoch()
        if (0 if epoch is None else epoch >> CHECK_BITS) > self._at:
            raise self._overtaken()
        self.head_seq = self._head()

    def _overtaken(self) -> Failure:
        return Failure(
            f"another import of this source into topic {self.topic} is at work; nothing was "
            "imported twice"
        )

    def _posted(self, batch: ImportBatch, epoch: int) -> Answer:
        head = {"create": self._create, "if": {"head_seq": self.head_seq}}
        records = b",".join(batch.records)
        body = msgspec.json.encode(head)[:-1] + b',"records":[' + records + b"]}"
        return self._asked("POST", self._path, body, self._headers(epoch, 0), batch.what)

    def _headers(self, epoch: int, seq: int) -> dict[str, bytes]:
        found = self._target.headers(self._producer, epoch, seq)
        return {name.decode(): value for name, value in found if name != b"Content-Type"}

    def _asked(
        self,
        method: str,
        path: str,
        body: bytes | None,
        more: dict[str, bytes],
        what: str = "the request",
        *,
        is_first: bool = False,
    ) -> Answer:
        """The answer, after the server is neither busy nor away. Every request may be repeated."""

        def attempt() -> Answer:
            answer = self._client.ask(method, path, body, more)
            if answer.status in {429, 503}:
                raise answer.refusal
            return answer

        return patient(attempt, self._retry_s, what, self._tell, is_first=is_first)


def patient(
    attempt: Callable[[], Answer], retry_s: float, what: str, tell: Tell, *, is_first: bool = False
) -> Answer:
    """The first answer of a server that may be busy or away.

    Messages say that a second run continues.

    `is_first`: fail at once if no server listens, as every other verb does.
    """

    def may_repeat(error: CallRefused | ServerUnreachable) -> bool:
        is_absent = isinstance(error, ServerUnreachable) and not error.sent
        return is_passing(error) and not (is_first and is_absent)

    try:
        answer, was_reported = repeated(attempt, may_repeat, retry_s, what, tell)
    except CallRefused as error:
        raise Failure(f"{error.message} ({what}; run it again to continue)") from None
    except ServerUnreachable as error:
        message = f"{error.message} (run it again to continue)"
        raise ServerUnreachable(message, sent=error.sent) from None
    if was_reported:
        tell(f"the server has answered: {what}")
    return answer
