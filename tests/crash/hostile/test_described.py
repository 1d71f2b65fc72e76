"""Very many requests made up from the description: none is a 500, and the server does not grow.

`./run test-crash tests/crash/hostile/test_described.py --requests 50000`
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.contract.driver import Server
from tests.contract.fuzzing import IMPATIENT, fuzzing, settled_size

pytestmark = [pytest.mark.crash, pytest.mark.timeout(7200)]

# One round sends this many requests of each sort to each operation. Temporary memory of a round is
# freed before the measurement; caches and the allocator's free lists remain, and they are bounded.
EXAMPLES = 60
GROWTH_KIB_MAX = 48 * 1024
FILES_MORE_MAX = 16


def test_made_up_requests_neither_break_nor_grow_the_server(
    tmp_path: Path, requests: int, first_seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Server(tmp_path / "server", IMPATIENT)
    server.start()
    try:
        with fuzzing(server) as fuzz:
            examples = min(EXAMPLES, max(4, requests // 100))
            fuzz.round(first_seed, examples)
            before = settled_size(server)
            for seed in itertools.count(first_seed + 1):
                if fuzz.sent >= requests:
                    break
                fuzz.round(seed, examples)
            after = settled_size(server)
            with capsys.disabled():
                print(f"\n{fuzz.sent} requests: {before} -> {after} (KiB, files)")
                for (label, status), count in sorted(fuzz.statuses.items()):
                    print(f"  {label} {status}: {count}")
            assert after[0] <= before[0] + GROWTH_KIB_MAX
            assert after[1] <= before[1] + FILES_MORE_MAX
        assert "defect" not in server.log.read_text(errors="replace")
        server.stop()
    finally:
        if server.process is not None:
            server.process.kill()
            server.process.wait()
