"""A server that collects no garbage by itself, and tells what only a collection frees.

Each connection to the port in the file `garbage-port` gets the number of such objects by kind, as
JSON. Arguments are those of `topics`: `python -m tests.crash.garbage.child serve`.
"""

from __future__ import annotations

import gc
import json
import socket
import threading
from pathlib import Path

from tests.garbage import take_garbage
from topics_server.cli import main as run_verb
from topics_server.runtime import garbage_collector


def _begin() -> None:
    """Freeze what the start made, and collect no more."""
    gc.collect()
    gc.freeze()


class _NoCollections:
    """Collects nothing under pressure either."""

    def __init__(self, loop: object) -> None:
        """See `garbage_collector.Collections`."""

    def on_pressure(self, is_pressed: bool) -> None:
        """See `garbage_collector.Collections`."""


def _tell(listener: socket.socket) -> None:
    while True:
        asking, _ = listener.accept()
        with asking:
            asking.sendall(json.dumps(take_garbage()).encode())


def main() -> None:
    """Run the verb of the command line."""
    gc.disable()
    garbage_collector.begin = _begin
    garbage_collector.freeze = lambda: None
    garbage_collector.Collections = _NoCollections  # type: ignore[misc, assignment]
    listener = socket.create_server(("127.0.0.1", 0))
    Path("garbage-port").write_text(f"{listener.getsockname()[1]}\n")
    threading.Thread(target=_tell, args=(listener,), daemon=True).start()
    run_verb(prog_name="topics")


if __name__ == "__main__":
    main()
