"""An archive whose failed calls are repeated, because a remote store fails sometimes.

A put that raised an error may have succeeded, and the client of a store repeats requests by itself.
So an existing object with the same content counts as put; with other content it does not. An object
is in memory while it is put: segments are the largest objects. Called by `opening`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

from topics_server.archive.continuous.places.shared_folder import ArchiveStore
from topics_server.runtime.clock import pause
from topics_server.values.errors import NotThere, StartRefused, StorageError
from topics_server.wal.fs import Buffer, Lock

_TRIES: Final = 5
_PAUSE_S: Final = 0.2

T = TypeVar("T")


class RetryingStore:
    """See the module. `wait` is called with the seconds before the next try.

    `is_ending` is called from any thread; once it returns true, no call is repeated.
    """

    def __init__(
        self,
        inner: ArchiveStore,
        wait: Callable[[float], None] = pause,
        is_ending: Callable[[], bool] = lambda: False,
    ) -> None:
        self._inner: Final = inner
        self._wait: Final = wait
        self._is_ending: Final = is_ending

    def path_of(self, name: str) -> str:
        """See `ObjectStore`."""
        return self._inner.path_of(name)

    def put_if_absent(self, name: str, pieces: Iterable[Buffer]) -> bool:
        """See `ObjectStore`."""
        content = b"".join(pieces)

        def put() -> bool:
            is_put = self._inner.put_if_absent(name, [content])
            return is_put or b"".join(self._inner.read(name)) == content

        return self._try(put)

    def read(self, name: str) -> Iterator[bytes]:
        """See `ObjectStore`: reads the whole object, so that no try begins in the middle."""
        chunks: list[bytes] = self._try(lambda: list(self._inner.read(name)))
        return iter(chunks)

    def size(self, name: str) -> int | None:
        """See `ObjectStore`."""
        return self._try(lambda: self._inner.size(name))

    def make_durable(self, name: str) -> None:
        """See `ObjectStore`."""
        self._try(lambda: self._inner.make_durable(name))

    def names(self, folder: str) -> list[str]:
        """See `ObjectStore`."""
        return self._try(lambda: self._inner.names(folder))

    def remove_unfinished(self, folder: str) -> None:
        """See `ObjectStore`."""
        self._try(lambda: self._inner.remove_unfinished(folder))

    def delete(self, name: str) -> None:
        """See `ObjectStore`."""
        self._try(lambda: self._inner.delete(name))

    def delete_folder(self, folder: str) -> None:
        """See `ObjectStore`."""
        self._try(lambda: self._inner.delete_folder(folder))

    def lock_bases(self) -> Lock:
        """See `ArchiveStore`. A lock of another holder is reported at once, without a retry."""
        return self._inner.lock_bases()

    def lock_holder(self) -> str | None:
        """See `ArchiveStore`."""
        return self._try(self._inner.lock_holder)

    def break_lock(self) -> None:
        """See `ArchiveStore`."""
        self._try(self._inner.break_lock)

    def close(self) -> None:
        """See `ObjectStore`."""
        self._inner.close()

    def _try(self, call: Callable[[], T]) -> T:
        for attempt in range(_TRIES - 1):
            try:
                return call()
            except (NotThere, StartRefused):
                raise
            except StorageError:
                if self._is_ending():
                    raise
                self._wait(_PAUSE_S * 2**attempt)
        return call()
