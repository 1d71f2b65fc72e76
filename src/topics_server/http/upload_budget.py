"""The memory budget for request bodies being received. Pure.

Owns one count of bytes for the whole server, by key. A body counts from its second reception until
its request is answered; a body that arrives whole at once never does. While the total exceeds
`max_bytes`, the slowest upload of the key with the most bytes is refused. The slowest is the upload
whose last `STEP_BYTES` took longest; uploads with fewer bytes are refused only if their key has no
others. A complete body is never refused.

Invariant: `held_bytes` is the sum of the bytes of all uploads that began and have not ended. Called
by `http/exchange/body_uploads` and `http/websocket`; held by `api/context`.
"""

from __future__ import annotations

from typing import Final, Protocol

from topics_server.values.errors import Code, TopicsError
from topics_server.values.limits import UPLOAD_STEP_BYTES

STEP_BYTES: Final = UPLOAD_STEP_BYTES


class Receiver(Protocol):
    """A connection that receives a body or a message."""

    def refuse_upload(self, error: TopicsError) -> None:
        """Free the received bytes, and answer with `error`."""
        ...


class Upload:
    """One body or message that is being received, or is complete and not answered yet."""

    __slots__ = ("bytes", "is_ended", "is_whole", "key", "receiver", "stepped_bytes")

    def __init__(self, receiver: Receiver, key: object) -> None:
        self.receiver = receiver
        # The key of the upload; None without a key.
        self.key = key
        self.bytes = 0
        # The upload's size at its last step of `STEP_BYTES`.
        self.stepped_bytes = 0
        self.is_whole = self.is_ended = False


class _Share:
    """The uploads of one key: `bytes` of `count` uploads; the tables hold the incomplete uploads.

    In each table the upload with the oldest last step comes first. `small` holds the uploads
    without a step.
    """

    __slots__ = ("bytes", "count", "large", "small")

    def __init__(self) -> None:
        self.bytes = self.count = 0
        self.large: dict[Upload, None] = {}
        self.small: dict[Upload, None] = {}

    def slowest(self) -> Upload | None:
        """The upload that is refused first."""
        return next(iter(self.large), None) or next(iter(self.small), None)

    def take_out(self, upload: Upload) -> None:
        """Remove an upload that can no longer be refused."""
        self.small.pop(upload, None)
        self.large.pop(upload, None)


class UploadBudget:
    """All uploads of a server; `max_bytes` 0: unlimited. `refused` counts refused uploads."""

    def __init__(self, max_bytes: int = 0) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self.refused = 0
        self._shares: dict[object, _Share] = {}

    def is_greedy(self, key: object) -> bool:
        """Whether more than half of the budget is used, and more than half of that by this key."""
        share = self._shares.get(key)
        return (
            share is not None
            and self.held_bytes > self.max_bytes // 2 > 0
            and 2 * share.bytes > self.held_bytes
        )

    def begin(self, receiver: Receiver, key: object) -> Upload:
        """Begin to count a body or message."""
        upload = Upload(receiver, key)
        share = self._shares.setdefault(key, _Share())
        share.count += 1
        share.small[upload] = None
        return upload

    def set_bytes(self, upload: Upload, count: int) -> None:
        """Set the received bytes of an upload.

        Refuses as many uploads as necessary, maybe this one.
        """
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
        """Mark an upload as complete: it counts until it ends, but can no longer be refused."""
        if not upload.is_ended:
            upload.is_whole = True
            self._shares[upload.key].take_out(upload)

    def end(self, upload: Upload) -> None:
        """Free the bytes of an upload. Idempotent."""
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
                # All held bytes are of complete uploads, and are freed when those are answered.
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
        """The slowest upload of the key with the most bytes, among keys with a refusable one."""
        shares = [share for share in self._shares.values() if share.large or share.small]
        most = max(shares, key=lambda share: share.bytes, default=None)
        return None if most is None else most.slowest()
