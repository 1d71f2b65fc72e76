"""Opens a bucket through obstore, which is an optional package, and reads ranges of its objects.

Spark's executors load this module: it imports nothing but the standard library and our errors.
Credentials come from the store's usual environment variables (AWS_..., GOOGLE_..., AZURE_...); no
message repeats the query of a URL, because some stores put credentials there. Called by `cloud`,
`opening` and the Spark source.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from typing import Any, Final, NamedTuple

from topics_server.values.errors import NotThere, StartRefused, StorageError

PACKAGE: Final = "obstore"
# A word that may contain a signature.
_QUERY: Final = re.compile(r"\?\S+")
_REASON_MAX: Final = 300
# A reader need not stop with a server, so the client itself repeats requests.
_READ_RETRIES: Final = 5


class OpenBucket(NamedTuple):
    """A bucket, and the modules `obstore` and `obstore.exceptions`."""

    api: Any
    errors: Any
    handle: Any


class ObjectRange(NamedTuple):
    """Bytes of an object; `object_bytes`: the size of the whole object."""

    content: bytes
    object_bytes: int


def is_installed() -> bool:
    """Whether obstore is installed, so that object stores can be used."""
    return importlib.util.find_spec(PACKAGE) is not None


def open_bucket(url: str, retries: int) -> OpenBucket:
    """Open the bucket of a URL. Raises `StartRefused` without obstore, `StorageError`.

    `retries`: how often the client repeats a request that failed.
    """
    if not is_installed():
        raise StartRefused(
            f"this kind of archive needs the package {PACKAGE}: pip install {PACKAGE}"
        )
    api = importlib.import_module(PACKAGE)
    errors = importlib.import_module(f"{PACKAGE}.exceptions")
    from_url = importlib.import_module(f"{PACKAGE}.store").from_url
    try:
        handle = from_url(url, retry_config={"max_retries": retries})
    except (errors.BaseError, OSError, ValueError) as error:
        raise StorageError(reason_of(error), url) from None
    return OpenBucket(api, errors, handle)


class BucketRanges:
    """Reads ranges of the objects below a URL."""

    def __init__(self, url: str, bucket: OpenBucket) -> None:
        self._url: Final = url.rstrip("/")
        self._bucket: Final = bucket

    @classmethod
    def open(cls, url: str) -> BucketRanges:
        """*Blocking.* Open the bucket of a URL; raises the errors of `open_bucket`."""
        return cls(url, open_bucket(url, _READ_RETRIES))

    def read(self, name: str, start: int, length: int) -> ObjectRange:
        """*Blocking.* Up to `length` bytes; fewer only at the end of the object.

        The object must have more than `start` bytes. Raises `NotThere`, `StorageError`.
        """
        api, errors, handle = self._bucket
        try:
            found = api.get(handle, name, options={"range": (start, start + length)})
            return ObjectRange(bytes(found.bytes()), int(found.meta["size"]))
        except (errors.NotFoundError, FileNotFoundError):
            raise NotThere("does not exist", f"{self._url}/{name}") from None
        except (errors.BaseError, OSError, ValueError) as error:
            raise StorageError(reason_of(error), f"{self._url}/{name}") from None


def reason_of(error: Exception) -> str:
    """The first line of an error, shortened, without words that may contain a signature."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return _QUERY.sub("?...", lines[0])[:_REASON_MAX]
