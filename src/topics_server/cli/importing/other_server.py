"""A source that reads a topic of another server by diff, from a position to its head.

The position is a seq of the source; `check` is computed from the record at this seq. The name of
the source consists of the server's address, the topic and its epoch: a topic that was dropped and
created again is another source. The server's gaps are reported. Deleted records are skipped without
a report, as for every reader.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final
from urllib.parse import urlencode, urlsplit

import msgspec
import xxhash

from topics_server.cli.connection import Answer, Failure, ServerConnection, topic_path
from topics_server.cli.details import TopicDetails
from topics_server.cli.importing.appending import CHECK_MASK, ImportBatch, SourcePlace, patient
from topics_server.cli.importing.files import Tally
from topics_server.cli.importing.stamping import Stamped, stamped_record
from topics_server.cli.listing import rows_of
from topics_server.cli.retries import Tell

_TOPIC_DETAILS: Final = msgspec.json.Decoder(TopicDetails)

PAGE_BYTES: Final = 4 * 2**20
# The producer's id, which holds the name, has at most 256 characters.
_NAME_MAX: Final = 200
_members: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


class _Gap(msgspec.Struct):
    gap_from: int
    gap_to: int
    reason: str = ""


class _Page(msgspec.Struct):
    records: list[msgspec.Raw]
    next_from_seq: int
    caught_up: bool
    epoch: int | None = None
    tombstone: _Gap | None = None


_PAGE: Final = msgspec.json.Decoder(_Page)


class _Named(msgspec.Struct):
    topic: str


_NAMED: Final = msgspec.json.Decoder(_Named)


class SourceServer:
    """The other server: its topics, and how to read them."""

    def __init__(self, client: ServerConnection, retry_s: float, tell: Tell) -> None:
        self.client = client
        self._retry_s = retry_s
        self._tell = tell

    def names(self, topics: Sequence[str], prefix: str | None) -> list[str]:
        """The named topics and those with the prefix; without names and prefix, all topics."""
        if topics:
            return list(dict.fromkeys(topics))
        rows = rows_of(self.client, "/v0/topics", "topics", {"prefix": prefix or ""})
        return [_NAMED.decode(row).topic for row in rows]

    def details(self, topic: str) -> TopicDetails:
        """The topic's state; raises `Failure`."""
        answer = self.ask("GET", topic_path(topic, "?touch=false"), None, topic, is_first=True)
        return _TOPIC_DETAILS.decode(answer.body)

    def ask(
        self, method: str, path: str, body: bytes | None, topic: str, *, is_first: bool = False
    ) -> Answer:
        """The answer of a server that may be busy or away for a while."""

        def attempt() -> Answer:
            answer = self.client.ask(method, path, body)
            if answer.status >= 300:
                raise answer.refusal
            return answer

        what = f"reading topic {topic} of {self.client.url}"
        return patient(attempt, self._retry_s, what, self._tell, is_first=is_first)


class ServerSource:
    """One topic of another server, as a source."""

    def __init__(
        self,
        server: SourceServer,
        details: TopicDetails,
        *,
        name: str | None,
        batch_records: int,
        tell: Tell,
    ) -> None:
        self.tally = Tally()
        self.name = name or _name_of(server.client.url, details)
        self.head_seq = details.head_seq
        self._server = server
        self._topic = details.topic
        self._epoch = details.epoch
        self._batch_records = batch_records
        self._tell = tell

    def batches(self, place: SourcePlace | None) -> Iterator[tuple[ImportBatch | None, int]]:
        """Yield the batches behind `place`, each with the seq read so far.

        Yields None for seqs without records. Raises `Failure` if the record at `place` is not the
        imported one.
        """
        at = 0 if place is None else place.position
        if place is not None:
            self._compare(place)
        while True:
            page = self._page(at, self._batch_records)
            gap = page.tombstone
            if gap is not None and gap.gap_to >= gap.gap_from:
                self.tally.gaps += 1
                self._tell(
                    f"{self._topic}: gap: records {gap.gap_from} to {gap.gap_to} are gone at the "
                    f"source ({gap.reason})"
                )
            yield self._batch(page.records), page.next_from_seq
            # Read up to the head at the start: a source that grows meanwhile must not prolong the
            # import.
            if page.caught_up or page.next_from_seq >= self.head_seq:
                return
            assert page.next_from_seq > at or page.records, "a page below the head moves its cursor"
            at = page.next_from_seq

    def _compare(self, place: SourcePlace) -> None:
        """Compare the last imported record, if the source still has it."""
        if place.position > self.head_seq:
            raise Failure(
                f"topic {self._topic} of {self._server.client.url} was imported up to seq "
                f"{place.position} and has {self.head_seq} seqs now: it is another topic. Give it "
                "a name of its own with --as"
            )
        records = self._page(place.position - 1, 1).records
        if not records or place.check is None:
            return
        stamped, check = self._stamped(records[0])
        if stamped.seq == place.position and check != place.check:
            raise Failure(
                f"record {place.position} of topic {self._topic} of {self._server.client.url} is "
                "not the one that was imported: it is another topic. Give it a name of its own "
                "with --as"
            )

    def _page(self, at: int, limit: int) -> _Page:
        asked: dict[str, Any] = {
            "from_seq": at,
            "limit": limit,
            "include_tags": True,
            "max_batch_bytes": PAGE_BYTES,
        }
        path = topic_path(self._topic, "/diff")
        answer = self._server.ask("POST", path, msgspec.json.encode(asked), self._topic)
        page = _PAGE.decode(answer.body)
        if page.epoch not in (None, self._epoch):
            raise Failure(
                f"topic {self._topic} was dropped and made again while it was read; a second run "
                "imports the new one"
            )
        return page

    def _batch(self, records: Sequence[msgspec.Raw]) -> ImportBatch | None:
        if not records:
            return None
        stamped = [self._stamped(raw) for raw in records]
        first, last = stamped[0][0].seq, stamped[-1][0].seq
        assert first is not None
        assert last is not None
        what = f"records {first} to {last} of the source"
        return ImportBatch([each.text for each, _ in stamped], last, stamped[-1][1], what)

    def _stamped(self, raw: msgspec.Raw) -> tuple[Stamped, int]:
        """The record to append, and the check of its position."""
        members = _members.decode(raw)
        try:
            found = stamped_record(members, self.name, None)
        except ValueError as error:
            raise Failure(f"bad_answer: {error}") from None
        if not isinstance(found, Stamped) or found.seq is None:
            raise Failure("bad_answer: a diff has a record without $seq")
        seen = b"%d %b" % (found.ts or 0, bytes(members["data"]))
        return found, xxhash.xxh3_64_intdigest(seen) & CHECK_MASK


def configure_like(client: ServerConnection, topic: str, details: TopicDetails) -> None:
    """Make the topic with the source's configuration, unless it exists. Raises `Failure`."""
    path = topic_path(topic)
    answer = client.ask("GET", path + "?" + urlencode({"touch": "false"}))
    if answer.status == 404 and answer.refusal.code == "topic_not_found":
        config = {name: value for name, value in details.config.items() if value is not None}
        client.call("PUT", path, msgspec.json.encode(config))
    elif answer.status >= 300:
        raise answer.refusal


def _name_of(url: str, details: TopicDetails) -> str:
    parts = urlsplit(url)
    default = {"http": 80, "https": 443}.get(parts.scheme)
    port = parts.port or default
    where = f"{parts.hostname}:{port}{parts.path.rstrip('/')}"
    name = f"{where}/{details.topic}#{details.epoch}"
    if len(name) <= _NAME_MAX and name.isprintable():
        return name
    return f"server:{xxhash.xxh3_64_hexdigest(name.encode())}"
