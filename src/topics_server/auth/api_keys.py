"""API keys: the rights of a caller, and the search for the key of a token. Pure.

Only this module compares tokens with the digests of keys; `values/texts/key_list` reads the text
form of keys. Invariants: no token is stored after the call that receives it. A `Key` stays the same
object while its digest is configured, so its counters survive a reload. Without keys, every caller
may do everything. Called by `api/context` (the key ring) and `auth/authorize` (tokens).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from hmac import compare_digest
from typing import Final

from topics_server.values.model import is_hashed_name
from topics_server.values.texts.key_list import ALL, KeyGrant

# Needs other than scopes: any key, or a key only if probes require one.
ANY_KEY: Final = 0
PROBE: Final = -1

_BEARER: Final = b"bearer "
_OWNER: Final = b"topics-owner:"


class Caller:
    """The rights of a request's caller. `key` is None if no keys are configured."""

    __slots__ = ("key", "prefixes", "scopes")

    def __init__(self, key: Key | None, scopes: int, prefixes: tuple[str, ...]) -> None:
        self.key = key
        self.scopes = scopes
        self.prefixes = prefixes

    def can(self, scopes: int) -> bool:
        """Whether all of these scopes are granted."""
        return self.scopes & scopes == scopes

    def may_name(self, name: str) -> bool:
        """Whether the name of a topic or router, or the path of a stream, has one of the prefixes.

        A topic name that is a hash stands for a stream: then the stream's path is compared. Without
        such a stream there is no path, and the result is False.
        """
        if not self.prefixes:
            return True
        if is_hashed_name(name):
            path = None if self.key is None else self.key.paths.find(name)
            return path is not None and path.startswith(self.prefixes)
        return name.startswith(self.prefixes)

    def until_revoked(self, end: Callable[[], None]) -> bool:
        """Call `end` once the key is revoked or grants other rights.

        Returns False, and stores nothing, if that has happened already. `forget` cancels the call.
        """
        key = self.key
        if key is None:
            return True
        if self.is_stale:
            return False
        key.open.add(end)
        return True

    @property
    def is_stale(self) -> bool:
        """Whether the key was revoked or grants other rights."""
        key = self.key
        return key is not None and (key.caller is not self or key.is_revoked)

    def forget(self, end: Callable[[], None]) -> None:
        """Cancel `until_revoked`; does nothing for an unknown `end`."""
        if self.key is not None:
            self.key.open.discard(end)


EVERYBODY: Final = Caller(None, ALL, ())


class StreamPaths:
    """The paths of streams. `find` returns the path of a topic's stream; None without such a topic.

    `node` sets it once topics exist.
    """

    __slots__ = ("find",)

    def __init__(self) -> None:
        self.find: Callable[[str], str | None] = _no_path


def _no_path(_name: str) -> str | None:
    return None


class Key:
    """One configured key, and the counters of its use.

    `in_flight`: requests being served; `streams`: open streams and sockets. `caller`: the rights
    that the key grants now; `is_revoked`: the key is no longer configured. `open`: callbacks that
    end its streams. `owner`, a digest of the key's digest, identifies the key on disk, in its watch
    sessions.
    """

    __slots__ = ("caller", "digest", "in_flight", "is_revoked", "open", "owner", "paths", "streams")

    def __init__(self, grant: KeyGrant, paths: StreamPaths | None = None) -> None:
        self.digest = grant.digest
        self.paths = paths or StreamPaths()
        self.owner = hashlib.sha256(_OWNER + grant.digest).hexdigest()[:32]
        self.in_flight = 0
        self.streams = 0
        self.is_revoked = False
        self.open: set[Callable[[], None]] = set()
        self.caller = Caller(self, grant.scopes, grant.prefixes)


class Recalled:
    """The digest of a connection's last token, and its key."""

    __slots__ = ("caller", "digest", "generation")

    def __init__(self) -> None:
        self.caller = EVERYBODY
        self.digest = b""
        self.generation = -1


class KeyRing:
    """All configured keys. `is_on`: there is at least one.

    `covers_probes`: probes require a key, too.
    """

    __slots__ = ("covers_probes", "generation", "is_on", "keys", "paths")

    def __init__(self, grants: Iterable[KeyGrant] = (), *, covers_probes: bool = False) -> None:
        self.paths = StreamPaths()
        self.keys: tuple[Key, ...] = tuple(Key(grant, self.paths) for grant in grants)
        self.is_on = bool(self.keys)
        self.covers_probes = covers_probes
        self.generation = 0

    def find(self, token: bytes, recalled: Recalled | None = None) -> Caller | None:
        """The rights of a token.

        Every digest is compared, so timing does not depend on the match (§0.2).

        A connection that repeats its last token costs one comparison.
        """
        digest = hashlib.sha256(token).digest()
        if (
            recalled is not None
            and recalled.generation == self.generation
            and compare_digest(digest, recalled.digest)
        ):
            return recalled.caller
        found: Caller | None = None
        for key in self.keys:
            if compare_digest(digest, key.digest):
                found = key.caller
        if recalled is not None and found is not None:
            recalled.caller, recalled.digest = found, digest
            recalled.generation = self.generation
        return found

    def prefixes(self) -> frozenset[str]:
        """The prefixes of all keys."""
        return frozenset(prefix for key in self.keys for prefix in key.caller.prefixes)

    def owners_of(self, prefix: str) -> list[str]:
        """The owner ids of the keys with a prefix."""
        return [key.owner for key in self.keys if prefix in key.caller.prefixes]

    def replace(self, grants: Sequence[KeyGrant]) -> list[Key]:
        """Use these keys from now on.

        Returns the former keys that are gone or grant other rights, and ends their streams. A key
        that stays gets its new rights. `grants` must not be empty: a server with keys never becomes
        a server without keys.
        """
        assert grants, "a ring with keys keeps some"
        former = {key.digest: key for key in self.keys}
        touched: list[Key] = []
        keys: list[Key] = []
        for grant in grants:
            key = former.pop(grant.digest, None)
            if key is None:
                key = Key(grant, self.paths)
            elif (key.caller.scopes, key.caller.prefixes) != (grant.scopes, grant.prefixes):
                key.caller = Caller(key, grant.scopes, grant.prefixes)
                touched.append(key)
            keys.append(key)
        self.keys = tuple(keys)
        self.generation += 1
        for key in former.values():
            key.is_revoked = True
        touched += former.values()
        for key in touched:
            for end in tuple(key.open):
                end()
            key.open.clear()
        return touched


def bearer_token(authorization: bytes | None) -> bytes | None:
    """The token of an `Authorization` header; None without one."""
    if authorization is None or authorization[:7].lower() != _BEARER:
        return None
    return authorization[7:].strip(b" \t") or None
