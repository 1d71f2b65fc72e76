"""Reads API keys from the environment and from the key file.

Reads `TOPICS_API_KEYS_FILE` and `TOPICS_TOKEN_FILE`. A key file that other users may read is
refused. A file from systemd (`LoadCredential`) may be readable for its group, because access lists
appear as group rights. *Blocking.* Called by `Settings.grants` (before the start, at the start, on
SIGHUP) and by `cli/server/health`.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from topics_server.values.texts.key_list import KeyGrant, KeysError, parse_key_lines

_BYTES_MAX: Final = 1_048_576


def configured_keys(
    own: tuple[KeyGrant, ...], path: Path | None, credentials: str | None
) -> tuple[KeyGrant, ...]:
    """`own` and the keys of the file at `path`. Raises `KeysError` with a message of one line.

    `credentials`: the folder of systemd's credentials, if there is one.
    """
    if path is None:
        return own
    try:
        grants = parse_key_lines(_text_of(path, credentials))
    except KeysError as error:
        raise KeysError(f"TOPICS_API_KEYS_FILE={path}: {error}") from None
    known = {grant.digest for grant in own}
    if any(grant.digest in known for grant in grants):
        raise KeysError(f"TOPICS_API_KEYS_FILE={path}: it has a key of TOPICS_API_KEYS again")
    return own + grants


def first_key(path: Path) -> str:
    """A client's key: the first of a file of keys, without scopes and prefixes.

    Raises `KeysError` with a message of one line.
    """
    lines = [line.strip() for line in _text_of(path, None, is_shared=True).splitlines()]
    for line in lines:
        if line and not line.startswith("#"):
            return line.partition(":")[0]
    raise KeysError("it has no key")


def _text_of(path: Path, credentials: str | None, *, is_shared: bool = False) -> str:
    try:
        with open(path, "rb", opener=_open_without_waiting) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise KeysError("it is not a file")
            if not is_shared and mode & _forbidden_mode(path, credentials):
                raise KeysError("others may read it: chmod 600")
            content = file.read(_BYTES_MAX + 1)
    except OSError as error:
        raise KeysError(error.strerror or "it cannot be read") from None
    if len(content) > _BYTES_MAX:
        raise KeysError(f"it is larger than {_BYTES_MAX} bytes")
    try:
        return content.decode("ascii")
    except UnicodeDecodeError:
        raise KeysError("it contains characters that are not ASCII") from None


def _open_without_waiting(path: str, flags: int) -> int:
    """Open a file; opening a FIFO without a writer does not block."""
    return os.open(path, flags | os.O_NONBLOCK)


def _forbidden_mode(path: Path, credentials: str | None) -> int:
    if credentials and path.parent == Path(credentials):
        return stat.S_IRWXO
    return stat.S_IRWXG | stat.S_IRWXO
