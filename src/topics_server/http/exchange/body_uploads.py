"""The request bodies of one connection in the upload budget and in the upload turns.

A body that comes in pieces counts in `http/upload_budget` from its second reception until its
request is answered; the budget may have it refused. A connection that sends much is read in turn
with the others that do (`http/upload_turns`). Requests that come whole at once pass by all of this.
One instance for each connection that has such a body, in `http/connection`.
"""

from __future__ import annotations

from collections.abc import Callable

from topics_server.http.exchange.asgi_exchange import Exchange
from topics_server.http.exchange.door import Door
from topics_server.http.exchange.flow_control import Flow
from topics_server.http.exchange.request_reader import RequestReader
from topics_server.http.upload_budget import Upload
from topics_server.http.upload_turns import LARGE_BYTES
from topics_server.values.errors import TopicsError


class BodyUploads:
    """`refuse`: of the connection, called when the budget refuses the received body.

    `receive`: passes the read bytes to the connection.
    """

    __slots__ = ("_counted", "_door", "_flow", "_key", "_receive", "_refuse", "takes_turns")

    def __init__(
        self,
        door: Door,
        flow: Flow,
        refuse: Callable[[TopicsError], None],
        receive: Callable[[bytes], None],
    ) -> None:
        self._door = door
        self._flow = flow
        self._refuse = refuse
        self._receive = receive
        # Bodies that count in the budget, with their requests; the one being received is the last.
        self._counted: list[tuple[Exchange, Upload]] = []
        # The key of the last body: bytes behind a refused body are received in this key's turns.
        self._key: object = None
        # The connection is read in turn among large uploads; bytes of its turn are handled at once.
        self.takes_turns = False

    def count(self, reader: RequestReader, exchange: Exchange | None, *, is_crowded: bool) -> None:
        """Count what there is of a body that is not whole; that may have it refused.

        Where there are many connections, one with a large body is read in turns.
        """
        size = reader.body_bytes
        if size and exchange is not None and not exchange.response_complete:
            if not self._counted or self._counted[-1][0] is not exchange:
                self._key = self._door.upload_key(reader.fields)
                self._counted.append((exchange, self._door.uploads.begin(self, self._key)))
            self._door.uploads.set_bytes(self._counted[-1][1], size)
        length = reader.fields.get(b"content-length", b"")
        is_long = len(length) > 4 and int(length) - size >= LARGE_BYTES
        if is_crowded and is_long and reader.is_partial:
            self.wait_turn()

    def end_message(self) -> None:
        """The request is whole."""
        if self._counted:
            self._door.uploads.finish(self._counted[-1][1])
        self.leave_turns()

    def refused(self) -> None:
        """The body being received is refused: take it out of the budget."""
        if self._counted and not self._counted[-1][1].is_whole:
            self._door.uploads.end(self._counted.pop()[1])

    def end_answered(self) -> bool:
        """Bodies of answered requests count no more; whether nothing is left to count."""
        counted, self._counted = self._counted, []
        for exchange, upload in counted:
            if exchange.response_complete:
                self._door.uploads.end(upload)
            else:
                self._counted.append((exchange, upload))
        return not (self._counted or self.takes_turns)

    def lose(self) -> None:
        """The connection is gone."""
        counted, self._counted = self._counted, []
        for _, upload in counted:
            self._door.uploads.end(upload)
        self.leave_turns()

    def refuse_upload(self, error: TopicsError) -> None:
        """See `upload_budget.Receiver`."""
        self._refuse(error)

    # --- turns ------------------------------------------------------------------------------

    def wait_turn(self) -> None:
        """Read the connection in turn among large uploads."""
        if not self._flow.is_closing:
            self.takes_turns = True
            self._door.upload_turns.wait(self)

    def leave_turns(self) -> None:
        """The connection is read freely."""
        if self.takes_turns:
            self.takes_turns = False
            self._door.upload_turns.leave(self)

    @property
    def upload_key(self) -> object:
        """See `upload_turns.UploadReader`."""
        return self._key

    def begin_turn(self) -> None:
        """See `upload_turns.UploadReader`."""
        if not self._flow.is_closing:
            self._flow.begin_turn()

    def end_turn(self) -> None:
        """See `upload_turns.UploadReader`."""
        if not self._flow.is_closing:
            self._flow.end_turn()

    def read_share(self, count: int) -> bool | None:
        """See `upload_turns.UploadReader`."""
        if self._flow.is_closing:
            return None
        return self._flow.read_share(count, self._receive)
