"""Saves the bytes that `topics repair` overwrites, with a report.

Called by `repair`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from topics_server.wal import layout
from topics_server.wal.folders import make_durable_dirs
from topics_server.wal.fs import Fs


def set_aside(
    fs: Fs, data_dir: str, pieces: Sequence[tuple[str, int, int]], report: Mapping[str, object]
) -> str:
    """*Blocking.* Copy pieces (path, start, end) and write the report, durably.

    Returns the folder.
    """
    root = layout.join(data_dir, layout.SET_ASIDE)
    make_durable_dirs(fs, root)
    taken = [int(name) for name in fs.list_dir(root) if name.isdigit()]
    folder = layout.join(root, str(max(taken, default=0) + 1))
    make_durable_dirs(fs, folder)
    for path, start, end in pieces:
        source = fs.open(path)
        try:
            data = source.pread(end - start, start)
        finally:
            source.close()
        _write(fs, layout.join(folder, f"{path.rpartition('/')[2]}.{start}-{end}"), data)
    encoded = msgspec.json.format(msgspec.json.encode(report)) + b"\n"
    _write(fs, layout.join(folder, "report.json"), encoded)
    for each in (folder, root, data_dir):
        fs.sync_dir(each)
    return folder


def _write(fs: Fs, path: str, data: bytes) -> None:
    file = fs.open(path, create=True)
    try:
        file.pwrite(data, 0)
        file.sync()
    finally:
        file.close()
