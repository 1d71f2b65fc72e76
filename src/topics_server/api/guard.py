"""Admission: plain calls that any front end makes before a handler runs.

Readiness here decides for the data plane and the control plane alike; probes do not ask. Keys,
scopes and caps are decided here too once they exist. Called by handlers and by `api/http`.
"""

from __future__ import annotations

from topics_server.api.problems import too_large
from topics_server.api.state import ServerState, Store
from topics_server.errors import Code, TopicsError, invalid


def admit(state: ServerState) -> Store:
    """The store, if requests are taken now; raises `not_ready` or `shutting_down`."""
    if state.phase == "ready":
        assert state.store is not None, "ready means there is a store"
        return state.store
    raise refusal(state)


def refusal(state: ServerState) -> TopicsError:
    """Why no requests are taken now."""
    assert state.phase != "ready"
    if state.phase == "draining":
        return TopicsError(Code.SHUTTING_DOWN, "the server is shutting down")
    progress = min(1.0, max(0.0, state.progress()))
    return TopicsError(
        Code.NOT_READY,
        "the server is replaying its journal",
        {"replay_progress": round(progress, 4)},
    )


def check_declared_length(declared: bytes, max_bytes: int) -> None:
    """Refuse a body by its Content-Length, before a byte of it is read."""
    if not declared.isdigit():
        raise invalid("Content-Length must be a number", "Content-Length")
    if len(declared) > 18 or int(declared) > max_bytes:
        raise too_large(max_bytes)
