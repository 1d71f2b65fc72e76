"""What a piece of work leaves for the garbage collector.

The server never examines old objects (`runtime/garbage_collector`). So an object in a reference
cycle that outlives two collections of young objects stays for ever.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def nothing_for_the_collector() -> Iterator[None]:
    """Fail if the block leaves objects that only a collection frees."""
    gc.collect()
    gc.disable()
    # As in the server: what is older is never examined, so it is no garbage of the block.
    had_frozen = gc.get_freeze_count() > 0
    gc.freeze()
    # pytest keeps all log records, and with them the logged errors.
    logging.disable()
    try:
        yield
        found = take_garbage()
    finally:
        logging.disable(logging.NOTSET)
        if not had_frozen:
            gc.unfreeze()
        gc.enable()
    assert not found, f"only a collection frees {dict(found)}"


def take_garbage() -> Counter[str]:
    """Free all garbage; returns how many objects of each kind it had."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        found = Counter(map(_kind_of, gc.garbage))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    gc.collect()
    return found


def _kind_of(found: Any) -> str:
    kind = type(found).__name__
    if kind == "frame":
        return f"frame {found.f_code.co_qualname}"
    name = getattr(found, "__qualname__", "")
    return f"{kind} {name}" if name else kind
