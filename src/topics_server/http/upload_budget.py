"""The memory budget for request bodies being received. Pure.

Owns one count of bytes for the whole server, by key. A body counts from its second reception until
its request is answered; a body that comes whole at once never does. Where all together are more
than `max_bytes`, uploads are given up until they are not: of the key that holds the most, the one
that came slowest. Slowest is the upload that took its last `STEP_BYTES` the longest ago; uploads
that hold less than that are given up only where their key has no others. A body that is whole is
never given up.

Invariant: `held_bytes` is the sum of the bytes of all uploads that were begun and not ended.
Called by `api/framing` and `api/connection`; held by `api/context`.
"""

from __future__ import annotations

from typing import Final, Protocol

from topics_server.values.errors import Code, TopicsError
from topics_server.values.limits import UPLOAD_STEP_BYTES

STEP_BYTES: Final = UPLOAD_STEP_BYTES


class Receiver(Protocol):
    """A connection that receives a body or a message."""

    def refuse_upload(self, error: TopicsError) -> None:
        """Forget what was received of it, and answer with `error`."""
        ...


class Upload:
    """One body or message that is being received, or is whole and not answered yet."""

    __slots__ = ("bytes", "is_ended", "is_whole", "key", "receiver", "stepped_bytes")

    def __init__(self, receiver: Receiver, key: object) -> None:
        self.receiver = receiver
        # Whose it is; None: nobody's in particular.
        self.key = key
        self.bytes = 0
        # How many bytes it had when it last took a step.
        self.stepped_bytes = 0
        self.is_whole = self.is_ended = False


class _Share:
    """What one key holds: `bytes` of `count` uploads, of which those in the tables are not whole.

    Each table has the upload that took its last step the longest ago in front; `small` has those
    that took none.
    """

    __slots__ = ("bytes", "count", "large", "small")

    def __init__(self) -> None:
        self.bytes = self.count = 0
        self.large: dict[Upload, None] = {}
        self.small: dict[Upload, None] = {}

    def slowest(self) -> Upload | None:
        """The upload that is given up first."""
        return next(iter(self.large), None) or next(iter(self.small), None)

    def take_out(self, upload: Upload) -> None:
        """An upload is not to be given up any more."""
        self.small.pop(upload, None)
        self.large.pop(upload, None)


class UploadBudget:
    """All uploads of a server; `max_bytes` 0: unlimited. `refused` counts those given up."""

    def __init__(self, max_bytes: int = 0) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self.refused = 0
        self._shares: dict[object, _Share] = {}

    def begin(self, receiver: Receiver, key: object) -> Upload:
        """A body or message is being received."""
        upload = Upload(receiver, key)
        share = self._shares.setdefault(key, _Share())
        share.count += 1
        share.small[upload] = None
        return upload

    def set_bytes(self, upload: Upload, count: int) -> None:
        """An upload has so many bytes now; gives up as many as it takes, maybe this one."""
        share = self._shares[upload.key]
        grown = count - upload.bytes
        upload.bytes = count
        share.bytes += grown
        self.held_bytes += grown
        if count - upload.stepped_bytes >= STEP_BYTES and not upload.is_whole:
            upload.stepped_bytes = count
            share.take_out(upload)
            share.large[upload] = None
        if self.held_bytes > self.max_bytes > 0 and grown > 0:
            self._make_room()

    def finish(self, upload: Upload) -> None:
        """An upload is whole: it counts until it ends, and is not given up any more."""
        if not upload.is_ended:
            upload.is_whole = True
            self._shares[upload.key].take_out(upload)

    def end(self, upload: Upload) -> None:
        """What an upload held is let go of. Once is enough."""
        if upload.is_ended:
            return
        upload.is_ended = True
        share = self._shares[upload.key]
        share.take_out(upload)
        share.bytes -= upload.bytes
        share.count -= 1
        self.held_bytes -= upload.bytes
        assert self.held_bytes >= 0 <= share.bytes
        if not share.count:
            assert not share.bytes
            del self._shares[upload.key]

    def _make_room(self) -> None:
        while self.held_bytes > self.max_bytes:
            upload = self._slowest()
            if upload is None:
                # All that is held is whole, and goes when it is answered.
                return
            self.end(upload)
            self.refused += 1
            upload.receiver.refuse_upload(
                TopicsError(
                    Code.THROTTLED,
                    "the server receives too many bytes at once; this request was the slowest",
                    {"limit": "max_receiving_bytes", "max": self.max_bytes},
                )
            )

    def _slowest(self) -> Upload | None:
        """The slowest upload of the key that holds the most, of those with one to give up."""
        shares = [share for share in self._shares.values() if share.large or share.small]
        most = max(shares, key=lambda share: share.bytes, default=None)
        return None if most is None else most.slowest()
