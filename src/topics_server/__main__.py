"""The entry point of the command `topics` and of `python -m topics_server VERB …`.

Does what must happen before any other import: closed standard streams become `/dev/null`, and a
starting server ignores SIGHUP and collects no garbage. Then it runs the command line.
"""

from __future__ import annotations

import gc
import os
import signal
import sys


def open_standard_streams() -> None:
    """Open `/dev/null` in place of each standard stream that the caller has closed.

    Otherwise the next file that the process opens takes its number: a journal or a lock file as
    descriptor 2 would receive every message for the user.
    """
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            # The kernel gives out the lowest free number, and all lower ones are open by now.
            opened = os.open(os.devnull, os.O_RDWR)
            assert opened == descriptor, "standard streams are opened before any other file"
            os.set_inheritable(opened, True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))


def main() -> None:
    """Run the verb named on the command line."""
    if "serve" in sys.argv[1:2]:
        # A SIGHUP that comes before the server can handle it must not end the process. The server
        # reads its key file after this line, so no reload is missed.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        # Imports make objects that stay: to look for garbage among them is a tenth of the start.
        # `runtime/garbage_collector` turns collections on when the store has recovered.
        gc.disable()
        # numpy's algebra library starts a thread for each further core, which spins for 25 ms of
        # processor time. Nothing here uses that library, nor in the helper processes.
        os.putenv("OPENBLAS_NUM_THREADS", "1")
    open_standard_streams()
    from topics_server.cli import main as run_verb

    # The same name however it was started: in usage lines, and in the variable of shell completion.
    run_verb(prog_name="topics")


if __name__ == "__main__":
    main()
