"""Makes a server's syncs fail or stall, from outside: Python loads it before our code.

`tests/contract/driver.py` puts this folder first on the server's PYTHONPATH. While the file named
by CONTRACT_SYNC_FAULT exists, every sync either fails with EIO (the file says `fail`) or first
waits that many seconds. The server's own code contains nothing for it.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable

_path = os.environ.get("CONTRACT_SYNC_FAULT", "")


def _faulty(sync: Callable[..., None]) -> Callable[..., None]:
    def faulty(fd: int) -> None:
        try:
            with open(_path, encoding="ascii") as file:
                order = file.read().strip()
        except FileNotFoundError:
            order = ""
        if order == "fail":
            raise OSError(errno.EIO, "injected by the contract tests")
        if order:
            time.sleep(float(order))
        sync(fd)

    return faulty


if _path:
    os.fsync = _faulty(os.fsync)
    if hasattr(os, "fdatasync"):
        os.fdatasync = _faulty(os.fdatasync)
