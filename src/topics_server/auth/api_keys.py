"""API keys: their syntax, scopes and prefixes, and finding the key of a token. Pure.

Owns the text form of keys, the digests they are kept as, and the one comparison of a token with
them. Invariants: no plaintext outlives the call it is given to, and no message holds any part of an
entry; a `Key` stays the same object for as long as its digest is configured, so that what is
counted on it stays right over a reload. A ring without keys lets everybody do everything. Called by
`settings` (text), `node` (the ring) and `auth/authorize` (tokens).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from hmac import compare_digest
from typing import Final

import msgspec

from topics_server.values.model import is_hashed_name

READ: Final = 1
WRITE: Final = 2
DELETE: Final = 4
ADMIN: Final = 8
ALL: Final = READ | WRITE | DELETE | ADMIN
# What a route may ask for beside scopes: any key at all; a key only where probes ask for one.
ANY_KEY: Final = 0
PROBE: Final = -1

SCOPE_NAMES: Final = {"read": READ, "write": WRITE, "delete": DELETE, "admin": ADMIN}
_SCOPES: Final = {name[0]: scope for name, scope in SCOPE_NAMES.items()} | SCOPE_NAMES
_SCOPES["rw"] = READ | WRITE

# What can travel as a bearer token, but for what separates entries and their fields.
_SECRET: Final = re.compile(r"[\x21-\x2b\x2d-\x39\x3b-\x7e]+")
# How a topic's or a router's name may begin.
_PREFIX: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:>-]{0,254}")
_BEARER: Final = b"bearer "
_OWNER: Final = b"topics-owner:"


class KeysError(ValueError):
    """A list of keys that is not taken, in one line without any part of it."""


class KeyGrant(msgspec.Struct, frozen=True):
    """One configured key: the SHA-256 of its secret, its scopes, and its prefixes; none: any."""

    digest: bytes
    scopes: int
    prefixes: tuple[str, ...] = ()


class Caller:
    """What whoever made a request may do. `key` is None where no keys are configured."""

    __slots__ = ("key", "prefixes", "scopes")

    def __init__(self, key: Key | None, scopes: int, prefixes: tuple[str, ...]) -> None:
        self.key = key
        self.scopes = scopes
        self.prefixes = prefixes

    def can(self, scopes: int) -> bool:
        """Whether all of these scopes are granted."""
        return self.scopes & scopes == scopes

    def may_name(self, name: str) -> bool:
        """Whether the name of a topic or router, or the path of a stream, is inside the prefixes.

        A hashed name says nothing of whose stream it is: the stream's own path counts. Where no
        stream has that name there is no path, and nothing to name.
        """
        if not self.prefixes:
            return True
        if is_hashed_name(name):
            path = None if self.key is None else self.key.paths.find(name)
            return path is not None and path.startswith(self.prefixes)
        return name.startswith(self.prefixes)

    def until_revoked(self, end: Callable[[], None]) -> bool:
        """Have `end` called once the key is taken away or grants other things.

        False, and nothing is kept, if that has happened already. `forget` takes it back.
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
        """Whether the key was taken away, or grants other things."""
        key = self.key
        return key is not None and (key.caller is not self or key.is_revoked)

    def forget(self, end: Callable[[], None]) -> None:
        """See `until_revoked`; does nothing where `end` is not known."""
        if self.key is not None:
            self.key.open.discard(end)


EVERYBODY: Final = Caller(None, ALL, ())


class StreamPaths:
    """The own paths of streams. `find`: of a topic's name, None if there is no such topic.

    `node` sets it once there are topics.
    """

    __slots__ = ("find",)

    def __init__(self) -> None:
        self.find: Callable[[str], str | None] = _no_path


def _no_path(_name: str) -> str | None:
    return None


class Key:
    """One configured key, and what is counted of its use.

    `in_flight`: requests being served; `streams`: open streams and sockets. `caller` is what it
    grants now; `is_revoked`: it is not configured any more. `open`: what ends each of its streams.
    `owner` stands for it on disk, in what it made: a digest of its digest.
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
    """The token that one connection presented last, as its digest, and whose it is."""

    __slots__ = ("caller", "digest", "generation")

    def __init__(self) -> None:
        self.caller = EVERYBODY
        self.digest = b""
        self.generation = -1


class KeyRing:
    """All configured keys. `is_on`: there are some; `covers_probes`: probes ask for one, too."""

    __slots__ = ("covers_probes", "generation", "is_on", "keys", "paths")

    def __init__(self, grants: Iterable[KeyGrant] = (), *, covers_probes: bool = False) -> None:
        self.paths = StreamPaths()
        self.keys: tuple[Key, ...] = tuple(Key(grant, self.paths) for grant in grants)
        self.is_on = bool(self.keys)
        self.covers_probes = covers_probes
        self.generation = 0

    def find(self, token: bytes, recalled: Recalled | None = None) -> Caller | None:
        """Whose token this is. All digests are compared, whichever matches (§0.2).

        A connection that presents what it presented last is spared all comparisons but one.
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
        """What stands for the keys with a prefix in what they made."""
        return [key.owner for key in self.keys if prefix in key.caller.prefixes]

    def replace(self, grants: Sequence[KeyGrant]) -> list[Key]:
        """Take these keys from now on; those of the former that are gone or grant other things.

        Their streams are ended; whose key stays comes back with what it grants now. `grants` must
        not be empty: keys that are on stay on.
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
    """The token of an `Authorization` header; None if there is none."""
    if authorization is None or authorization[:7].lower() != _BEARER:
        return None
    return authorization[7:].strip(b" \t") or None


# --- the text form ----------------------------------------------------------------------------


def parse_keys(text: str) -> tuple[KeyGrant, ...]:
    """The keys of `TOPICS_API_KEYS`: entries separated by commas. Raises `KeysError`."""
    entries = [(f"entry {number}", part) for number, part in enumerate(text.split(","), 1)]
    return _grants(entries)


def parse_key_lines(text: str) -> tuple[KeyGrant, ...]:
    """The keys of a file: an entry a line, blank lines and those with `#` first are skipped.

    Raises `KeysError`, also where there is no entry.
    """
    lines = [(f"line {number}", line) for number, line in enumerate(text.splitlines(), 1)]
    entries = [(where, line) for where, line in lines if line.strip()[:1] not in ("", "#")]
    if not entries:
        raise KeysError("there is no key")
    return _grants(entries)


def _grants(entries: Iterable[tuple[str, str]]) -> tuple[KeyGrant, ...]:
    places: dict[bytes, str] = {}
    found: list[KeyGrant] = []
    for where, entry in entries:
        try:
            grant = _grant(entry.strip())
        except KeysError as error:
            raise KeysError(f"{where} {error}") from None
        if grant.digest in places:
            raise KeysError(f"{where} has the key of {places[grant.digest]} again")
        places[grant.digest] = where
        found.append(grant)
    return tuple(found)


def _grant(entry: str) -> KeyGrant:
    """`key`, `key:scopes` or `key:scopes:prefixes`."""
    secret, _, rest = entry.partition(":")
    scopes, _, prefixes = rest.partition(":")
    if not secret:
        raise KeysError("has no key")
    if _SECRET.fullmatch(secret) is None:
        raise KeysError("has a key of other than visible ASCII characters without comma and colon")
    digest = hashlib.sha256(secret.encode("ascii")).digest()
    return KeyGrant(digest, _parse_scopes(scopes), _parse_prefixes(prefixes))


def _parse_scopes(text: str) -> int:
    scopes = 0 if text else ALL
    for word in text.split("+") if text else ():
        if word not in _SCOPES:
            raise KeysError(
                "has a scope that is none of read, write, delete, admin (or r, w, d, a, rw), "
                "joined by +"
            )
        scopes |= _SCOPES[word]
    return scopes


def _parse_prefixes(text: str) -> tuple[str, ...]:
    if not text:
        return ()
    prefixes = text.split("|")
    if not all(_PREFIX.fullmatch(prefix) for prefix in prefixes):
        raise KeysError("has a prefix that no name of a topic or router starts with")
    return tuple(dict.fromkeys(prefixes))
