"""A bucket of an object store, through obstore, which is an optional package.

Objects are put with the store's own "only if absent". Credentials come from the store's usual
environment variables (AWS_..., GOOGLE_..., AZURE_...); no message repeats the query of a URL,
because some stores put credentials there. The lock of the bases is an object: after a kill a server
takes its own lock again, but the lock of another server stays until a person removes it. Called by
`opening`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

import msgspec

from topics_server.archive.continuous.places.ranges import open_bucket, reason_of
from topics_server.runtime.clock import now_ms, pause, random_hex
from topics_server.values.errors import NotThere, StartRefused, StorageError
from topics_server.values.limits import MIB
from topics_server.wal.fs import Buffer, Lock

_LOCK: Final = "LOCK"
# A request ends after 30 seconds; `retrying` repeats it, unless the server is stopping.
_RETRIES: Final = 1
# If a prune could not remove its lock, only a person can remove the lock.
_RELEASE_TRIES: Final = 5
_RELEASE_PAUSE_S: Final = 0.1

T = TypeVar("T")


class _Holder(msgspec.Struct, frozen=True):
    """The content of the lock: its holder, and the time of locking in ms since the epoch."""

    holder: str
    since_ts: int


_HOLDER: Final = msgspec.json.Decoder(_Holder)


def open_cloud(url: str, holder: str, bytes_per_s: int) -> CloudStore:
    """*Blocking.* Open the bucket of a URL. Raises `StartRefused` without obstore.

    `holder`: the server whose lock survives a kill; empty for a command line verb.
    """
    api, errors, opened = open_bucket(url, _RETRIES)
    return CloudStore(url, api, errors, opened, holder or random_hex(16), bytes_per_s)


class CloudStore:
    """Objects of a bucket, below the prefix of the URL. Safe to call from several threads."""

    def __init__(
        self, url: str, api: Any, errors: Any, bucket: Any, holder: str, bytes_per_s: int
    ) -> None:
        """`api`, `errors`: the modules `obstore` and `obstore.exceptions`."""
        self._url: Final = url.rstrip("/")
        self._api: Final = api
        self._errors: Final = errors
        self._failures: Final = (errors.BaseError, OSError, ValueError)
        self._bucket: Final = bucket
        self._holder: Final = holder
        self._bytes_per_s: Final = bytes_per_s

    def path_of(self, name: str) -> str:
        """See `ObjectStore`."""
        return f"{self._url}/{name}"

    def put_if_absent(self, name: str, pieces: Iterable[Buffer]) -> bool:
        """See `ObjectStore`. The object is in memory while it is put."""
        content = b"".join(pieces)
        try:
            self._api.put(self._bucket, name, content, mode="create")
        except (self._errors.AlreadyExistsError, self._errors.PreconditionError):
            return False
        except self._failures as error:
            raise self._error(error, name) from None
        if self._bytes_per_s:
            pause(len(content) / self._bytes_per_s)
        return True

    def read(self, name: str) -> Iterator[bytes]:
        """See `ObjectStore`."""
        content = self._call(lambda: bytes(self._api.get(self._bucket, name).bytes()), name)
        for at in range(0, len(content), MIB):
            yield content[at : at + MIB]

    def size(self, name: str) -> int | None:
        """See `ObjectStore`."""
        try:
            return int(self._call(lambda: self._api.head(self._bucket, name), name)["size"])
        except NotThere:
            return None

    def make_durable(self, name: str) -> None:
        """See `ObjectStore`: every object that an object store shows is durable."""

    def names(self, folder: str) -> list[str]:
        """See `ObjectStore`."""
        found = self._call(
            lambda: self._api.list_with_delimiter(self._bucket, folder or None), folder
        )
        paths = [*found["common_prefixes"], *(each["path"] for each in found["objects"])]
        return sorted({path.rstrip("/").rpartition("/")[2] for path in paths})

    def remove_unfinished(self, folder: str) -> None:
        """See `ObjectStore`: an object store never shows an unfinished object."""

    def delete(self, name: str) -> None:
        """See `ObjectStore`."""
        try:
            self._call(lambda: self._api.delete(self._bucket, name), name)
        except NotThere:
            pass

    def delete_folder(self, folder: str) -> None:
        """See `ObjectStore`."""
        for name in self.names(folder):
            self.delete(f"{folder}/{name}")

    def close(self) -> None:
        """See `ObjectStore`."""

    def lock_bases(self) -> Lock:
        """See `ArchiveStore`."""
        mark = msgspec.json.encode(_Holder(self._holder, now_ms()))
        try:
            is_put = self.put_if_absent(_LOCK, [mark])
        except StorageError:
            # A put that raised an error may have succeeded, and no other caller would remove its
            # object.
            found = self._read_lock()
            if found is None or found.holder != self._holder:
                raise
            is_put = True
        if not is_put:
            found = self._read_lock()
            if found is None:
                raise StartRefused("was held a moment ago: try again", self.path_of(_LOCK))
            if found.holder != self._holder:
                raise StartRefused(
                    f"{found.holder} makes a base or a prune since {_shown(found.since_ts)}. If "
                    "it is dead: topics archive unlock",
                    self.path_of(_LOCK),
                )
        return _CloudLock(self, self._holder)

    def lock_holder(self) -> str | None:
        """See `ArchiveStore`."""
        found = self._read_lock()
        return None if found is None else f"{found.holder}, since {_shown(found.since_ts)}"

    def break_lock(self) -> None:
        """See `ArchiveStore`."""
        self.delete(_LOCK)

    def release_lock(self, holder: str) -> None:
        """Remove the lock, unless it was broken and another process took it."""
        found = self._read_lock()
        if found is not None and found.holder == holder:
            self.delete(_LOCK)

    def _read_lock(self) -> _Holder | None:
        try:
            return _HOLDER.decode(b"".join(self.read(_LOCK)))
        except NotThere:
            return None
        except msgspec.DecodeError:
            raise StartRefused("is no lock of an archive", self.path_of(_LOCK)) from None

    def _call(self, call: Callable[[], T], name: str) -> T:
        try:
            return call()
        except self._failures as error:
            raise self._error(error, name) from None

    def _error(self, error: Exception, name: str) -> StorageError:
        if isinstance(error, self._errors.NotFoundError | FileNotFoundError):
            return NotThere("does not exist", self.path_of(name))
        return StorageError(reason_of(error), self.path_of(name))


class _CloudLock:
    """The lock of the bases."""

    def __init__(self, store: CloudStore, holder: str) -> None:
        self._store = store
        self._holder = holder
        self._is_held = True

    def release(self) -> None:
        """See `Lock`. If the lock cannot be removed, its server takes it again later."""
        if not self._is_held:
            return
        self._is_held = False
        for attempt in range(_RELEASE_TRIES):
            try:
                self._store.release_lock(self._holder)
            except StorageError:
                pause(_RELEASE_PAUSE_S * attempt)
            else:
                return


def _shown(ts_ms: int) -> str:
    return datetime.fromtimestamp(ts_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
