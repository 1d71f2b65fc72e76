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
    "errors": pure(),
    "model": pure("limits"),
    "rendered": pure("limits", "model", "blocks"),
    "appends": pure("limits", "model", "errors"),
    "entries": pure("limits", "model", "appends"),
    # Beyond DESIGN §5: the one form in which records rest, and what engine and wal hand over beside
    # entries. Both sides know them, and neither side may import the other.
    "blocks": pure("limits"),
    "handoff": pure("limits", "model", "blocks", "entries"),
}
# Effects at the bottom: importable by every module that is not pure.
EFFECTS = {"clock": driver(), "metrics": driver()}

# DESIGN §5 as the code has it; `docs/decisions/0002-modules.md` says what was split out and why.
ENGINE = {
    "engine.ports": pure(),
    # What the store answers, so that `api` renders values and knows no rules.
    "engine.answers": pure(),
    "engine.admission": pure(),
    "engine.blockcache": pure(),
    "engine.dedupe": pure(),
    "engine.hub": pure(),
    "engine.losses": pure(),
    "engine.priority": pure(),
    "engine.producers": pure(),
    "engine.tags": pure(),
    "engine.runs": pure("engine.ports", "engine.tags"),
    "engine.log": pure("engine.losses", "engine.ports", "engine.runs"),
    "engine.staging": pure("engine.runs"),
    "engine.deletion": pure("engine.log", "engine.runs"),
    "engine.retention": pure("engine.log", "engine.runs", "engine.staging"),
    "engine.topic": pure(
        "engine.admission",
        "engine.dedupe",
        "engine.deletion",
        "engine.log",
        "engine.ports",
        "engine.producers",
        "engine.retention",
        "engine.staging",
    ),
    "engine.reading": pure(
        "engine.answers",
        "engine.log",
        "engine.losses",
        "engine.retention",
        "engine.runs",
        "engine.topic",
    ),
    "engine.sealing": pure("engine.log", "engine.runs", "engine.topic"),
    "engine.capture": pure("engine.losses", "engine.ports", "engine.runs", "engine.topic"),
    "engine.registry": pure("engine.ports", "engine.topic"),
    "engine.epochs": pure("engine.registry"),
    "engine.subscription": pure("engine.reading", "engine.answers"),
    "engine.commits": pure("engine.hub", "engine.ports", "engine.registry", "engine.topic"),
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
        "engine.commits",
        "engine.dedupe",
        "engine.fetching",
        "engine.hub",
        "engine.ports",
        "engine.priority",
        "engine.reading",
        "engine.registry",
        "engine.topic",
    ),
    "engine.sealer": driver(
        "engine.commits", "engine.ports", "engine.registry", "engine.sealing", "engine.topic"
    ),
    "engine.checkpointer": driver(
        "engine.capture",
        "engine.commits",
        "engine.epochs",
        "engine.ports",
        "engine.registry",
        "engine.topic",
    ),
    "engine.recovery": driver("engine.capture", "engine.epochs", "engine.ports", "engine.registry"),
}

WAL = {
    "wal.layout": pure(),
    "wal.frames": pure(),
    "wal.groups": pure("wal.frames"),
    "wal.grouping": pure(),
    "wal.segment_format": pure(),
    # Blocks to segment bytes and back; not for Spark, which builds its own columns.
    "wal.segment_blocks": pure("wal.segment_format"),
    "wal.segment_index": pure("wal.segment_format"),
    "wal.snapshot_format": pure(),
    "wal.manifest_format": pure(),
    "wal.fs": driver(),
    "wal.workers": driver(),
    "wal.directory": driver("wal.layout", "wal.fs"),
    "wal.tail": driver("wal.frames", "wal.groups", "wal.grouping", "wal.layout", "wal.fs"),
    # What a shard's worker does in one go: cut, write, sync, make room.
    "wal.jobs": driver("wal.grouping", "wal.tail"),
    "wal.shard": driver("wal.frames", "wal.grouping", "wal.jobs", "wal.tail", "wal.workers"),
    # Which journal files must be there; what of them is torn; making durable what was found.
    "wal.chain": driver("wal.frames", "wal.groups", "wal.layout", "wal.fs"),
    "wal.repair": driver("wal.chain", "wal.layout", "wal.fs"),
    "wal.replay": driver(
        "wal.chain", "wal.frames", "wal.fs", "wal.groups", "wal.layout", "wal.repair"
    ),
    "wal.journal": driver(
        "wal.frames", "wal.fs", "wal.layout", "wal.replay", "wal.shard", "wal.tail", "wal.workers"
    ),
    "wal.handles": driver("wal.fs"),
    "wal.publishing": driver("wal.fs", "wal.layout"),
    # The process that packs a run into segment bytes, off the server's interpreter lock.
    "wal.packer": driver("wal.segment_blocks"),
    "wal.segment_files": driver(
        "wal.fs",
        "wal.layout",
        "wal.manifest_format",
        "wal.publishing",
        "wal.segment_blocks",
        "wal.segment_format",
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
    ),
    "wal.segments": driver(
        "wal.fs",
        "wal.handles",
        "wal.layout",
        "wal.listed",
        "wal.manifest_format",
        "wal.packer",
        "wal.publishing",
        "wal.segment_blocks",
        "wal.segment_files",
        "wal.segment_format",
        "wal.segment_index",
        "wal.segment_maps",
    ),
    "wal.snapshots": driver("wal.snapshot_format", "wal.layout", "wal.fs", "wal.publishing"),
    "wal.parts": driver("wal.*"),
    "wal.verifying": driver("wal.*"),
    "wal.dump": driver("wal.*"),
}

SERVICES = {
    "queue.leases": pure(),
    "queue.cohort": pure(),
    "queue.dead_letter": pure(),
    "queue.service": driver("queue.leases", "queue.cohort", "queue.dead_letter", "engine.store"),
    "queue.push": driver("queue.service", "engine.hub"),
    "routers.table": pure(),
    "routers.forward": pure(),
    "routers.pump": driver("routers.table", "routers.forward", "engine.store", "engine.hub"),
    "routers.service": driver("routers.table", "routers.pump", "engine.store"),
}

API = {
    "api.bodies": pure("engine.answers"),
    "api.rendering": pure("engine.reading", "engine.answers"),
    "api.problems": pure(),
    "api.coding": pure("api.problems"),
    "api.schemas": pure(),
    "api.openapi": pure("api.problems", "api.schemas"),
    "api.producer_headers": pure(),
    "api.keys": pure(),
    "api.sessions": pure(),
    "api.state": driver("engine.answers"),
    "api.guard": driver("api.keys", "api.problems", "api.state"),
    "api.transport": driver(),
    # The thin ASGI adapter in front of the data plane's plain functions.
    "api.http": driver("api.coding", "api.guard", "api.problems", "api.state"),
    "api.sse": driver("api.rendering"),
    "api.fanout": driver("api.rendering", "api.sse", "engine.subscription", "engine.hub"),
    "api.topics": driver(
        "engine.answers",
        "api.bodies",
        "api.rendering",
        "api.keys",
        "api.http",
        "engine.store",
        "queue.service",
        "routers.service",
        "api.guard",
        "api.state",
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
    ),
    "api.routers": driver("api.bodies", "api.rendering", "api.keys", "routers.service"),
    "api.queues": driver(
        "api.keys", "api.bodies", "api.rendering", "api.sse", "queue.service", "queue.push"
    ),
    "api.watch": driver(
        "api.bodies",
        "api.keys",
        "api.sessions",
        "api.sse",
        "api.fanout",
        "engine.subscription",
        "engine.store",
    ),
    "api.ws": driver(
        "api.bodies",
        "api.rendering",
        "api.keys",
        "api.fanout",
        "engine.subscription",
        "engine.store",
    ),
    "api.probes": driver(
        "engine.answers",
        "api.rendering",
        "api.sessions",
        "api.http",
        "engine.store",
        "engine.recovery",
        "queue.service",
        "routers.service",
        "api.guard",
        "api.state",
    ),
    "api.app": driver(
        "api.problems",
        "api.guard",
        "api.http",
        "api.topics",
        "api.records",
        "api.routers",
        "api.queues",
        "api.watch",
        "api.ws",
        "api.probes",
        "api.openapi",
        "api.state",
    ),
}

TOP = {
    "settings": driver(),
    # Storage and engine of one data directory, on any file system: the simulations' node too.
    "node": driver("*"),
    "server": driver("*"),
    "__main__": driver("cli", "server"),
    # One file a verb; offline verbs read files, `serve` loads the server only when it is called.
    "cli": driver("cli.*"),
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
