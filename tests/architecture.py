"""The architecture as data, and what one source file says about itself.

`MODULES` is DESIGN §5's table: which modules exist, which are pure, and what each may import of
ours. `tests/test_tidy.py` compares it with the code. A row may stand here before its module exists;
a module may not exist without its row.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "topics_server"
SOURCE = ROOT / "src" / PACKAGE


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A line of the table; names are relative to the package, a `*` at the end means any rest."""

    pure: bool
    imports: frozenset[str]

    def allows(self, name: str) -> bool:
        """Tell whether a module of this row may import the module `name` of ours."""
        return any(
            name.startswith(allowed[:-1]) if allowed.endswith("*") else name == allowed
            for allowed in self.imports
        )


def pure(*imports: str) -> Row:
    """A module without I/O, clock and event loop."""
    return Row(True, frozenset(imports))


def driver(*imports: str) -> Row:
    """A module that may touch files, the clock or the event loop."""
    return Row(False, frozenset(imports))


# Values and rules at the bottom: importable by every other module, rows need not list them.
LEAVES = {
    "limits": pure(),
    # Durations and sizes as people write them: options of the command line and settings.
    "amounts": pure(),
    "errors": pure("limits"),
    "model": pure("limits"),
    "query_string": pure("errors"),
    "rendered": pure("limits", "model", "blocks", "grammars"),
    # The shape of JSON, measured without decoding it.
    "json_shape": pure("limits"),
    "appends": pure("blocks", "json_shape", "limits", "model", "errors"),
    "entries": pure("limits", "model", "appends"),
    # What a router's copies are: live, in replay and in an offline dump.
    "copies": pure("appends", "blocks", "entries", "errors", "grammars"),
    # Bodies that are no append body: a stream's requests, and copies of what they brought.
    "grammars": pure("appends", "blocks", "errors", "json_shape", "limits"),
    # Beyond DESIGN §5: the one form in which records rest, and what engine and wal hand over beside
    # entries. Both sides know them, and neither side may import the other.
    "blocks": pure("limits"),
    "handoff": pure("limits", "model", "blocks", "entries"),
    # What files must be like at start, and what follows: judged by recovery and by `topics verify`.
    "inventory": pure("handoff"),
}
# Effects at the bottom: importable by every module that is not pure.
EFFECTS = {"clock": driver(), "metrics": driver(), "heap": driver()}

# DESIGN §5 as the code has it; `docs/decisions/0002-modules.md` says what was split out and why.
ENGINE = {
    "engine.ports": pure(),
    # What the store answers, so that `api` renders values and knows no rules.
    "engine.answers": pure(),
    "engine.admission": pure(),
    "engine.blockcache": pure(),
    # Where a reader is: shared by the stream that moves it and the session that keeps it.
    "engine.cursors": pure(),
    "engine.dedupe": pure(),
    "engine.hub": pure(),
    "engine.losses": pure(),
    "engine.priority": pure(),
    # The elastic throttle: who waits for a turn under pressure, and who measures it.
    "engine.fair_share": pure(),
    "engine.prefix_counts": pure(),
    "engine.parking": pure("engine.fair_share"),
    "engine.throttle": driver("engine.parking"),
    # Large appends, which the helper process decodes.
    "engine.large_appends": driver("engine.admission", "append_decoder"),
    "engine.producers": pure(),
    "engine.tags": pure(),
    "engine.runs": pure("engine.ports", "engine.tags"),
    "engine.sealed_files": pure("engine.applied"),
    "engine.log": pure("engine.losses", "engine.ports", "engine.runs"),
    "engine.staging": pure("engine.runs"),
    "engine.deletion": pure("engine.log", "engine.runs"),
    "engine.retention": pure("engine.log", "engine.runs", "engine.staging"),
    "engine.applied": pure(),
    "engine.stream_state": pure(),
    "engine.topic": pure(
        "engine.admission",
        "engine.applied",
        "engine.dedupe",
        "engine.deletion",
        "engine.log",
        "engine.ports",
        "engine.producers",
        "engine.retention",
        "engine.sealed_files",
        "engine.staging",
        "engine.stream_state",
    ),
    "engine.reading": pure(
        "engine.answers",
        "engine.log",
        "engine.losses",
        "engine.retention",
        "engine.runs",
        "engine.topic",
    ),
    # Exact seqs, where a page goes on from a cursor: what is handed out and deleted one by one.
    "engine.picking": pure(
        "engine.answers",
        "engine.deletion",
        "engine.log",
        "engine.reading",
        "engine.runs",
        "engine.topic",
    ),
    "engine.sealing": pure("engine.log", "engine.runs", "engine.topic"),
    "engine.capture": pure(
        "engine.log",
        "engine.losses",
        "engine.ports",
        "engine.producers",
        "engine.runs",
        "engine.stream_state",
        "engine.topic",
    ),
    "engine.registry": pure("engine.ports", "engine.prefix_counts", "engine.topic"),
    "engine.epochs": pure("engine.registry"),
    # What the journal carries beside topics: sessions now; leases and the router table later.
    "engine.projections": pure("engine.topic"),
    "engine.sessions": pure("engine.cursors", "engine.topic"),
    "engine.subscription": pure(
        "engine.answers", "engine.cursors", "engine.reading", "engine.topic"
    ),
    "engine.synced": pure("engine.runs", "engine.topic"),
    "engine.commits": pure(
        "engine.hub", "engine.ports", "engine.projections", "engine.registry", "engine.topic"
    ),
    "engine.waiting": driver("engine.commits", "engine.hub", "engine.moves"),
    # What an append is answered that was there before.
    "engine.repeats": driver(
        "engine.answers",
        "engine.commits",
        "engine.dedupe",
        "engine.moves",
        "engine.producers",
        "engine.topic",
    ),
    "engine.quotas": pure("engine.registry"),
    "engine.topic_states": pure("engine.answers", "engine.priority", "engine.topic"),
    # Routers' pages on their way, and what a capture waits for.
    "engine.pages": driver("engine.commits", "engine.registry", "engine.topic"),
    # An append on its way: the same outcome for a task that waits and for a callback.
    "engine.appending": pure("engine.answers", "engine.commits", "engine.topic"),
    "engine.watching": driver(
        "engine.commits", "engine.cursors", "engine.ports", "engine.sessions"
    ),
    # The second half of a move between topics, live and after a crash (DESIGN §3, Two topics).
    "engine.moves": driver(
        "engine.commits", "engine.picking", "engine.ports", "engine.registry", "engine.topic"
    ),
    "engine.fetching": driver(
        "engine.answers",
        "engine.blockcache",
        "engine.ports",
        "engine.reading",
        "engine.registry",
        "engine.topic",
    ),
    "engine.store": driver(
        "engine.admission",
        "engine.answers",
        "engine.appending",
        "engine.commits",
        "engine.dedupe",
        "engine.fetching",
        "engine.hub",
        "engine.moves",
        "engine.picking",
        "engine.ports",
        "engine.producers",
        "engine.quotas",
        "engine.reading",
        "engine.registry",
        "engine.repeats",
        "engine.topic",
        "engine.topic_states",
        "engine.waiting",
    ),
    # Readers with bells: one bell a topic, one batch for all who stand at the same place.
    "engine.feeds": driver(
        "engine.commits",
        "engine.cursors",
        "engine.fetching",
        "engine.hub",
        "engine.ports",
        "engine.reading",
        "engine.registry",
        "engine.subscription",
        "engine.synced",
        "engine.topic",
    ),
    "engine.sealer": driver(
        "engine.commits", "engine.ports", "engine.registry", "engine.sealing", "engine.topic"
    ),
    "engine.checkpointer": driver(
        "engine.capture",
        "engine.commits",
        "engine.epochs",
        "engine.pages",
        "engine.ports",
        "engine.projections",
        "engine.registry",
        "engine.topic",
    ),
    "engine.recovery": driver(
        "engine.capture",
        "engine.dedupe",
        "engine.epochs",
        "engine.ports",
        "engine.producers",
        "engine.projections",
        "engine.registry",
        "engine.topic",
    ),
    # What streams write beside appends.
    "engine.streaming": driver(
        "engine.commits",
        "engine.ports",
        "engine.producers",
        "engine.quotas",
        "engine.registry",
        "engine.store",
        "engine.stream_state",
        "engine.topic",
    ),
}

WAL = {
    "wal.layout": pure(),
    "wal.frames": pure(),
    "wal.groups": pure("wal.frames"),
    "wal.grouping": pure(),
    "wal.segment_format": pure(),
    # Blocks to segment bytes and back; not for Spark, which builds its own columns.
    "wal.segment_blocks": pure("wal.segment_format"),
    "wal.segment_index": pure("wal.manifest_format", "wal.segment_format"),
    "wal.segment_flags": pure("wal.segment_format"),
    # A damaged index, made again row by row.
    "wal.segment_salvage": pure("wal.manifest_format", "wal.segment_blocks", "wal.segment_format"),
    "wal.snapshot_format": pure(),
    "wal.manifest_format": pure(),
    "wal.fs": driver(),
    "wal.workers": driver(),
    "wal.folders": driver("wal.layout", "wal.fs"),
    "wal.checked_json": pure(),
    "wal.directory": driver("wal.checked_json", "wal.folders", "wal.layout", "wal.fs"),
    # Whose the cold folder is.
    "wal.cold_folder": driver(
        "wal.checked_json", "wal.directory", "wal.folders", "wal.fs", "wal.layout", "wal.publishing"
    ),
    # How far a shard's journal reaches, told beside it.
    "wal.end_marks": pure(),
    "wal.end_mark_file": driver("wal.end_marks", "wal.fs", "wal.layout"),
    "wal.anchors": driver(
        "wal.chain",
        "wal.directory",
        "wal.end_mark_file",
        "wal.end_marks",
        "wal.fs",
        "wal.layout",
    ),
    "wal.tail": driver(
        "wal.end_mark_file",
        "wal.end_marks",
        "wal.frames",
        "wal.fs",
        "wal.grouping",
        "wal.groups",
        "wal.layout",
    ),
    # What a shard's worker does in one go: cut, write, sync, make room.
    "wal.jobs": driver("wal.grouping", "wal.tail"),
    "wal.shard": driver("wal.frames", "wal.grouping", "wal.jobs", "wal.tail", "wal.workers"),
    # Which journal files must be there; what of them is torn; making durable what was found.
    "wal.chain": driver("wal.end_marks", "wal.frames", "wal.groups", "wal.layout", "wal.fs"),
    "wal.repair": driver(
        "wal.chain", "wal.end_mark_file", "wal.end_marks", "wal.folders", "wal.layout", "wal.fs"
    ),
    "wal.replay": driver(
        "wal.anchors",
        "wal.chain",
        "wal.end_marks",
        "wal.frames",
        "wal.fs",
        "wal.groups",
        "wal.layout",
        "wal.repair",
    ),
    "wal.journal": driver(
        "wal.folders",
        "wal.frames",
        "wal.fs",
        "wal.layout",
        "wal.replay",
        "wal.shard",
        "wal.tail",
        "wal.workers",
    ),
    "wal.handles": driver("wal.fs"),
    "wal.publishing": driver("wal.fs", "wal.layout"),
    "wal.ballast": driver("wal.fs", "wal.layout", "wal.publishing"),
    # The process that packs a run into segment bytes, off the server's interpreter lock.
    "wal.packer": driver("helper_process", "wal.segment_blocks"),
    "wal.segment_files": driver(
        "wal.fs",
        "wal.layout",
        "wal.manifest_format",
        "wal.publishing",
        "wal.segment_format",
    ),
    # What lies in a topic's folders at start, and making it what the manifest says.
    "wal.topic_scan": driver(
        "wal.fs",
        "wal.layout",
        "wal.listed",
        "wal.manifest_format",
        "wal.segment_files",
        "wal.segment_flags",
        "wal.segment_format",
    ),
    # The same judgement of files as recovery's, offline.
    "wal.anchored": driver("wal.*"),
    "wal.quarantine": driver(
        "wal.folders", "wal.fs", "wal.layout", "wal.publishing", "wal.segment_files"
    ),
    "wal.listed": driver(
        "wal.fs", "wal.layout", "wal.manifest_format", "wal.publishing", "wal.segment_index"
    ),
    "wal.segment_maps": driver(
        "wal.fs",
        "wal.handles",
        "wal.listed",
        "wal.manifest_format",
        "wal.segment_files",
        "wal.segment_format",
        "wal.segment_index",
        "wal.segment_salvage",
        "wal.topic_scan",
    ),
    "wal.segments": driver(
        "wal.folders",
        "wal.fs",
        "wal.handles",
        "wal.layout",
        "wal.listed",
        "wal.manifest_format",
        "wal.packer",
        "wal.publishing",
        "wal.quarantine",
        "wal.segment_blocks",
        "wal.segment_files",
        "wal.segment_flags",
        "wal.segment_format",
        "wal.segment_index",
        "wal.segment_maps",
        "wal.topic_scan",
    ),
    "wal.snapshots": driver(
        "wal.snapshot_format", "wal.folders", "wal.layout", "wal.fs", "wal.publishing"
    ),
    "wal.parts": driver("wal.*"),
    "wal.verifying": driver("wal.*"),
    "wal.dump": driver("wal.*"),
    # Offline: a store whose halves do not fit.
    "wal.begin_anew": driver("wal.*"),
    # Offline: what a damaged journal cost, and what takes the damaged bytes' place.
    "wal.mending": driver("wal.*"),
    "wal.end_mark_repair": driver("wal.*"),
    "wal.set_aside": driver("wal.folders", "wal.fs", "wal.layout"),
}

SERVICES = {
    # Durable Streams: topics through their second door.
    "streams.values": pure(),
    "streams.paths": pure(),
    "streams.offsets": pure("streams.values"),
    "streams.refusals": pure("engine.answers"),
    "streams.places": pure("engine.topic", "streams.values"),
    "streams.lifetimes": driver("engine.ports", "engine.registry", "engine.store", "engine.topic"),
    "streams.content": driver("engine.admission", "engine.large_appends", "streams.places"),
    "streams.forks": driver(
        "engine.admission",
        "engine.answers",
        "engine.repeats",
        "engine.store",
        "engine.streaming",
        "engine.topic",
        "streams.places",
        "streams.refusals",
        "streams.values",
    ),
    "streams.service": driver(
        "engine.answers",
        "engine.appending",
        "engine.commits",
        "engine.hub",
        "engine.large_appends",
        "engine.ports",
        "engine.producers",
        "engine.registry",
        "engine.repeats",
        "engine.store",
        "engine.streaming",
        "engine.topic",
        "engine.waiting",
        "streams.content",
        "streams.forks",
        "streams.lifetimes",
        "streams.offsets",
        "streams.paths",
        "streams.places",
        "streams.refusals",
        "streams.values",
    ),
    # One queue's book; jobs by time and jobs never handed out are nouns of their own.
    "queue.jobs": pure(),
    "queue.waiting": pure(),
    "queue.fresh": pure("queue.waiting"),
    "queue.leases": pure("queue.cohort", "queue.fresh", "queue.jobs", "queue.waiting"),
    "queue.lease_parts": pure("queue.jobs", "queue.leases"),
    # All queues' books as one projection.
    "queue.books": pure("engine.answers", "engine.topic", "queue.lease_parts", "queue.leases"),
    "queue.cohort": pure(),
    "queue.dead_letter": pure(),
    "queue.answers": pure("engine.answers", "queue.jobs"),
    # Who waits for jobs of one queue; all queues' lines and the passes in which they are served.
    "queue.line": driver(
        "engine.commits", "engine.ports", "engine.topic", "queue.alarm", "queue.jobs"
    ),
    "queue.alarm": driver("engine.ports"),
    "queue.step_clock": driver("engine.ports"),
    "queue.lines": driver(
        "engine.hub",
        "engine.ports",
        "engine.store",
        "engine.topic",
        "queue.books",
        "queue.jobs",
        "queue.leases",
        "queue.leasing",
        "queue.line",
        "queue.moving",
    ),
    # What a decided change of leases goes through: journal or not, lease log, who waits.
    "queue.leasing": driver(
        "engine.commits",
        "engine.ports",
        "engine.topic",
        "queue.books",
        "queue.jobs",
        "queue.lease_log",
        "queue.leases",
        "queue.line",
    ),
    "queue.lease_log": driver("engine.answers", "queue.jobs"),
    "queue.moving": driver(
        "engine.answers",
        "engine.moves",
        "engine.picking",
        "engine.ports",
        "engine.store",
        "engine.topic",
        "queue.answers",
        "queue.books",
        "queue.dead_letter",
        "queue.jobs",
        "queue.lease_log",
        "queue.leases",
    ),
    "queue.service": driver(
        "engine.answers",
        "engine.appending",
        "engine.commits",
        "engine.hub",
        "engine.moves",
        "engine.ports",
        "engine.store",
        "engine.topic",
        "queue.alarm",
        "queue.answers",
        "queue.books",
        "queue.jobs",
        "queue.lease_log",
        "queue.leases",
        "queue.leasing",
        "queue.line",
        "queue.lines",
        "queue.moving",
        "queue.step_clock",
    ),
    "queue.push": driver(
        "engine.topic", "queue.alarm", "queue.answers", "queue.line", "queue.service"
    ),
    "routers.answers": pure(),
    "routers.table": pure("engine.registry", "engine.topic"),
    "routers.forward": pure("engine.answers"),
    # Which copies a destination holds already.
    "routers.evidence": driver(
        "engine.answers", "engine.ports", "engine.reading", "engine.store", "engine.topic"
    ),
    # What each router at work waits for.
    "routers.routes": driver("engine.commits", "routers.table"),
    "routers.pump": driver(
        "engine.answers",
        "engine.commits",
        "engine.hub",
        "engine.pages",
        "engine.ports",
        "engine.reading",
        "engine.store",
        "engine.topic",
        "routers.evidence",
        "routers.forward",
        "routers.routes",
        "routers.table",
    ),
    "routers.service": driver(
        "engine.commits",
        "engine.moves",
        "engine.ports",
        "engine.store",
        "engine.topic",
        "routers.answers",
        "routers.pump",
        "routers.table",
    ),
}

API = {
    "api.bodies": pure("api.lists", "engine.answers"),
    # Lists and names in bodies, bounded before they are built.
    "api.lists": pure(),
    "api.rendering": pure("engine.reading", "engine.answers", "routers.answers"),
    # What a merge patch of a configuration means; members of a body that mean nothing.
    "api.config_bodies": pure("api.bodies", "api.lists", "api.rendering"),
    "api.problems": pure(),
    "api.coding": pure("api.problems"),
    "api.cors": pure("api.problems"),
    # Which web pages may have a browser call.
    "api.origin": pure("api.bodies"),
    "api.cursor_ids": pure("engine.cursors"),
    "api.watch_bodies": pure("api.bodies", "api.cursor_ids", "api.lists"),
    "api.schemas": pure("api.queue_bodies", "api.watch_bodies", "queue.jobs"),
    # What the reference page has filled in.
    "api.examples": pure(),
    "api.operations": pure("api.examples", "api.problems", "api.schemas"),
    "api.openapi": pure("api.operations", "api.schemas", "api.stream_operations"),
    "api.stream_operations": pure("api.examples", "api.operations", "api.schemas"),
    "api.producer_headers": pure("engine.answers"),
    "api.keys": pure(),
    # Who calls, and whether they may: 401 and 403.
    "api.access": pure("api.bodies", "api.keys", "api.tickets"),
    "api.tickets": pure("api.keys"),
    # What a key with prefixes gets to see.
    "api.visible": pure("api.access", "api.keys", "engine.answers"),
    "api.sessions": pure(),
    # What a request's path names.
    "api.names": pure(),
    "api.state": driver(
        "api.hosts",
        "api.fanout",
        "api.inbox",
        "api.keys",
        "api.tickets",
        "api.patience",
        "engine.admission",
        "api.upload_budget",
        "api.upload_turns",
        "engine.answers",
        "engine.large_appends",
        "engine.throttle",
        "engine.watching",
        "queue.service",
        "routers.answers",
        "streams.service",
    ),
    "api.guard": driver("api.keys", "api.problems", "api.state"),
    "api.transport": driver(),
    # Whole requests of the data plane, from the parser's callback to the answer.
    "api.direct": driver(
        "api.coding",
        "api.http",
        "api.keys",
        "api.receiving",
        "api.request_ids",
        "api.response",
        "api.strict",
        "api.transport",
        "api.upload_http",
    ),
    # What a head may be, how long clients are waited for, and the connection that holds them to it.
    "api.heads": pure(),
    "api.inbox": driver(),
    # Bodies being received: what they may hold together, and in which order they are read.
    "api.upload_budget": pure(),
    "api.upload_turns": driver(),
    "api.patience": driver("api.heads"),
    "api.strict": driver(
        "api.heads",
        "api.http",
        "api.inbox",
        "api.patience",
        "api.problems",
        "api.request_ids",
        "api.response",
        "api.transport",
    ),
    "api.upload_http": driver(
        "api.http",
        "api.inbox",
        "api.keys",
        "api.strict",
        "api.upload_budget",
        "api.upload_turns",
    ),
    "api.connections": driver(
        "api.access",
        "api.coding",
        "api.direct",
        "api.http",
        "api.inbox",
        "api.problems",
        "api.request_ids",
        "api.state",
        "api.upload_budget",
        "api.upload_turns",
        "api.ws_frames",
    ),
    # The thin ASGI adapter in front of the data plane's plain functions.
    "api.http": driver(
        "api.request_ids",
        "api.response",
        "api.access",
        "api.coding",
        "api.cors",
        "api.guard",
        "api.inflight",
        "api.keys",
        "api.names",
        "api.observing",
        "api.origin",
        "api.problems",
        "api.receiving",
        "api.sockets",
        "api.state",
    ),
    "api.inflight": driver("api.keys"),
    # Reading the body of a request, with its limit.
    "api.receiving": driver("api.coding", "api.guard", "api.problems"),
    "api.waiting": driver("api.access", "api.http", "api.receiving"),
    "api.readiness": driver("api.http", "api.receiving", "api.state"),
    "api.request_ids": driver(),
    # An answer of known length, by whichever way its request went.
    "api.response": driver("api.coding", "api.problems", "api.request_ids"),
    # Which `Host` a request may name.
    "api.hosts": pure(),
    "api.sse": pure("engine.subscription"),
    # What uvicorn's protocols know of a connection and ASGI does not tell.
    "api.sockets": driver(),
    # The frames of one connection on their way out; parks what a full socket does not take.
    "api.outbox": driver("api.sockets", "engine.subscription"),
    "api.fanout": driver("api.outbox", "engine.cursors", "engine.feeds", "engine.subscription"),
    "api.topics": driver(
        "engine.answers",
        "api.bodies",
        "api.config_bodies",
        "api.rendering",
        "api.http",
        "engine.store",
        "queue.service",
        "routers.service",
        "api.guard",
        "api.state",
        "api.visible",
    ),
    "api.records": driver(
        "engine.answers",
        "api.bodies",
        "api.rendering",
        "api.producer_headers",
        "api.http",
        "engine.store",
        "api.guard",
        "api.state",
        "api.visible",
        "api.waiting",
    ),
    # The door to streams: what is asked, how pages and events look, one reader, the calls.
    "api.stream_headers": pure(
        "api.bodies", "api.names", "api.producer_headers", "streams.offsets", "streams.values"
    ),
    "api.stream_pages": pure(
        "api.problems", "api.stream_headers", "streams.offsets", "streams.values"
    ),
    "api.stream_frames": pure(
        "api.problems", "api.stream_pages", "streams.offsets", "streams.values"
    ),
    "api.stream_sse": driver(
        "api.http",
        "api.keys",
        "api.sockets",
        "api.sse",
        "api.state",
        "api.stream_frames",
        "api.stream_pages",
        "streams.service",
        "streams.values",
    ),
    "api.stream_whole": driver("api.http", "api.sockets", "api.stream_sse", "streams.values"),
    "api.streams": driver(
        "api.access",
        "api.guard",
        "api.http",
        "api.keys",
        "api.names",
        "api.problems",
        "api.producer_headers",
        "api.response",
        "api.state",
        "api.stream_frames",
        "api.stream_headers",
        "api.stream_pages",
        "api.stream_sse",
        "api.stream_whole",
        "streams.paths",
        "streams.service",
        "streams.values",
        "api.waiting",
    ),
    "api.router_bodies": pure("api.bodies", "api.lists", "routers.answers"),
    "api.routers": driver(
        "api.access",
        "api.bodies",
        "api.config_bodies",
        "api.guard",
        "api.http",
        "api.rendering",
        "api.router_bodies",
        "api.state",
        "api.visible",
        "routers.answers",
        "routers.service",
    ),
    "api.queue_bodies": pure("api.bodies", "api.lists", "queue.jobs"),
    "api.queue_frames": pure("api.rendering", "api.sse", "queue.answers", "queue.jobs"),
    "api.queues": driver(
        "api.access",
        "api.bodies",
        "api.fanout",
        "api.guard",
        "api.http",
        "api.keys",
        "api.outbox",
        "api.problems",
        "api.queue_bodies",
        "api.queue_frames",
        "api.readiness",
        "api.sse",
        "api.state",
        "api.waiting",
        "engine.topic",
        "queue.answers",
        "queue.push",
        "queue.service",
    ),
    "api.watch": driver(
        "api.access",
        "api.bodies",
        "api.config_bodies",
        "api.cursor_ids",
        "api.fanout",
        "api.guard",
        "api.http",
        "api.keys",
        "api.outbox",
        "api.readiness",
        "api.rendering",
        "api.sse",
        "api.state",
        "api.tickets",
        "api.watch_bodies",
        "engine.cursors",
        "engine.feeds",
        "engine.sessions",
        "engine.subscription",
        "engine.watching",
    ),
    "api.ws_commands": pure(
        "api.bodies",
        "api.lists",
        "api.problems",
        "api.producer_headers",
        "api.watch_bodies",
        "engine.subscription",
    ),
    "api.ws_frames": pure("api.problems", "engine.answers", "engine.subscription"),
    "api.ws": driver(
        "api.request_ids",
        "api.access",
        "api.fanout",
        "api.guard",
        "api.http",
        "api.keys",
        "api.origin",
        "api.outbox",
        "api.problems",
        "api.state",
        "api.visible",
        "api.ws_commands",
        "api.ws_frames",
        "engine.answers",
        "engine.cursors",
        "engine.subscription",
    ),
    # What every answer is counted and told to; a line in each of the two ways of a request.
    "api.observing": driver(),
    "api.figures": driver(
        "api.fanout",
        "api.keys",
        "api.state",
        "api.visible",
        "engine.answers",
        "engine.throttle",
    ),
    "api.probes": driver(
        "api.figures",
        "api.guard",
        "api.http",
        "api.rendering",
        "api.state",
        "exposition",
    ),
    "api.admin": driver(
        "api.access",
        "api.bodies",
        "api.guard",
        "api.http",
        "api.lists",
        "api.rendering",
        "api.state",
    ),
    # The page that shows the description, from an installed package's files.
    "api.reference": driver("api.examples", "api.http", "api.state"),
    "api.front_page": driver("api.http", "api.state"),
    "api.app": driver(
        "api.problems",
        "api.admin",
        "api.front_page",
        "api.guard",
        "api.http",
        "api.keys",
        "api.topics",
        "api.records",
        "api.routers",
        "api.queues",
        "api.streams",
        "api.watch",
        "api.ws",
        "api.probes",
        "api.openapi",
        "api.reference",
        "api.state",
    ),
}

TOP = {
    "settings": driver("api.hosts", "api.keys", "key_file"),
    # The keys as configured: the environment's and the file's.
    "key_file": driver("api.keys"),
    # Lines on standard error, and the thread that writes them.
    "logs": driver(),
    # Prints the figures that `metrics` names.
    "exposition": driver(),
    # Threads for blocking calls.
    "offload": driver(),
    "helper_process": driver(),
    # How much of the machine the store takes.
    "sizing": driver("wal.tail"),
    # Free space: when appends are refused, and what a full disk gives back.
    "space": driver("engine.ports", "wal.ballast", "wal.fs"),
    # Storage and engine of one data directory, on any file system: the simulations' node too.
    "append_decoder": driver("engine.admission", "helper_process"),
    # Every limit of a request: what docs/LIMITS.md shows.
    "limit_table": driver("settings"),
    "node": driver("*"),
    "server": driver("*"),
    "__main__": driver("cli", "server"),
    # Programs that use queues; it may leave this repository with its folder.
    "client": driver("client.*"),
    "client.*": driver("client.*"),
    "cli.stream": driver("cli", "cli.*", "client", "client.*"),
    "cli.work": driver("cli", "cli.*", "client", "client.*"),
    # One file a verb; offline verbs read files, `serve` loads the server only when it is called.
    "cli": driver("cli.*"),
    "cli.client": driver("client.*"),
    "cli.stream_calls": driver("cli", "cli.*", "client.*"),
    # The key that a health check shows.
    "cli.health": driver("cli", "cli.*", "key_file", "settings"),
    "cli.*": driver("cli", "cli.*", "settings", "wal.*", "server"),
}

MODULES: dict[str, Row] = {**LEAVES, **EFFECTS, **ENGINE, **WAL, **SERVICES, **API, **TOP}


def row_of(name: str) -> Row | None:
    """The row a module falls under: its own, else that of its folder (`cli.*`)."""
    return MODULES.get(name) or MODULES.get(f"{name.rpartition('.')[0]}.*")


Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclasses.dataclass(frozen=True)
class Import:
    """One imported name: the absolute module, the member if `from` was used, and the line."""

    module: str
    member: str
    line: int

    @property
    def top(self) -> str:
        """The distribution's or library module's first name."""
        return self.module.partition(".")[0]


class Module:
    """One parsed source file; `name` is relative to the package, '' for the package itself."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = path.read_text("utf-8")
        self.tree = ast.parse(self.text, filename=str(path))
        self.is_package = path.name == "__init__.py"
        parts = path.relative_to(SOURCE).with_suffix("").parts
        self.name = ".".join(parts[:-1] if self.is_package else parts)

    @property
    def where(self) -> str:
        """The path a reader of a message can open."""
        return str(self.path.relative_to(ROOT))

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the file, functions' bodies included."""
        return list(ast.walk(self.tree))

    @cached_property
    def imports(self) -> list[Import]:
        """Every import of the file: lazy ones and those for types only count as well."""
        found: list[Import] = []
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found.extend(Import(alias.name, "", node.lineno) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                base = node.module or ""
                found.extend(Import(base, alias.name, node.lineno) for alias in node.names)
        return found

    def own_imports(self, known: set[str]) -> Iterator[tuple[str, int]]:
        """Yield (module of ours, line); `from package import module` means the module."""
        for item in self.imports:
            if item.top == PACKAGE:
                base = item.module.removeprefix(PACKAGE).removeprefix(".")
                member = f"{base}.{item.member}".removeprefix(".")
                yield (member if member in known else base), item.line

    @cached_property
    def functions(self) -> list[Function]:
        """Every function and method, nested ones included."""
        return [node for node in self.nodes if isinstance(node, Function)]


def load_modules() -> dict[str, Module]:
    """Parse the package; packages' `__init__` files are among the values."""
    return {module.name: module for module in map(Module, sorted(SOURCE.rglob("*.py")))}
