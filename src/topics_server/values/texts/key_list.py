"""The text form of API keys: a secret, its scopes and its prefixes. Pure.

Invariants: no plaintext is kept after the call that receives it, and no message holds any part of
an entry. Called by `settings`, for the environment and for the key file; `auth/api_keys` compares
tokens with the grants.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Final

import msgspec

READ: Final = 1
WRITE: Final = 2
DELETE: Final = 4
ADMIN: Final = 8
ALL: Final = READ | WRITE | DELETE | ADMIN
SCOPE_NAMES: Final = {"read": READ, "write": WRITE, "delete": DELETE, "admin": ADMIN}
_SCOPES: Final = {name[0]: scope for name, scope in SCOPE_NAMES.items()} | SCOPE_NAMES
_SCOPES["rw"] = READ | WRITE

# The characters of a bearer token, without those that separate entries and their fields.
_SECRET: Final = re.compile(r"[\x21-\x2b\x2d-\x39\x3b-\x7e]+")
# A prefix: the first characters of a topic's or a router's name.
_PREFIX: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:>-]{0,254}")


class KeysError(ValueError):
    """An invalid list of keys; the message has one line and no part of the list."""


class KeyGrant(msgspec.Struct, frozen=True):
    """One configured key: its secret's SHA-256, its scopes, its prefixes (none: all names)."""

    digest: bytes
    scopes: int
    prefixes: tuple[str, ...] = ()


def parse_keys(text: str) -> tuple[KeyGrant, ...]:
    """The keys of `TOPICS_API_KEYS`: entries separated by commas. Raises `KeysError`."""
    entries = [(f"entry {number}", part) for number, part in enumerate(text.split(","), 1)]
    return _grants(entries)


def parse_key_lines(text: str) -> tuple[KeyGrant, ...]:
    """The keys of a file: one entry a line; blank lines and lines with `#` first are skipped.

    Raises `KeysError`, even if there is no entry at all.
    """
    lines = [(f"line {number}", line) for number, line in enumerate(text.splitlines(), 1)]
    entries = [(where, line) for where, line in lines if line.strip()[:1] not in ("", "#")]
    if not entries:
        raise KeysError("there is no key")
    return _grants(entries)


def _grants(entries: Iterable[tuple[str, str]]) -> tuple[KeyGrant, ...]:
    origins: dict[bytes, str] = {}
    found: list[KeyGrant] = []
    for where, entry in entries:
        try:
            grant = _grant(entry.strip())
        except KeysError as error:
            raise KeysError(f"{where} {error}") from None
        if grant.digest in origins:
            raise KeysError(f"{where} has the key of {origins[grant.digest]} again")
        origins[grant.digest] = where
        found.append(grant)
    return tuple(found)


def _grant(entry: str) -> KeyGrant:
    """Parse one entry: `key`, `key:scopes` or `key:scopes:prefixes`."""
    secret, _, rest = entry.partition(":")
    scopes, _, prefixes = rest.partition(":")
    if not secret:
        raise KeysError("has no key")
    if _SECRET.fullmatch(secret) is None:
        raise KeysError(
            "has a key with a character that is not allowed: a key is visible ASCII without "
            "comma and colon"
        )
    digest = hashlib.sha256(secret.encode("ascii")).digest()
    return KeyGrant(digest, _parse_scopes(scopes), _parse_prefixes(prefixes))


def _parse_scopes(text: str) -> int:
    scopes = 0 if text else ALL
    for word in text.split("+") if text else ():
        if word not in _SCOPES:
            raise KeysError(
                "has an unknown scope; scopes are read, write, delete, admin (or r, w, d, a, rw), "
                "joined by +"
            )
        scopes |= _SCOPES[word]
    return scopes


def _parse_prefixes(text: str) -> tuple[str, ...]:
    if not text:
        return ()
    prefixes = text.split("|")
    if not all(_PREFIX.fullmatch(prefix) for prefix in prefixes):
        raise KeysError("has a prefix with which no name of a topic or router can start")
    return tuple(dict.fromkeys(prefixes))
