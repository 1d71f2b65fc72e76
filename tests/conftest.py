"""What every test relies on: asyncio as the only event loop, and Hypothesis without a deadline.

`--hypothesis-profile=ci` makes property tests repeat exactly; the default profile explores.
"""

from __future__ import annotations

import logging
import signal

import pytest
from hypothesis import settings

settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("default")


# A job in the background of a shell ignores Ctrl-C, and so would every process that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_not_of_the_machine(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Executing ")


# A slow turn that asyncio's debug mode tells of is the machine's: no test of logs reads it.
logging.getLogger("asyncio").addFilter(_is_not_of_the_machine)


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """Tests marked `anyio` run on asyncio, the only loop there is, in its debug mode.

    Debug mode refuses calls into the loop from another thread, which is how state would be torn.
    """
    return "asyncio", {"debug": True}
