"""A connection whose request bodies count against the upload budget.

A body that comes in pieces counts in `http/upload_budget` from its second reception until its
request is answered; the budget may have it refused. A connection that sends much is read in turn
with the others that do (`http/upload_turns`). Requests that come whole at once pass by all of this.
Base of `api/direct`.
"""

from __future__ import annotations

from typing import Any, Final

from topics_server.api.application import Application
from topics_server.api.framing import StrictHttp
from topics_server.auth.api_keys import KeyRing, bearer_token
from topics_server.http.read_scheduler import FEW
from topics_server.http.upload_budget import Upload, UploadBudget
from topics_server.http.upload_turns import LARGE_BYTES, UploadTurns
from topics_server.values.errors import TopicsError
from topics_server.values.limits import LINGER_BYTES_MAX, LINGER_MS_MAX

_UNBOUNDED: Final = UploadBudget()
_TURNS: Final = UploadTurns()
_NO_KEYS: Final = KeyRing()


class UploadHttp(StrictHttp):
    """A connection that receives bodies."""

    uploads: UploadBudget = _UNBOUNDED
    turns: UploadTurns = _TURNS
    keys: KeyRing = _NO_KEYS
    # Bodies that count in the budget, with their requests; the one being received is the last.
    _counted: list[tuple[Any, Upload]] | None = None
    # It is read in turn among large uploads, and what comes in its turn at once.
    _is_taking_turns = False

    def connection_made(self, transport: Any) -> None:
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        app: Any = self.app
        if isinstance(app, Application):
            self.uploads = app.door.state.uploads
            self.turns = app.door.state.upload_turns
            self.keys = app.door.state.keys

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        super().connection_lost(exc)
        counted, self._counted = self._counted, None
        for _, upload in counted or ():
            self.uploads.end(upload)
        if self._is_taking_turns:
            self._leave_turns()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if len(data) >= LARGE_BYTES:
            self._wait_turn()
        read_scheduler = self.read_scheduler
        if self._is_taking_turns and (read_scheduler is None or not read_scheduler.holds(self)):
            self.take(data)
        else:
            super().data_received(data)

    def take(self, data: bytes) -> None:
        """Read what was received."""
        super().take(data)
        if self.is_partial:
            self._count_upload()
            if self._is_large_body():
                self._wait_turn()

    def end_message(self) -> None:
        """Note that the request is whole."""
        super().end_message()
        if self._counted:
            self.uploads.finish(self._counted[-1][1])
        if self._is_taking_turns:
            self._leave_turns()

    def refuse(self, error: TopicsError | None) -> None:
        """Refuse what is being received; it counts no more."""
        super().refuse(error)
        if self._counted and not self._counted[-1][1].is_whole:
            self.uploads.end(self._counted.pop()[1])

    def on_response_complete(self) -> None:
        """The answer is out: the body of its request counts no more."""
        super().on_response_complete()
        if self._counted:
            counted, self._counted = self._counted, []
            for cycle, upload in counted:
                if cycle.response_complete:
                    self.uploads.end(upload)
                else:
                    self._counted.append((cycle, upload))

    def _count_upload(self) -> None:
        """Count what there is of a body that is not whole; that may have it refused."""
        cycle: Any = self.cycle
        if not self._has_head or not self._body_bytes or cycle is None or cycle.response_complete:
            return
        counted = self._counted
        if counted is None:
            counted = self._counted = []
        if not counted or counted[-1][0] is not cycle:
            token = bearer_token(self.fields.get(b"authorization"))
            caller = None if token is None else self.keys.find(token)
            key = None if caller is None else caller.key
            counted.append((cycle, self.uploads.begin(self, key)))
        self.uploads.set_bytes(counted[-1][1], self._body_bytes)

    def refuse_upload(self, error: TopicsError) -> None:
        """Answer with `error`, and go on receiving for a while so that the client reads it."""
        self._swallowed_bytes = 0
        self._swallowed_max = LINGER_BYTES_MAX
        self._lingers_until = self.loop.time() + LINGER_MS_MAX / 1000
        self.refuse(error)
        self.flow.resume_reading()

    # --- turns ------------------------------------------------------------------------------

    def _is_large_body(self) -> bool:
        """Whether much of a body is still to come, as its head says."""
        if not self._has_head or not self.is_partial:
            return False
        length = self.fields.get(b"content-length", b"")
        return len(length) > 4 and int(length) - self._body_bytes >= LARGE_BYTES

    def _wait_turn(self) -> None:
        """Be read in turn among large uploads, where there are many connections."""
        if len(self.connections) > FEW and not self.transport.is_closing():
            self._is_taking_turns = True
            self.turns.wait(self)

    def _leave_turns(self) -> None:
        self._is_taking_turns = False
        self.turns.leave(self)

    @property
    def upload_key(self) -> object:
        """See `upload_turns.Reader`."""
        return self._counted[-1][1].key if self._counted else None

    def begin_turn(self) -> None:
        """See `upload_turns.Reader`."""
        if not self.transport.is_closing():
            self.flow.begin_turn()

    def end_turn(self) -> None:
        """See `upload_turns.Reader`."""
        if not self.transport.is_closing():
            self.flow.end_turn()
