"""The settings that handlers read; `settings.Settings` has them. Pure."""

from __future__ import annotations

from typing import Protocol


class ApiSettings(Protocol):
    """The settings that the API reads; `settings.Settings` has them."""

    @property
    def max_body_bytes(self) -> int:
        """The most bytes of one request body, both sent and inflated."""
        ...

    @property
    def max_limit(self) -> int:
        """The most records of one page."""
        ...

    @property
    def ready_degraded(self) -> int:
        """Status of `/v0/ready` while a shard is read-only: 200 or 503."""
        ...

    @property
    def allowed_origins(self) -> frozenset[bytes]:
        """Origins whose web pages may call, in the form of the `Origin` header."""
        ...

    @property
    def probe_auth(self) -> bool:
        """Whether probes need a key, too."""
        ...

    @property
    def host_names(self) -> tuple[str, ...] | None:
        """The host names that clients may use for this server; None allows any."""
        ...

    @property
    def max_watch_topics(self) -> int:
        """The most topics of one watch session, or of one subscribe command."""
        ...

    @property
    def max_sse_connections(self) -> int:
        """The most open streams and WebSockets together; 0 is unlimited."""
        ...

    @property
    def max_sse_connections_per_key(self) -> int:
        """The most open streams and WebSockets of one key; 0 is unlimited."""
        ...

    @property
    def max_inflight_per_key(self) -> int:
        """The most requests of one key that are served at once; 0 is unlimited."""
        ...

    @property
    def max_claim(self) -> int:
        """The most jobs of one claim, ack, nack or extend."""
        ...

    @property
    def max_node_bytes(self) -> int:
        """The most bytes of a node's name."""
        ...

    @property
    def max_batch_records(self) -> int:
        """The most records of one append."""
        ...

    @property
    def max_record_bytes(self) -> int:
        """The most bytes of one record's data and meta."""
        ...

    @property
    def max_ws_commands(self) -> int:
        """The most commands that wait on one WebSocket."""
        ...

    @property
    def streams_path(self) -> str:
        """The path at which streams are mounted; empty: streams are not mounted."""
        ...

    @property
    def streams_page_bytes(self) -> int:
        """The most bytes of one page of a stream; a larger message is a page by itself."""
        ...

    @property
    def streams_long_poll_ms(self) -> int:
        """How long a long-poll of a stream waits."""
        ...

    @property
    def streams_sse_ms(self) -> int:
        """How long a stream sends events before its reader must send a new request."""
        ...
