"""Starts our server on a data directory of its own; the cases call it through `Bench.server`.

Every setting comes from the case. `TOPICS_*` variables of the caller's environment are removed, so
that a benchmark measures the same settings everywhere.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.servers.process import ServerProcess

DEFAULT_COMMAND = (sys.executable, "-m", "topics_server", "serve")
NEVER_MS = "86400000"
# Settings under which no segment is sealed and no checkpoint begins automatically.
STILL = {
    "TOPICS_CHECKPOINT_INTERVAL_MS": NEVER_MS,
    "TOPICS_CHECKPOINT_WAL_BYTES": str(1 << 40),
    "TOPICS_SEGMENT_MAX_AGE_MS": NEVER_MS,
    "TOPICS_SEGMENT_MAX_EVENTS": "1048576",
    "TOPICS_SEGMENT_MAX_BYTES": "1073741824",
}


def start_server(
    data_dir: Path,
    settings: Mapping[str, str] | None = None,
    command: Sequence[str] = DEFAULT_COMMAND,
) -> ServerProcess:
    """Start `serve` and return at once. The caller waits for `/v0/ready`."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TOPICS_")}
    # Measure with asserts, because users run the server with asserts.
    environment.pop("PYTHONOPTIMIZE", None)
    port_file = data_dir.with_name(data_dir.name + ".port")
    environment |= {
        "TOPICS_HOST": "127.0.0.1",
        "TOPICS_PORT": "0",
        "TOPICS_PORT_FILE": str(port_file),
        "TOPICS_DATA_DIR": str(data_dir),
        "TOPICS_MAX_TOPICS": "1000000",
        **(settings or {}),
    }
    return ServerProcess(
        command, environment, port_file, data_dir.with_name(data_dir.name + ".log")
    )


def newest_snapshot_ns(data_dir: Path) -> int:
    """The time at which the newest snapshot of a data directory was published; 0 without a
    snapshot.
    """
    times = [path.stat().st_mtime_ns for path in data_dir.glob("snapshots/*")]
    return max(times, default=0)
