"""`topics doctor`: checks settings, disk, limits, clock and proxy.

Each check prints a line `ok`, `warn` or `fail` with the action to take. Exit code 0: no `fail`. 1:
at least one. 2: a setting is not allowed. The verb writes only one file of its own in the data
directory, and removes it. With --url it also calls a running server in the way of a client.
"""

from __future__ import annotations

import http.client
import resource
import shutil
import stat
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import click
import msgspec

from topics_server.cli.connection import Failure, ServerConnection
from topics_server.cli.output import format_options, show_table, write_line
from topics_server.cli.server.flags import loaded, settings_flags
from topics_server.runtime.clock import SystemClock, monotonic_ms
from topics_server.settings import Settings, is_loopback, refusal
from topics_server.values.errors import StorageError
from topics_server.values.limits import MIB
from topics_server.wal.fs import Fs, OsFs

OK: Final = "ok"
WARN: Final = "warn"
FAIL: Final = "fail"

_PROBE: Final = "doctor.tmp"
_SYNCS: Final = 20
# A local disk takes at least tens of microseconds; a faster sync is not plausible.
_SYNC_TOO_FAST_MS: Final = 0.02
_SYNC_SLOW_MS: Final = 50.0
_OPEN_FILES_WANTED: Final = 65_536
_FREE_SHARE_WANTED: Final = 0.1
_SKEW_MAX_MS: Final = 3_000
_JUMP_MAX_MS: Final = 500
_BEFORE_THIS_WAS_WRITTEN_MS: Final = 1_700_000_000_000
_WAY_S: Final = 10.0
# File systems whose locks or syncs differ from those of a local disk (types in /proc/mounts).
_ELSEWHERE: Final = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs"})
_VOLATILE: Final = frozenset({"tmpfs", "ramfs"})


class Finding(NamedTuple):
    """The result of one check: `ok`, `warn` or `fail`, the finding, and the remedy."""

    check: str
    verdict: str
    seen: str
    advice: str = ""


@click.command("doctor")
@settings_flags
@click.option("--url", envvar="TOPICS_URL", metavar="URL", help="Also ask this server.")
@click.option("--token", envvar="TOPICS_TOKEN", metavar="KEY", help="[env: TOPICS_TOKEN]")
@format_options
@click.pass_context
def command(
    ctx: click.Context, /, url: str | None, token: str | None, as_json: bool, **flags: Any
) -> None:
    """Check this machine and these settings; each line says what to do."""
    settings = loaded(flags).settings
    findings = list(examined(settings, OsFs()))
    if url is not None:
        findings += asked(ServerConnection(url, token))
    if as_json:
        for finding in findings:
            write_line(msgspec.json.encode(finding._asdict()))
    else:
        show_table(("check", "", "seen", "what to do"), [_cells(each) for each in findings])
    ctx.exit(1 if any(each.verdict == FAIL for each in findings) else 0)


def _cells(finding: Finding) -> tuple[str, str, str, str]:
    return finding.check, finding.verdict, finding.seen, finding.advice


def examined(settings: Settings, fs: Fs) -> Iterator[Finding]:
    """Run every check of this machine."""
    yield bind_of(settings)
    yield open_files()
    folders = [("data", settings.data_dir)]
    if settings.cold_dir is not None:
        folders.append(("cold", settings.cold_dir))
    for name, folder in folders:
        there = nearest(folder)
        yield rights_of(name, folder, there, settings.data_dir_mode)
        yield disk_of(name, there)
        yield room_of(name, there, settings.min_free_bytes)
    if settings.data_dir.is_dir():
        yield syncs_of(fs, settings.data_dir)
    yield clock_of()


def bind_of(settings: Settings) -> Finding:
    """Which machines can reach the server, and whether they need a key."""
    where = f"{settings.host}:{settings.port}"
    reason = refusal(settings)
    if reason is not None:
        return Finding("bind", FAIL, where, reason)
    if settings.has_keys:
        return Finding("bind", OK, f"{where}, with keys")
    if is_loopback(settings.host):
        return Finding("bind", OK, f"{where}, this machine only, no keys")
    return Finding(
        "bind", WARN, f"{where}, no keys", "every client has all rights: set TOPICS_API_KEYS"
    )


def open_files() -> Finding:
    """Check the limit of open files: each connection takes one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= _OPEN_FILES_WANTED:
        return Finding("open files", OK, "unlimited" if hard < 0 else str(hard))
    advice = f"raise it to {_OPEN_FILES_WANTED} (ulimit -Hn, LimitNOFILE=, ulimits:)"
    return Finding("open files", WARN if hard >= 1024 else FAIL, str(hard), advice)


def nearest(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    return there


def rights_of(name: str, folder: Path, there: Path, mode: int) -> Finding:
    """Whether the server can use the directory, and which other users can read it."""
    check = f"{name} directory"
    if not there.is_dir():
        return Finding(check, FAIL, f"{there} is not a directory", "name another one")
    if there != folder.absolute():
        try:
            (there / _PROBE).mkdir()
            (there / _PROBE).rmdir()
        except OSError as error:
            seen = f"{folder} cannot be made: {there}: {error.strerror}"
            return Finding(check, FAIL, seen, "make it and give it to the server's user")
        return Finding(check, OK, f"{folder} will be made")
    probe = there / _PROBE
    try:
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        return Finding(check, FAIL, f"{there}: {error.strerror}", "give it to the server's user")
    open_to = stat.S_IMODE(there.stat().st_mode) & ~mode
    if open_to & 0o077:
        seen = f"{there} has mode {stat.S_IMODE(there.stat().st_mode):04o}"
        return Finding(check, WARN, seen, f"other users can read it: chmod {mode:04o} {there}")
    return Finding(check, OK, str(there))


def disk_of(name: str, there: Path) -> Finding:
    """The kind of file system of the directory."""
    kind = kind_of(there)
    check = f"{name} file system"
    if kind in _ELSEWHERE:
        return Finding(check, FAIL, kind, "locks and syncs depend on a network: use a local disk")
    if kind in _VOLATILE:
        return Finding(check, WARN, kind, "all data is lost when the machine goes down")
    return Finding(check, OK, kind or "not known")


def kind_of(there: Path) -> str:
    """The file system type of a folder's mount; empty if the system does not tell."""
    try:
        lines = Path("/proc/mounts").read_text().splitlines()
    except OSError:
        return ""
    found, length = "", -1
    for _, mount, kind, *_ in (line.split() for line in lines):
        at = Path(mount.replace("\\040", " "))
        if there.resolve().is_relative_to(at) and len(mount) >= length:
            found, length = kind, len(mount)
    return found


def room_of(name: str, there: Path, min_free: int | None) -> Finding:
    """Free space, compared with the limit below which appends stop."""
    usage = shutil.disk_usage(there)
    least = min(256 * MIB, usage.total // 100) if min_free is None else min_free
    seen = f"{usage.free // MIB} MiB of {usage.total // MIB} MiB free"
    check = f"{name} disk space"
    if usage.free < least:
        return Finding(
            check, FAIL, seen, f"appends are refused below {least // MIB} MiB: make room"
        )
    if usage.free < 4 * least or usage.free < usage.total * _FREE_SHARE_WANTED:
        return Finding(check, WARN, seen, f"appends stop below {least // MIB} MiB")
    return Finding(check, OK, seen)


def syncs_of(fs: Fs, folder: Path) -> Finding:
    """How long a sync takes; an implausibly fast one is a warning."""
    path = str(folder / _PROBE)
    took_ms: list[float] = []
    try:
        file = fs.open(path, create=True)
        try:
            for number in range(_SYNCS):
                file.pwrite(bytes([number]) * 4096, 4096 * number)
                began_ms = monotonic_ms()
                file.sync()
                took_ms.append(monotonic_ms() - began_ms)
        finally:
            file.close()
            fs.unlink(path)
    except StorageError as error:
        return Finding("sync", FAIL, str(error), "the disk refuses writes")
    middle = sorted(took_ms)[len(took_ms) // 2]
    seen = f"{middle:.2f} ms median, {max(took_ms):.2f} ms at worst"
    if middle < _SYNC_TOO_FAST_MS:
        advice = "too fast to be true: a cache may lose synced data in a power cut"
        return Finding("sync", WARN, seen, advice)
    if middle > _SYNC_SLOW_MS:
        return Finding("sync", WARN, seen, "appends of class fsync wait for it: use a faster disk")
    return Finding("sync", OK, seen)


def clock_of() -> Finding:
    """Whether the wall clock is plausible and runs at the rate of the monotonic clock."""
    clock = SystemClock()
    began_ms, began_wall_ms = monotonic_ms(), clock.now_ms()
    threading.Event().wait(0.05)
    drift_ms = abs((clock.now_ms() - began_wall_ms) - (monotonic_ms() - began_ms))
    shown = datetime.fromtimestamp(began_wall_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    if began_wall_ms < _BEFORE_THIS_WAS_WRITTEN_MS:
        return Finding("clock", FAIL, shown, "the clock is in the past: set it")
    if drift_ms > _JUMP_MAX_MS:
        seen = f"it jumped by {drift_ms:.0f} ms"
        return Finding(
            "clock", WARN, seen, "leases and TTLs follow the clock: slew it, do not set it"
        )
    return Finding("clock", OK, shown)


def asked(client: ServerConnection) -> Iterator[Finding]:
    """The checks of a running server's answers, requested in the way of a client."""
    try:
        health = msgspec.json.decode(client.call("GET", "/v0/health"), type=dict[str, Any])
    except Failure as error:
        yield Finding(
            "server", FAIL, error.message, "check that the server runs and that this is its address"
        )
        return
    yield Finding("server", OK, f"{client.url} answers, version {health.get('version')}")
    try:
        ready = msgspec.json.decode(client.call("GET", "/v0/ready"), type=dict[str, Any])
        is_ready = ready.get("status") == "ready"
        advice = "" if is_ready else "a shard is read-only: read the server's log, then restart it"
        yield Finding("ready", OK if is_ready else WARN, str(ready.get("status")), advice)
    except Failure as error:
        yield Finding("ready", WARN, error.message, "the server may still be replaying its journal")
    yield from way_of(client.url)


def way_of(url: str) -> Iterator[Finding]:
    """Which proxy is between a client and the server."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme != "https":
        if not is_loopback(host):
            yield Finding(
                "way", WARN, "plain HTTP", "others on the network can read keys: put TLS in front"
            )
        return
    connection = http.client.HTTPSConnection(host, parts.port, timeout=_WAY_S)
    try:
        connection.request("GET", f"{parts.path.rstrip('/')}/v0/health")
        answer = connection.getresponse()
        answer.read()
    except (OSError, http.client.HTTPException) as error:
        yield Finding("way", WARN, str(error), "the second request in a row was not answered")
        return
    finally:
        connection.close()
    yield Finding("way", OK, f"TLS, by {answer.headers.get('Server', 'an unnamed server')}")
    date = answer.headers.get("Date")
    if date is not None:
        behind_ms = SystemClock().now_ms() - parsedate_to_datetime(date).timestamp() * 1000
        if abs(behind_ms) > _SKEW_MAX_MS:
            seen = f"{abs(behind_ms) / 1000:.0f} s off this machine's clock"
            yield Finding("its clock", WARN, seen, "set one of the two clocks")
        else:
            yield Finding("its clock", OK, "same as this machine's")
