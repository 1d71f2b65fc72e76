"""Small JSON files with a checksum: `FORMAT` and `STORE`.

    {
      "format": 2,
      ...
      "checksum": "0123456789abcdef"
    }

`checksum` is the XXH3-64 of the whole file with the 16 digits of `checksum` replaced by zeros. It
covers fields that a reader does not know, so files may gain fields. Called by `wal/directory.py`
and `wal/cold_folder.py`.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec
import xxhash

_CHECKSUM: Final = re.compile(rb'"checksum": "([0-9a-f]{16})"\n\}\n\Z')
_ZEROS: Final = "0" * 16


def encode_checked(value: msgspec.Struct) -> bytes:
    """The file's content: the fields of `value` in order, then the checksum."""
    fields = {**msgspec.structs.asdict(value), "checksum": _ZEROS}
    data = msgspec.json.format(msgspec.json.encode(fields)) + b"\n"
    digits = xxhash.xxh3_64_hexdigest(data).encode()
    return data[: _start(data)] + digits + data[_start(data) + len(digits) :]


def is_checked(data: bytes) -> bool:
    """Whether the content is byte for byte the output of `encode_checked`."""
    found = _CHECKSUM.search(data)
    if found is None:
        return False
    zeroed = data[: found.start(1)] + _ZEROS.encode() + data[found.end(1) :]
    return xxhash.xxh3_64_hexdigest(zeroed).encode() == found[1]


def _start(data: bytes) -> int:
    found = _CHECKSUM.search(data)
    assert found is not None
    return found.start(1)
