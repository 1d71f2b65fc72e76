"""The layers of the package: which folder may import which.

A module belongs to the longest entry of `LAYERS` that its dotted name starts with. It may import
its own layer and the layers its entry names; a name covers its sub-folders. `docs/ARCHITECTURE.md`
draws the same picture, and `tests/test_tidy.py` holds the code to it.
"""

from __future__ import annotations

_CORE = "engine.ports engine.answers engine.filters values"
LAYERS: dict[str, frozenset[str]] = {
    layer: frozenset(allowed.split())
    for layer, allowed in {
        "values": "",
        "runtime": "",
        "client": "",
        "auth": "values",
        "http": "runtime values",
        # The engine, from the inside out. `engine.ports` declares what it needs from the disk.
        "engine.ports": "values",
        "engine.filters": "values",
        "engine.answers": "engine.filters values",
        "engine.pressure": "runtime values",
        "engine.log": f"{_CORE}",
        "engine.topic": f"engine.log {_CORE}",
        "engine.read": f"engine.topic engine.log engine.pressure runtime {_CORE}",
        "engine.commit": f"engine.read engine.topic engine.log runtime {_CORE}",
        "engine.background": f"engine.commit engine.topic engine.log runtime {_CORE}",
        "engine.subscribe": f"engine.commit engine.read engine.topic engine.log runtime {_CORE}",
        "engine": f"engine.commit engine.read engine.topic engine.log {_CORE}",
        # The disk. It handles entries and bytes, and no rules of topics.
        "wal.format": "values",
        "wal": "runtime values wal.format",
        "wal.journal": "runtime values wal wal.format",
        "wal.segments": "runtime values wal wal.format",
        "wal.snapshots": "runtime values wal wal.format",
        "wal.tools": "runtime values wal",
        # Backups: copies of what the disk holds. It handles files, and no rules of topics.
        "archive": "runtime values wal",
        # Services over the engine.
        "queue": "engine values",
        "routers": "engine values",
        "streams": "engine runtime values",
        "views": "engine runtime values",
        # HTTP over the services, and the process around all.
        "api": "auth engine http queue runtime streams values views",
        "settings": "values",
        "node": "api archive engine queue routers runtime settings streams values views wal",
        "app": "api node settings",
        "server": "app http runtime settings values",
        "cli": "client runtime values",
        "cli.backups": "archive cli cli.server client runtime values wal",
        "cli.torture": "cli cli.server client runtime settings values wal",
        "cli.server": "cli client runtime server settings values wal",
        "testing": "cli cli.server",
        "__main__": "cli server",
    }.items()
}
# Folders in which every module is pure: no I/O, clock, chance, thread or event loop. Elsewhere a
# module that says `Pure.` in its docstring is held to the same rule.
PURE_FOLDERS = ("engine.log", "engine.topic", "values", "values.texts", "wal.format")


def layer_of(name: str) -> str | None:
    """The entry of `LAYERS` that a module belongs to."""
    parts = name.split(".")
    prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in LAYERS), None)


def may_import(name: str, target: str) -> bool:
    """Tell whether module `name` may import module `target`; both relative to the package."""
    layer = layer_of(name)
    assert layer is not None, name
    allowed = LAYERS[layer] | {layer}
    if layer_of(target) == layer:
        return True
    parts = target.split(".")
    return any(".".join(parts[:n]) in allowed - {layer} for n in range(1, len(parts) + 1))
