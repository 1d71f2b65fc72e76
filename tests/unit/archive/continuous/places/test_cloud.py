"""A bucket as a place of archives: names, absence, errors without secrets, and the lock.

The bucket is in memory and behaves as obstore's stores do; `tests/cloud` uses obstore itself.
"""

from __future__ import annotations

import types
from typing import Any

import pytest

from topics_server.archive.continuous.places import cloud, ranges
from topics_server.archive.continuous.places.cloud import CloudStore, open_cloud
from topics_server.archive.object_store import read_whole
from topics_server.values.errors import NotThere, StartRefused, StorageError

URL = "s3://bucket/prefix"


class BaseError(Exception):
    pass


class NotFoundError(BaseError):
    pass


class AlreadyExistsError(BaseError):
    pass


class PreconditionError(BaseError):
    pass


ERRORS = types.SimpleNamespace(
    BaseError=BaseError,
    NotFoundError=NotFoundError,
    AlreadyExistsError=AlreadyExistsError,
    PreconditionError=PreconditionError,
)


class Bucket:
    """The part of obstore that the server uses; `fails`: the error of every call."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.fails: Exception | None = None

    def put(self, bucket: object, name: str, content: bytes, *, mode: str) -> None:
        self._fail()
        assert mode == "create", "nothing is put over another object"
        if name in self.objects:
            raise AlreadyExistsError(name)
        self.objects[name] = content

    def get(self, bucket: object, name: str) -> Any:
        content = self._found(name)
        return types.SimpleNamespace(bytes=lambda: memoryview(content))

    def head(self, bucket: object, name: str) -> dict[str, Any]:
        return {"path": name, "size": len(self._found(name))}

    def delete(self, bucket: object, name: str) -> None:
        self._found(name)
        del self.objects[name]

    def list_with_delimiter(self, bucket: object, prefix: str | None) -> dict[str, Any]:
        self._fail()
        start = f"{prefix}/" if prefix else ""
        rest = {name[len(start) :] for name in self.objects if name.startswith(start)}
        return {
            "common_prefixes": sorted({start + each.split("/")[0] for each in rest if "/" in each}),
            "objects": [{"path": start + each} for each in sorted(rest) if "/" not in each],
        }

    def _found(self, name: str) -> bytes:
        self._fail()
        if name not in self.objects:
            raise NotFoundError(f"{name} was not found")
        return self.objects[name]

    def _fail(self) -> None:
        if self.fails is not None:
            raise self.fails


def store_in(bucket: Bucket, holder: str = "me") -> CloudStore:
    return CloudStore(URL, bucket, ERRORS, object(), holder, 0)


def test_an_object_is_put_once_and_named_by_the_url() -> None:
    store = store_in(Bucket())
    assert store.put_if_absent("parts/a/1", [b"1", b"2"])
    assert not store.put_if_absent("parts/a/1", [b"3"])
    assert read_whole(store, "parts/a/1") == b"12"
    assert (store.size("parts/a/1"), store.size("parts/a/2")) == (2, None)
    assert store.path_of("parts/a/1") == "s3://bucket/prefix/parts/a/1"
    with pytest.raises(NotThere, match="s3://bucket/prefix/x: does not exist"):
        read_whole(store, "x")


def test_names_are_those_directly_in_a_folder() -> None:
    store = store_in(Bucket())
    for name in ("ARCHIVE", "parts/a/1", "parts/b/2", "parts/b/3"):
        store.put_if_absent(name, [b""])
    assert store.names("") == ["ARCHIVE", "parts"]
    assert store.names("parts") == ["a", "b"]
    assert store.names("parts/b") == ["2", "3"]
    assert store.names("nothing") == []
    store.delete_folder("parts/b")
    store.delete("parts/b/2")
    assert store.names("parts") == ["a"]


def test_a_large_object_is_read_in_chunks() -> None:
    store = store_in(Bucket())
    content = bytes(range(256)) * 8192
    store.put_if_absent("a", [content])
    chunks = list(store.read("a"))
    assert len(chunks) == 2
    assert b"".join(chunks) == content


def test_no_message_repeats_a_query() -> None:
    bucket = Bucket()
    store = store_in(bucket)
    bucket.fails = BaseError("GET https://host/a?sig=hunter2&x=1 failed\nsecond line")
    for call in (
        lambda: store.put_if_absent("a", [b"1"]),
        lambda: read_whole(store, "a"),
        lambda: store.size("a"),
        lambda: store.names(""),
        lambda: store.delete("a"),
    ):
        with pytest.raises(StorageError) as refused:
            call()
        assert str(refused.value).endswith("GET https://host/a?... failed")


def test_a_lock_is_that_of_one_and_survives_its_server() -> None:
    bucket = Bucket()
    lock = store_in(bucket, "me").lock_bases()
    with pytest.raises(StartRefused, match="me makes a base or a prune since"):
        store_in(bucket, "another").lock_bases()
    # After a kill the server of the same store takes its lock again.
    again = store_in(bucket, "me").lock_bases()
    again.release()
    again.release()
    lock.release()
    store_in(bucket, "another").lock_bases().release()
    assert bucket.objects == {}
    bucket.objects["LOCK"] = b"?"
    with pytest.raises(StartRefused, match="is no lock"):
        store_in(bucket).lock_bases()


def test_a_lock_whose_put_failed_after_all_is_the_ones_own() -> None:
    bucket = Bucket()
    put = bucket.put

    def timed_out(*args: Any, **how: Any) -> None:
        put(*args, **how)
        raise BaseError("timed out")

    bucket.put = timed_out  # type: ignore[method-assign]
    lock = store_in(bucket, "me").lock_bases()
    bucket.put = put  # type: ignore[method-assign]
    with pytest.raises(StartRefused, match="me makes a base or a prune since"):
        store_in(bucket, "another").lock_bases()
    lock.release()
    assert bucket.objects == {}


def test_a_lock_that_cannot_be_removed_at_once_is_removed_a_little_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bucket = Bucket()
    waits: list[float] = []

    def heal(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            bucket.fails = None

    monkeypatch.setattr(cloud, "pause", heal)
    lock = store_in(bucket).lock_bases()
    bucket.fails = BaseError("503")
    lock.release()
    assert bucket.objects == {}
    assert len(waits) == 2
    # A store that stays unreachable delays no caller for ever.
    lock = store_in(bucket).lock_bases()
    bucket.fails = BaseError("503")
    lock.release()
    assert list(bucket.objects) == ["LOCK"]


def test_a_lock_can_be_broken_and_its_late_holder_removes_no_other() -> None:
    bucket = Bucket()
    killed = store_in(bucket, "killed").lock_bases()
    server = store_in(bucket, "server")
    with pytest.raises(
        StartRefused, match=r"since \d{4}-.*Z\. If it is dead: topics archive unlock"
    ):
        server.lock_bases()
    assert (server.lock_holder() or "").startswith("killed, since 2")
    server.break_lock()
    assert server.lock_holder() is None
    lock = server.lock_bases()
    killed.release()
    assert (server.lock_holder() or "").startswith("server, ")
    lock.release()
    assert bucket.objects == {}


def test_without_the_package_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranges, "is_installed", lambda: False)
    with pytest.raises(StartRefused, match="pip install obstore"):
        open_cloud(URL, "", 0)
