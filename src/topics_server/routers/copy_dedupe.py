"""Which copies a destination already holds (`exactly_once`, §6).

A cursor and its copies are one entry, so a router never repeats its own copies. A router that is
created again under an old name reads its source from the start. The stamps of the copies in the
destination show which records the router must skip. A deleted or evicted copy leaves no stamp.
Called by `routers/pump`.
"""

from __future__ import annotations

from topics_server.engine.answers import ReadRequest
from topics_server.engine.ports import Clock
from topics_server.engine.read.page import plan_page
from topics_server.engine.store import Store
from topics_server.engine.topic.topic import Topic
from topics_server.values.copies import stamp_of
from topics_server.values.entries import RouterStamp
from topics_server.values.limits import PAGE_BYTES_MAX

_PAGE_RECORDS = 1_000


async def held_copies(store: Store, clock: Clock, dest: Topic, stamp: RouterStamp) -> set[int]:
    """Seqs of the source with a live copy in `dest` that has this stamp.

    Raises `StorageError` when the destination cannot be read.
    """
    held: set[int] = set()
    from_seq = 0
    while True:
        request = ReadRequest(from_seq, _PAGE_RECORDS, PAGE_BYTES_MAX)
        page = await store.complete(dest, plan_page(dest, request, clock.now_ms()))
        if page is None:
            continue
        for piece in page.pieces:
            for row in piece.rows:
                found = stamp_of(piece.block.meta(row))
                if found is not None and found[0] == stamp:
                    held.add(found[1])
        if page.caught_up or page.next_from_seq <= from_seq:
            return held
        from_seq = page.next_from_seq
