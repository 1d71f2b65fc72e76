"""Archives in an object store, through obstore.

The store is `tests/cloud/buckets.py`, or a real
one that `TOPICS_TEST_S3` names, with the keys of `signing`: `./run test-s3` starts one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import httpx
import pytest

from tests.cloud.buckets import Buckets
from tests.cloud.signing import KEY, REGION, SECRET, signed
from tests.contract.conftest import own

__all__ = ["own"]


@pytest.fixture
def environment(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """The store, its region and its credentials, by the store's own variable names."""
    pytest.importorskip("obstore", reason="not installed: pip install 'topics-server[archive]'")
    endpoint = os.environ.get("TOPICS_TEST_S3", "")
    buckets = None if endpoint else Buckets(failing=10)
    if buckets is not None:
        endpoint = buckets.start()
    httpx.put(f"{endpoint}/archives", headers=signed("PUT", f"{endpoint}/archives"))
    yield {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": REGION,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
    }
    if buckets is not None:
        buckets.stop()
        assert buckets.failed > 0
