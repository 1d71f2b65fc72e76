"""The entry point of the command `topics` and of `python -m topics_server VERB …`.

Before any other import it opens `/dev/null` for closed standard streams, and makes a starting
server ignore SIGHUP and collect no garbage. Then it runs the command line.
"""

from __future__ import annotations

import gc
import os
import signal
import sys


def open_standard_streams() -> None:
    """Open `/dev/null` in place of each standard stream that the caller has closed.

    Otherwise the next file that the process opens gets the closed stream's number: a journal or a
    lock file with descriptor 2 would receive every message for the user.
    """
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            # The kernel assigns the lowest free number, and all lower numbers are open by now.
            opened = os.open(os.devnull, os.O_RDWR)
            assert opened == descriptor, "standard streams are opened before any other file"
            os.set_inheritable(opened, True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))


def main() -> None:
    """Run the verb named on the command line."""
    if "serve" in sys.argv[1:2]:
        # A SIGHUP that arrives before the server can handle it must not end the process. The server
        # reads its key file after this line, so no reload is missed.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        # Imports make objects that stay. To look for garbage among them would take a tenth of the
        # start. `runtime/garbage_collector` turns collections on when the store has recovered.
        gc.disable()
        # numpy's algebra library starts a thread for each further core, which spins for 25 ms of
        # processor time. Neither this process nor its helper processes use that library.
        os.putenv("OPENBLAS_NUM_THREADS", "1")
    open_standard_streams()
    from topics_server.cli import main as run_verb

    # Both entry points use this name in usage lines and in the variable of shell completion.
    run_verb(prog_name="topics")


if __name__ == "__main__":
    main()
