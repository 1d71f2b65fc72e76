"""Official clients of Durable Streams on a server that is killed: exactly once, in order.

`./run test-crash tests/crash/streams/test_stream_clients.py --kills 50` is the long run.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest

from tests.contract.driver import Server
from tests.crash.streams import stream_clients
from tests.crash.streams.stream_clients import Storm
from tests.ports import lasting_port
from tests.streams import node
from tests.streams.conftest import found_node, suite_folder
from topics_server.wal.fs import OsFs
from topics_server.wal.tools.dump import verify

__all__ = ["found_node", "suite_folder"]

ENVIRONMENT = {
    "TOPICS_SEGMENT_MAX_EVENTS": "200",
    "TOPICS_SEGMENT_MAX_AGE_MS": "500",
    "TOPICS_HOT_RETAIN_SEGMENTS": "1",
    "TOPICS_CHECKPOINT_INTERVAL_MS": "300",
    "TOPICS_WAL_FSYNC_INTERVAL_MS": "50",
    "TOPICS_WAL_SHARDS": "2",
}


@pytest.mark.crash
@pytest.mark.timeout(0)
@pytest.mark.parametrize("content_type", [stream_clients.JSON, stream_clients.BYTES])
def test_messages_of_official_clients_are_read_exactly_once(
    content_type: str, kills: int, first_seed: int, found_node: node.Node, suite_folder: Path
) -> None:
    """The options are `--kills` and `--seed`; a failing run keeps its directory and names it."""
    directory = Path(tempfile.mkdtemp(prefix="topics-stream-clients-"))
    server = Server(directory / "server", ENVIRONMENT | {"TOPICS_PORT": str(lasting_port())})
    began = time.monotonic()
    url = f"{server.start().url}/v1/stream/storm/{first_seed}"
    storm = Storm(
        url, content_type, directory, found_node, suite_folder, server.crash, kills, first_seed
    )
    try:
        storm.run()
        server.stop()
        report = verify(OsFs(), str(server.data_dir))
        assert not report.problems, f"{directory}: {report.problems}"
    except BaseException as error:
        error.add_note(f"kept: {directory}")
        raise
    finally:
        storm.tear_down()
        if server.process is not None:
            server.signal(signal.SIGKILL)
    # Shown with `-s` or `-rP`: the figures of the run.
    print(
        f"\nseed {first_seed}, {server.starts - 1} kills: {storm.story()}; "
        f"{time.monotonic() - began:.1f} s"
    )
    shutil.rmtree(directory)
