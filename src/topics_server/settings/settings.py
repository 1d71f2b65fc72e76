"""The settings: the environment, read once into one frozen `Settings`.

Owns every configurable number and path of the server, their allowed ranges, the relations between
them, and the refusal of unsafe binds. Invariants: every `Settings` is in range and consistent; no
message ever contains a key. `cli/server/serve.py` calls `load` and does not start the server if
`refusal` returns a reason; all other code receives the finished `Settings`. Constants that cannot
be configured are in `values/limits.py`.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from topics_server.settings.key_file import configured_keys
from topics_server.settings.setting_values import (
    Number,
    Switch,
    absolute,
    archive,
    mount,
    not_empty,
    number,
    octal_mode,
    origins,
    other,
    split_origins,
    whole_number,
)
from topics_server.values.limits import (
    FRAME_BYTES_MAX,
    MIB,
    PAGE_BYTES_DEFAULT,
    PAGE_BYTES_MAX,
    PAGE_SCAN_SLOTS_MAX,
    SEGMENT_DATA_BYTES_MAX,
    SEGMENT_RECORDS_MAX,
    STREAMS_PATH,
    TEXT_BYTES_MAX,
    U64_MAX,
    WAL_SHARDS_MAX,
    WS_MESSAGE_BYTES_DEFAULT,
)
from topics_server.values.texts.host_names import LOOPBACK_NAMES, normal_host, split_hosts
from topics_server.values.texts.key_list import KeyGrant, KeysError, parse_keys

PREFIX: Final = "TOPICS_"
Source = Literal["default", "environment", "flag"]

# Read by the command line's client verbs (click), not by the server.
CLIENT_NAMES: Final = frozenset({PREFIX + "URL", PREFIX + "TOKEN"})

# One frame holds a body, a header, an idempotency key and a topic's creation: all must fit.
_BODY_BYTES_MAX: Final = FRAME_BYTES_MAX - MIB
_DAY_MS: Final = 86_400_000
BUSY_POLL_US: Final = 100


class SettingsError(Exception):
    """A value that is not allowed.

    Each of `lines` names a variable, its value and the allowed ones.
    """

    def __init__(self, lines: list[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


def _hosts(value: object) -> object:
    return value if value == "*" or not isinstance(value, str) else ",".join(split_hosts(value))


def _usable_cores() -> int:
    # Not every system reports the cores of a process.
    usable = getattr(os, "sched_getaffinity", None)
    return len(usable(0)) if usable is not None else os.cpu_count() or 1


def _fitting_shards() -> int:
    """Writer threads for this machine: one per usable core, at most four."""
    return max(1, min(4, _usable_cores()))


def _fitting_busy_poll_us() -> int:
    """How long to poll on this machine: not at all if client and server share one core."""
    return BUSY_POLL_US if _usable_cores() > 1 else 0


def split_host(text: str) -> tuple[str, int | None]:
    """(host, port or None) of `host`, `host:port`, `::1` or `[::1]:port`; ValueError if neither."""
    match = re.fullmatch(r"\[([0-9A-Fa-f:.%]+)\](?::([0-9]{1,5}))?", text) or re.fullmatch(
        r"([A-Za-z0-9._-]+)(?::([0-9]{1,5}))?", text
    )
    if match is None:
        return str(ipaddress.IPv6Address(text)), None
    host, port = match[1], match[2]
    if text.startswith("["):
        ipaddress.IPv6Address(host)
    if port is not None and int(port) > 65_535:
        raise ValueError("no such port")
    return host, None if port is None else int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`; False for any name but `localhost`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


@dataclass(frozen=True, slots=True)
class Keys:
    """Configured keys, as digests."""

    grants: tuple[KeyGrant, ...]

    def __repr__(self) -> str:
        return f"{len(self.grants)} keys"


def _keys(value: object) -> object:
    return Keys(parse_keys(value)) if isinstance(value, str) else value


class Settings(BaseSettings):
    """All settings, in the order of `.env.example`. Sizes are bytes, `_ms` is milliseconds."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_ignore_empty=True, frozen=True, extra="forbid"
    )

    # where it listens
    host: str = other("127.0.0.1", "a host name, an address, or host:port", "host, or host:port")
    port: Number = number(4000, 0, 65_535, "0 = any free port; a port in TOPICS_HOST wins")
    port_file: Path | None = other(None, "a path", "file to which the server writes its port")

    # where data live
    data_dir: Annotated[Path, BeforeValidator(not_empty)] = other(
        Path("./topics-data"), "a path", "local disk, one server process"
    )
    data_dir_mode: Annotated[Literal[0o700, 0o750], BeforeValidator(octal_mode)] = other(
        0o700, "0700 or 0750", "mode of the data directory, 0700 or 0750"
    )
    cold_dir: Path | None = other(None, "a path", "second, larger disk for old segments")
    backup_dir: Annotated[Path | None, BeforeValidator(absolute)] = other(
        None, "an absolute path", "folder for backups, on another disk"
    )
    archive_url: Annotated[str | None, BeforeValidator(archive)] = other(
        None,
        "file:/// and an absolute path, or s3://, gs:// or az://, a bucket and a prefix; no user, "
        "no query, no fragment",
        "where the continuous archive lies: another disk, a bucket",
    )
    archive_journal_bytes: Number = number(
        1024 * MIB, 0, U64_MAX, "journal kept while the archive is behind; beyond it a gap begins"
    )
    archive_base_interval_ms: Number = number(
        21_600_000, 1000, 365 * _DAY_MS, "time between two bases of the archive while writing"
    )
    archive_rate_bytes: Number = number(
        50 * MIB, 0, U64_MAX, "bytes a second that the archive is written at most; 0 = unlimited"
    )
    min_free_bytes: Number | None = number(
        None, 0, U64_MAX, "free space below which appends stop; unset: 256 MiB or 1 %"
    )

    # journal, snapshots and segments
    wal_shards: Number = Field(
        default_factory=_fitting_shards,
        ge=1,
        le=WAL_SHARDS_MAX,
        description="writer threads; unset: one per core, at most 4",
        json_schema_extra={"allowed": f"a whole number from 1 to {WAL_SHARDS_MAX}"},
    )
    wal_fsync_interval_ms: Number = number(
        200, 1, 600_000, "background sync of classes disk and memory"
    )
    checkpoint_interval_ms: Number = number(
        30_000, 10, _DAY_MS, "longest time between snapshots while writing"
    )
    checkpoint_wal_bytes: Number = number(
        256 * MIB, 4096, U64_MAX, "journal bytes after which a snapshot is taken"
    )
    segment_max_events: Number = number(
        65_536, 1, SEGMENT_RECORDS_MAX, "records at which a segment is sealed"
    )
    segment_max_bytes: Number = number(
        64 * MIB, 1, SEGMENT_DATA_BYTES_MAX, "bytes at which a segment is sealed"
    )
    segment_max_age_ms: Number = number(
        600_000, 1, 365 * _DAY_MS, "age at which a segment is sealed; first limit wins"
    )
    hot_retain_segments: Number = number(
        4, 0, U64_MAX, "newest segments of a topic kept hot; 0 = off"
    )
    hot_retain_bytes: Number = number(0, 0, U64_MAX, "newest bytes of a topic kept hot; 0 = off")
    scrub_mib_per_second: Number = number(
        8, 0, 100_000, "most MiB/s that the check of sealed segments reads; 0 = off"
    )
    scrub_pass_ms: Number = number(
        7 * _DAY_MS, 1000, 365 * _DAY_MS, "time in which that check reads every segment once"
    )

    # who may call
    # `NoDecode`: a key of digits is valid JSON, but must not be decoded as JSON.
    api_keys: Annotated[Keys | None, NoDecode, BeforeValidator(_keys)] = other(
        None,
        "key, key:scopes or key:scopes:prefixes, several separated by commas",
        "key[:scopes[:prefixes]], comma-separated; docs/TOUR.md, Keys",
    )
    api_keys_file: Path | None = other(
        None, "a path", "file with one key a line, mode 0600; SIGHUP rereads it"
    )
    allow_insecure_no_auth: Switch = other(
        False, "1 or 0", "1 = other machines may call, without keys"
    )
    probe_auth: Switch = other(False, "1 or 0", "1 = /v0/health and /v0/ready need a key, too")
    ready_degraded: Annotated[Literal[200, 503], BeforeValidator(whole_number)] = other(
        200, "200 or 503", "503 = /v0/ready fails while a shard is read-only"
    )
    allowed_hosts: Annotated[str, BeforeValidator(_hosts)] = other(
        "",
        "host names separated by commas, or *",
        "Host names clients may use; unset: any, or its own (loopback without keys)",
    )
    cors_origins: Annotated[str, BeforeValidator(origins)] = other(
        "",
        "scheme://host or scheme://host:port, several separated by commas; no path, no *",
        "exact origins whose web pages may call; comma-separated",
    )

    # limits of a request
    max_body_bytes: Number = number(64 * MIB, 64, _BODY_BYTES_MAX, "body of an append, inflated")
    max_batch_records: Number = number(10_000, 1, SEGMENT_RECORDS_MAX, "records of one append")
    max_record_bytes: Number = number(MIB, 1, _BODY_BYTES_MAX, "data and meta of one record")
    max_meta_bytes: Number = number(
        16_384, 1, _BODY_BYTES_MAX, "meta of one record (at most 64 keys)"
    )
    max_tag_bytes: Number = number(256, 1, TEXT_BYTES_MAX, "tag of a record")
    max_node_bytes: Number = number(128, 1, TEXT_BYTES_MAX, "node of a record or a batch")
    max_limit: Number = number(1000, 1, PAGE_SCAN_SLOTS_MAX, "records of one read")
    max_claim: Number = number(1000, 1, 65_536, "jobs of one claim, ack, nack or extend")

    # limits of the server; 0 = unlimited
    max_topics: Number = number(100_000, 0, U64_MAX, "topics; 0 = unlimited")
    max_topics_per_prefix: Number = number(
        0, 0, U64_MAX, "topics of each prefix of a key; 0 = unlimited"
    )
    max_routers: Number = number(10_000, 0, U64_MAX, "routers; 0 = unlimited")
    max_views: Number = number(100, 0, 10_000, "views; 0 = unlimited")
    max_views_per_topic: Number = number(16, 0, 10_000, "views of one topic; 0 = unlimited")
    view_max_bytes: Number = number(
        10 * 1024 * MIB, MIB, U64_MAX >> 1, "bytes of the file of one view"
    )
    view_after_ms: Number = number(
        4_000, 1, 60_000, "how long a query waits for the view to process `after`"
    )
    view_query_ms: Number = number(5_000, 1, 600_000, "time that one query of a view may take")
    view_query_processes: Number = number(
        2, 1, 64, "processes that answer queries of views, started when needed"
    )
    max_inflight_per_key: Number = number(
        1000, 0, U64_MAX, "requests of one key at once; 0 = unlimited"
    )
    max_total_bytes: Number = number(0, 0, U64_MAX, "retained bytes of all topics; 0 = unlimited")

    # connections
    max_connections: Number | None = number(
        None, 0, U64_MAX, "open connections; 0 = unlimited; unset: as many as open files allow"
    )
    max_receiving_bytes: Number = number(
        256 * MIB, 0, U64_MAX, "bodies and messages being received, of all clients; 0 = unlimited"
    )
    max_url_bytes: Number = number(8192, 1024, 65_536, "target of a request: path and query")
    max_headers: Number = number(100, 16, 1000, "header fields of a request")
    max_header_bytes: Number = number(65_536, 1024, MIB, "header fields of a request together")
    header_timeout_ms: Number = number(
        10_000, 100, 3_600_000, "time for the head of a request or the first byte of a connection"
    )
    body_timeout_ms: Number = number(
        30_000, 100, 3_600_000, "time in which a client must send 4 KiB more of a body"
    )
    keep_alive_ms: Number = number(
        75_000, 100, _DAY_MS, "idle time between two requests of a connection"
    )
    write_timeout_ms: Number = number(
        30_000, 100, 3_600_000, "time in which a client must read more of its answer"
    )

    # watching
    max_watch_topics: Number = number(256, 1, 65_536, "topics of one watch session")
    max_watch_sessions: Number = number(10_000, 0, U64_MAX, "watch sessions; 0 = unlimited")
    max_watch_sessions_per_prefix: Number = number(
        0, 0, U64_MAX, "watch sessions of one prefix; 0 = unlimited"
    )
    max_sse_connections: Number = number(
        10_000, 0, U64_MAX, "open streams and WebSockets; 0 = unlimited"
    )
    max_sse_connections_per_key: Number = number(
        1000, 0, U64_MAX, "open streams of one key; 0 = unlimited"
    )
    session_ttl_ms: Number = number(
        300_000, 1, 365 * _DAY_MS, "how long a session without a stream is kept"
    )
    buffer_grace_ms: Number = number(
        5_000, 0, 3_600_000, "how long a connection may stay full before it counts as slow"
    )
    slow_consumer_timeout_ms: Number = number(
        30_000, 1, 3_600_000, "time after which a connection that stays full is closed"
    )
    max_ws_message_bytes: Number = number(
        WS_MESSAGE_BYTES_DEFAULT, 64, _BODY_BYTES_MAX, "message of a WebSocket client"
    )
    max_ws_commands: Number = number(64, 1, 65_536, "commands waiting on one WebSocket")

    # streams
    streams_path: Annotated[str, BeforeValidator(mount)] = other(
        STREAMS_PATH,
        "a path like /v1/stream, not below /v0 and without a slash at its end, or off",
        "path of Durable Streams; off = none",
    )
    streams_port: Number = number(0, 0, 65_535, "second port for the same server; 0 = none")
    streams_page_bytes: Number = number(
        PAGE_BYTES_DEFAULT, 1, PAGE_BYTES_MAX, "bytes of a page; at least one message is sent"
    )
    streams_long_poll_ms: Number = number(4_000, 1, 600_000, "how long a long-poll waits")
    streams_sse_ms: Number = number(
        60_000, 1, _DAY_MS, "time after which an event stream ends; its reader reconnects"
    )

    # running it
    busy_poll_us: Number = Field(
        default_factory=_fitting_busy_poll_us,
        ge=0,
        le=10_000,
        description=f"polls for a lone client's next request; unset: {BUSY_POLL_US}, 0 on one core",
        json_schema_extra={"allowed": "a whole number from 0 to 10000"},
    )
    shutdown_grace_ms: Number = number(
        10_000, 0, 3_600_000, "time for requests in flight when the server stops"
    )
    log_level: Literal["debug", "info", "warning", "error"] = other(
        "info", "debug, info, warning or error", "debug, info, warning or error"
    )
    log_format: Literal["text", "json"] = other("text", "text or json", "text or json")
    access_log: Literal["off", "sampled", "full"] = other(
        "off", "off, sampled or full", "one line a request: off, sampled or full"
    )
    access_log_sample: Number = number(
        100, 1, 1_000_000, "sampled: logs one request in so many, and every 5xx"
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, then the environment; no settings file is read."""
        return init_settings, env_settings

    @model_validator(mode="before")
    @classmethod
    def _take_port_from_host(cls, values: dict[str, Any]) -> dict[str, Any]:
        host = values.get("host")
        if isinstance(host, str):
            try:
                name, port = split_host(host)
            except ValueError:
                raise ValueError(_complaint("host", host)) from None
            values = {**values, "host": name, **({} if port is None else {"port": port})}
        return values

    @model_validator(mode="after")
    def _relate(self) -> Settings:
        """Lower defaults that exceed a related limit; refuse explicit values that do."""
        receiving = ("max_body_bytes", "max_ws_message_bytes") if self.max_receiving_bytes else ()
        pairs = (
            *((inner, "max_receiving_bytes") for inner in receiving),
            ("max_record_bytes", "max_body_bytes"),
            ("max_meta_bytes", "max_record_bytes"),
            ("buffer_grace_ms", "slow_consumer_timeout_ms"),
        )
        for inner, outer in pairs:
            bound: int = getattr(self, outer)
            if getattr(self, inner) > bound:
                if inner in self.model_fields_set:
                    raise ValueError(
                        f"{variable(inner)}={getattr(self, inner)}: allowed is at most "
                        f"{variable(outer)}, which is {bound}"
                    )
                object.__setattr__(self, inner, bound)
        assert self.max_meta_bytes <= self.max_record_bytes <= self.max_body_bytes
        assert self.buffer_grace_ms <= self.slow_consumer_timeout_ms
        if self.streams_port and not self.streams_path:
            raise ValueError(
                f"{variable('streams_port')}={self.streams_port}: allowed is 0 where "
                f"{variable('streams_path')} is off"
            )
        if self.streams_port and self.streams_port == self.port:
            raise ValueError(
                f"{variable('streams_port')}={self.streams_port}: allowed is a port other than "
                f"{variable('port')}"
            )
        if self.cold_dir is not None and self.cold_dir == self.data_dir:
            raise ValueError(
                f"{variable('cold_dir')}={self.cold_dir}: allowed is a folder other than "
                f"{variable('data_dir')}"
            )
        return self

    @property
    def allowed_origins(self) -> frozenset[bytes]:
        """`cors_origins` in the spelling of the `Origin` header."""
        return frozenset(origin.encode("ascii") for origin in split_origins(self.cors_origins))

    @property
    def has_keys(self) -> bool:
        """Whether callers need a key."""
        return self.api_keys is not None or self.api_keys_file is not None

    def grants(self) -> tuple[KeyGrant, ...]:
        """*Blocking.* All configured keys. Raises `KeysError` for an unusable file."""
        own = () if self.api_keys is None else self.api_keys.grants
        credentials = os.environ.get("CREDENTIALS_DIRECTORY")
        return configured_keys(own, self.api_keys_file, credentials)

    @property
    def host_names(self) -> tuple[str, ...] | None:
        """The names that clients may use for this server; None: any."""
        if self.allowed_hosts not in ("", "*"):
            return (*LOOPBACK_NAMES, *self.allowed_hosts.split(","))
        if self.allowed_hosts == "" and not self.has_keys and is_loopback(self.host):
            shown = f"[{self.host}]" if ":" in self.host else self.host.lower()
            return (*LOOPBACK_NAMES, normal_host(shown) or "")
        return None


def variable(field: str) -> str:
    """The environment name of a field."""
    return PREFIX + field.upper()


def allowed_values(field: str) -> str:
    """The accepted values of a field, in words."""
    extra = Settings.model_fields[field].json_schema_extra
    assert isinstance(extra, dict), f"{field} says what is allowed"
    allowed = str(extra["allowed"])
    if field.endswith("_ms"):
        return f"{allowed} milliseconds, or one with a unit such as 5s or 10m"
    if field.endswith("_bytes"):
        return f"{allowed} bytes, or one with a unit such as 64KB or 1MiB"
    return allowed


def _complaint(field: str, value: object, *, is_flag: bool = False) -> str:
    given = f"--{field.replace('_', '-')} {value}" if is_flag else f"{variable(field)}={value}"
    return f"{given}: allowed is {allowed_values(field)}"


@dataclass(frozen=True, slots=True)
class Loaded:
    """The settings, the source of each, and lines for the log."""

    settings: Settings
    sources: Mapping[str, Source]
    warnings: tuple[str, ...]


def load(flags: Mapping[str, object] | None = None) -> Loaded:
    """Read the environment; `flags` (field → value, None = not given) override it.

    Raises `SettingsError`. `refusal` decides whether a server may start with the result.
    """
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    assert given.keys() <= Settings.model_fields.keys(), "a flag is a setting"
    in_environment = {name.upper() for name, value in os.environ.items() if value}
    if "port" in given and "host" not in given:
        # The flag replaces a port inside TOPICS_HOST.
        given["host"] = _without_port(os.environ.get(variable("host")) or "127.0.0.1")
    elif "port" in given:
        given["host"] = _without_port(str(given["host"]))
    try:
        settings = Settings(**given)  # type: ignore[arg-type]
    except ValidationError as error:
        lines = [_line(item, flags or {}) for item in error.errors(include_url=False)]
        raise SettingsError(lines) from None
    sources: dict[str, Source] = {}
    for name in Settings.model_fields:
        in_env = variable(name) in in_environment
        sources[name] = (
            "flag"
            if name in (flags or {}) and (flags or {})[name] is not None
            else ("environment" if in_env else "default")
        )
    return Loaded(settings, sources, tuple(_warnings(in_environment)))


def _without_port(text: str) -> str:
    try:
        return split_host(text)[0]
    except ValueError:
        return text  # the validator refuses it with a clear line


def _line(error: Any, flags: Mapping[str, object]) -> str:
    if not error["loc"]:
        return str(error["msg"]).removeprefix("Value error, ")
    field = str(error["loc"][0])
    if field in ("api_keys", "archive_url"):
        # The message must not show the given value: it may contain a secret.
        reason = str(error["msg"]).removeprefix("Value error, ")
        return f"{variable(field)}: {reason}; allowed is {allowed_values(field)}"
    return _complaint(field, error["input"], is_flag=flags.get(field) == error["input"])


def _warnings(in_environment: set[str]) -> list[str]:
    known = {variable(name) for name in Settings.model_fields} | CLIENT_NAMES
    strange = sorted(name for name in in_environment - known if name.startswith(PREFIX))
    return [f"{name} is set, but there is no such setting" for name in strange]


def refusal(settings: Settings) -> str | None:
    """Why a server must not start with these settings, in one line; None if it may."""
    try:
        settings.grants()
    except KeysError as error:
        return str(error)
    if settings.has_keys:
        return None
    if not is_loopback(settings.host) and not settings.allow_insecure_no_auth:
        return (
            f"{variable('host')}={settings.host} is reachable from other machines and there are "
            f"no keys: set {variable('api_keys')}, listen on 127.0.0.1, or set "
            f"{variable('allow_insecure_no_auth')}=1"
        )
    return None


def forget_secrets() -> None:
    """Remove the keys' plaintext from the environment: only digests are needed from now on."""
    os.environ.pop(variable("api_keys"), None)
