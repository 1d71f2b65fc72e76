"""The files of a folder that `topics export` wrote, by topic, in the order of its manifest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from topics_server.cli.connection import Failure

MANIFEST: Final = "_export.json"


class _File(msgspec.Struct):
    path: str
    bytes: int


class _Topic(msgspec.Struct):
    files: list[_File]


class _Manifest(msgspec.Struct):
    format: str
    topics: dict[str, _Topic]


_MANIFEST: Final = msgspec.json.Decoder(_Manifest)


def files_by_topic(folder: Path, topics: Sequence[str], prefix: str | None) -> dict[str, list[str]]:
    """The files of the named topics, of those with the prefix, or of all. Raises `Failure`.

    A later export only adds files at the end, so the lines of a topic keep their numbers.
    """
    path = folder / MANIFEST
    try:
        manifest = _MANIFEST.decode(path.read_bytes())
    except FileNotFoundError:
        raise Failure(f"{folder}: no export is in it: {MANIFEST} is missing") from None
    except OSError as error:
        raise Failure(f"{path}: {error.strerror or error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise Failure(f"{path}: is not the manifest of an export") from None
    if manifest.format != "ndjson":
        raise Failure(
            f"{folder}: is an export as {manifest.format}; topics import reads exports that were "
            "made with --format ndjson"
        )
    missing = [name for name in topics if name not in manifest.topics]
    if missing:
        raise Failure(f"{folder}: the export has no topic {missing[0]}")
    chosen = list(dict.fromkeys(topics)) or sorted(
        name for name in manifest.topics if name.startswith(prefix or "")
    )
    return {name: _checked(folder, manifest.topics[name].files) for name in chosen}


def _checked(folder: Path, files: Sequence[_File]) -> list[str]:
    for file in files:
        path = folder / file.path
        try:
            size = path.stat().st_size
        except OSError as error:
            raise Failure(f"{path}: {error.strerror or error}") from None
        if not path.resolve().is_relative_to(folder.resolve()):
            raise Failure(f"{path}: lies outside the export's folder")
        if size != file.bytes:
            raise Failure(f"{path}: has {size} bytes, and {file.bytes} by the export's manifest")
    return [str(folder / file.path) for file in files]
