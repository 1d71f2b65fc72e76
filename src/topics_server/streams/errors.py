"""The error messages of the Durable Streams API. Pure."""

from __future__ import annotations

from topics_server.engine.answers import Gap
from topics_server.values.errors import Code, TopicsError, clipped


def not_found(path: str) -> TopicsError:
    """404: no stream has this path."""
    message = f'stream "{clipped(path)}" does not exist'
    return TopicsError(Code.STREAM_NOT_FOUND, message, {"stream": path})


def gone(path: str, why: str = "") -> TopicsError:
    """410: the stream was deleted and still has forks, or the offset is no longer retained."""
    message = why or f'stream "{clipped(path)}" was deleted and still has forks'
    return TopicsError(Code.STREAM_GONE, message, {"stream": path})


def held(path: str) -> TopicsError:
    """409: the path belongs to a deleted stream until its last fork is deleted."""
    return conflict(path, f'stream "{clipped(path)}" was deleted and still has forks')


def lost(path: str, gap: Gap, next_offset: str) -> TopicsError:
    """410: unread messages are gone; names the offset to continue at."""
    detail = {
        "stream": path,
        "reason": gap.reason.value,
        "missed_estimate": gap.missed_estimate,
        "next_offset": next_offset,
    }
    return TopicsError(Code.STREAM_GONE, "messages after this offset are lost", detail)


def conflict(path: str, message: str, field: str | None = None) -> TopicsError:
    """409: the stream differs from the request."""
    detail = {"stream": path} | ({"field": field} if field else {})
    return TopicsError(Code.STREAM_CONFLICT, message, detail)
