"""A few restores of an archive that a busy, killed server wrote; `live_restores` makes hundreds."""

from __future__ import annotations

import pytest

from tests.crash.archives.live_restores import main

pytestmark = [pytest.mark.crash, pytest.mark.timeout(300)]


def test_restores_to_random_moments_equal_the_logs_prefix() -> None:
    pytest.importorskip("obstore", reason="not installed: pip install 'topics-server[archive]'")
    assert main(["--restores", "3", "--kills", "1"]) == 0
