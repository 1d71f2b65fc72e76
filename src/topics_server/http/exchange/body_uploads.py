"""Counts a connection's request bodies in the upload budget, and reads them in turns.

A body that arrives in pieces counts in `http/upload_budget` from its second reception until its
request is answered; the budget may refuse it. Connections with large bodies are read in turns
(`http/upload_turns`). A request that arrives whole at once does not come here. `http/connection`
makes one instance for each connection with such a body.
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
    """The uploads of one connection.

    `refuse` is called when the budget refuses the body being received. `receive` passes the read
    bytes to the connection.
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
        # Bodies that count in the budget, with their requests. The last one may still be received.
        self._counted: list[tuple[Exchange, Upload]] = []
        # The key of the last body. Bytes after a refused body are received in this key's turns.
        self._key: object = None
        # Whether the connection is read in turns. The bytes of its turn are parsed at once.
        self.takes_turns = False

    def count(self, reader: RequestReader, exchange: Exchange | None, *, is_crowded: bool) -> None:
        """Count the received part of an incomplete body. The budget may then refuse the body.

        `is_crowded`: a connection with a large body is read in turns.
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
        """The request is complete: its body can no longer be refused."""
        if self._counted:
            self._door.uploads.finish(self._counted[-1][1])
        self.leave_turns()

    def refused(self) -> None:
        """Take the refused body out of the budget."""
        if self._counted and not self._counted[-1][1].is_whole:
            self._door.uploads.end(self._counted.pop()[1])

    def end_answered(self) -> bool:
        """Stop counting the bodies of answered requests.

        Returns whether this object is no longer needed.
        """
        counted, self._counted = self._counted, []
        for exchange, upload in counted:
            if exchange.response_complete:
                self._door.uploads.end(upload)
            else:
                self._counted.append((exchange, upload))
        return not (self._counted or self.takes_turns)

    def lose(self) -> None:
        """The connection is lost: stop counting all its bodies."""
        counted, self._counted = self._counted, []
        for _, upload in counted:
            self._door.uploads.end(upload)
        self.leave_turns()

    def refuse_upload(self, error: TopicsError) -> None:
        """See `upload_budget.Receiver`."""
        self._refuse(error)

    # --- turns ------------------------------------------------------------------------------

    def wait_turn(self) -> None:
        """Read the connection in turns from now on."""
        if not self._flow.is_closing:
            self.takes_turns = True
            self._door.upload_turns.wait(self)

    def leave_turns(self) -> None:
        """Read the connection without turns again."""
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
