"""Where a subscription begins in existing topics: at a seq, a time, the last records or a consumer.

Used by `handlers` and by `api/websocket/handlers`.
"""

from __future__ import annotations

from collections.abc import Mapping

from topics_server.api.context import StorePort
from topics_server.api.watch.requests import Start
from topics_server.engine.answers import ReadRequest
from topics_server.engine.filters import Filter
from topics_server.engine.subscribe.dispatcher import TopicView
from topics_server.values.errors import Code, TopicsError
from topics_server.values.limits import PAGE_BYTES_MAX


async def begin_seqs(
    store: StorePort,
    views: Mapping[str, TopicView],
    starts: Mapping[str, Start],
    nodes: frozenset[str],
    wanted: Filter | None = None,
) -> dict[str, int]:
    """The seq at which each topic's cursor begins. `last` counts only records that the reader gets.

    Raises `consumer_not_found`.
    """
    seqs: dict[str, int] = {}
    # Read the consumers first, before any await: a topic that is dropped and created again
    # meanwhile has other consumers.
    for name, view in views.items():
        start = starts[name]
        seqs[name] = view.head_seq if start.tail else start.from_seq
        if start.consumer is not None:
            seqs[name] = store.read_start(name, start.consumer)
    for name in views:
        start = starts[name]
        if start.place is not None:
            asked = ReadRequest(0, 1, PAGE_BYTES_MAX, nodes=nodes, filter=wanted, start=start.place)
            try:
                seqs[name] = await store.cursor_of(name, asked)
            except TopicsError as error:
                # The topic was dropped meanwhile. The stream reports that.
                if error.code is not Code.TOPIC_NOT_FOUND:
                    raise
    return seqs
