"""The route `POST /v0/admin/seal`.

Plain functions of the server's state and one request. Called through the route table in
`api/routes`.
"""

from __future__ import annotations

from typing import Final

import msgspec

from topics_server.api.context import ServerState, StorePort
from topics_server.api.messages.bounded_lists import check_items
from topics_server.api.messages.requests import decode_body
from topics_server.api.messages.responses import render_json
from topics_server.api.readiness import admit
from topics_server.api.request import Request, Response
from topics_server.auth.authorize import check_name
from topics_server.values.errors import Code, StorageError, TopicsError, invalid
from topics_server.values.limits import PAGE_SIZE_MAX, SEAL_TOPICS_MAX
from topics_server.values.model import is_topic_name


class _Seal(msgspec.Struct):
    topics: list[str] | None = None


class _Lists(msgspec.Struct):
    topics: msgspec.Raw = msgspec.Raw(b"")


_SEAL: Final = msgspec.json.Decoder(_Seal)
_LISTS: Final[msgspec.json.Decoder[msgspec.Struct]] = msgspec.json.Decoder(_Lists)


async def seal(state: ServerState, request: Request) -> Response:
    """`POST /v0/admin/seal`: seal now; without a body or names, every topic of the caller."""
    store = admit(state)
    assert state.sealing is not None, "ready means there is a sealer"
    check_items(request.body, _LISTS, {"topics": SEAL_TOPICS_MAX})
    asked = decode_body(_SEAL, request.body or b"{}").topics
    if asked is None:
        names = _all_names(store, request)
    else:
        names = _checked(store, request, asked)
    try:
        unsealed, segments = await state.sealing.seal_topics(names)
    except StorageError as error:
        raise TopicsError(
            Code.STORAGE_READ_ONLY, f"not everything could be sealed: {error}"
        ) from error
    fields = {"topics": len(names), "segments": segments, "unsealed_records": unsealed}
    return Response(200, render_json(fields, request.elapsed_ms()))


def _all_names(store: StorePort, request: Request) -> list[str]:
    """Every topic that the caller may name."""
    names: list[str] = []
    after: str | None = None
    for _ in range(store.topic_count // PAGE_SIZE_MAX + 2):
        page = store.list_topics(prefix="", after=after, page_size=PAGE_SIZE_MAX, touch=False)
        names += [topic.name for topic in page.topics]
        after = page.next_after
        if after is None:
            break
    return [name for name in names if request.caller.may_name(name)]


def _checked(store: StorePort, request: Request, asked: list[str]) -> list[str]:
    """The names, without repeats; raises for a name that is invalid, not allowed or unknown."""
    if len(asked) > SEAL_TOPICS_MAX:
        raise invalid(f"at most {SEAL_TOPICS_MAX} topics at once", "topics")
    for number, name in enumerate(asked):
        field = f"topics[{number}]"
        if not is_topic_name(name):
            raise invalid("is not a topic name", field)
        check_name(request.caller, name, field)
        store.state(name, touch=False)
    return list(dict.fromkeys(asked))
