"""The same archive in a bucket, read by ranges through obstore; a tenth of the requests fail."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from spark_jobs.reader.listing import Lister, list_segments
from spark_jobs.reader.places.files import BucketObject
from spark_jobs.reader.places.opening import KnownPlace
from spark_jobs.reader.places.segment import SegmentGone
from spark_jobs.reader.report import ReadReport
from spark_jobs.reader.segments import read_segments
from spark_jobs.session import NO_JAVA, find_java
from tests.cloud.buckets import Buckets
from tests.contract.driver import ROOT
from tests.spark.archives.conftest import TICKS, ArchivedMoment
from tests.spark.conftest import HAS_SPARK, INSTALL
from tests.spark.logs import digests
from tests.spark.reading.test_reader import AS_IS, query, rows_of
from tests.spark.reading.test_seeds import by_topic
from topics_server.archive.continuous.places.ranges import BucketRanges
from topics_server.values.errors import Corrupt, NotThere, StorageError
from topics_server.wal import layout

# Making the archive, or starting Spark, takes long on a busy machine.
pytestmark = pytest.mark.timeout(600)

KEYS: Final = ("a-secret-of-the-store", "an-access-key")
SCRIPT: Final = """
import json, os, sys
from spark_jobs.session import spark_session
url, columns = sys.argv[1:]
spark = spark_session("cluster", master="local-cluster[2,1,512]", config={
    "spark.driver.memory": "512m", "spark.executor.memory": "512m",
    "spark.executor.extraJavaOptions": os.environ["SPARK_SUBMIT_OPTS"]})
frame = spark.read.format("topics").option("minPartitions", "4").schema(columns).load(url)
rows = [row.asDict() for row in frame.collect()]
parts = spark.sparkContext.parallelize(range(8), 8).mapPartitions(lambda _: [os.getppid()])
print("FOUND " + json.dumps({"rows": rows, "workers": len(set(parts.collect()))}))
spark.stop()
"""


@pytest.fixture
def bucket(
    second: ArchivedMoment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Buckets, str]]:
    """A store with the archive below a prefix of this test's own, and its URL."""
    pytest.importorskip("obstore", reason="not installed: pip install 'topics-server[archive]'")
    store = Buckets(failing=10)
    prefix = f"archives/{tmp_path.name}"
    for path in second.folder.rglob("*"):
        if path.is_file():
            store.objects[f"{prefix}/{path.relative_to(second.folder)}"] = path.read_bytes()
    for name, value in {
        "AWS_ENDPOINT_URL": store.start(),
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": KEYS[1],
        "AWS_SECRET_ACCESS_KEY": KEYS[0],
    }.items():
        monkeypatch.setenv(name, value)
    yield store, f"s3://{prefix}"
    store.stop()


def test_rows_are_those_of_the_folder(bucket: tuple[Buckets, str], second: ArchivedMoment) -> None:
    _, url = bucket
    asked, report = query(), ReadReport()
    listing = list_segments(url, asked)
    # The ranges are those that a task gets.
    listing.topics = pickle.loads(pickle.dumps(listing.topics))
    found = by_topic(rows_of(listing, asked, report))
    for name, rows in second.rows.items():
        assert digests(found.get(name, [])) == digests(rows), name
    assert all(name.startswith(f"{url}/segments/") for name in report.names)
    few = query(topics="orders", tags="late", fromSeq="20", toSeq="21")
    rows = rows_of(list_segments(url, few), few)
    assert [row["seq"] for row in rows] == [20, 21]


def test_a_listing_needs_nothing_of_the_segments(bucket: tuple[Buckets, str]) -> None:
    store, url = bucket
    gone = {name for name in store.objects if "/segments/" in name}
    with store.lock:
        for name in gone:
            del store.objects[name]
    segments = list_segments(url, query()).segments
    assert {
        path.removeprefix("s3://")
        for segment in segments
        for suffix in (layout.DATA_SUFFIX, layout.IDX_SUFFIX)
        for path in segment.paths(suffix)
    } <= gone


def test_what_a_plan_and_a_read_ask_of_the_store(bucket: tuple[Buckets, str]) -> None:
    """Requests cost money: manifests are read once a base, and small objects by one request."""
    store, url = bucket
    store.failing = 0
    known, asked = KnownPlace(), query(topics="orders")

    def requests() -> Counter[str]:
        """The number of requests for each kind of object since the last call."""
        prefix = url.removeprefix("s3://archives/")
        kinds = Counter(
            each.partition(prefix)[2].split("/")[1] if prefix in each else each
            for each in store.asked
        )
        store.asked.clear()
        return kinds

    store.asked.clear()
    segments = Lister(url, asked, known=known).list_topic("orders")
    assert segments is not None
    # One request for the facts of the base, and one for the manifests and flags of the few topics.
    assert requests() == {"ARCHIVE": 2, "parts": 4, "pruned": 1, "bases": 2}
    Lister(url, asked, known=known)
    assert requests() == {"ARCHIVE": 2, "parts": 4, "pruned": 1}
    rows = [
        seq for batch in read_segments(segments.segments, asked) for seq in batch["seq"].to_pylist()
    ]
    assert rows == list(range(4, 31))
    assert requests() == {"segments": 2 * len(segments.segments)}


def test_an_error_names_the_object_and_no_secret(bucket: tuple[Buckets, str]) -> None:
    store, url = bucket
    asked = query(topics="orders", fromSeq="9", toSeq="16")
    listing = list_segments(url, asked)
    (path,) = listing.segments[0].paths(layout.DATA_SUFFIX)
    name = path.removeprefix("s3://")
    content = store.objects[name]
    told = []
    for damaged in (None, content[:-20], content[:200] + b"?" + content[201:], b""):
        if damaged is None:
            del store.objects[name]
        else:
            store.objects[name] = damaged
        with pytest.raises(StorageError) as caught:
            rows_of(listing, asked)
        kind = SegmentGone if damaged is None else Corrupt if damaged else StorageError
        assert isinstance(caught.value, kind)
        told.append(str(caught.value))
    store.failing = 1
    with pytest.raises(StorageError) as caught:
        BucketRanges.open(url).read(name.partition("/")[2], 0, 10)
    told.append(str(caught.value))
    store.failing = 0
    assert all(url in each for each in told), told
    assert not any(key in each for key in KEYS for each in told)


def test_ranges_of_an_object(bucket: tuple[Buckets, str]) -> None:
    store, url = bucket
    content = os.urandom(200_000)
    store.objects[f"{url.removeprefix('s3://')}/some"] = content
    file = BucketObject(url, "some")
    assert file.size() == len(content)
    for start, length in ((0, 10), (0, 200_000), (65_530, 20), (150_000, 60_000), (200_000, 5)):
        assert file.read(start, length) == content[start : start + length]
    file.close()
    with pytest.raises(NotThere, match=rf"{url}/other: does not exist"):
        BucketObject(url, "other")


@pytest.mark.slow
def test_a_cluster_reads_a_bucket_without_a_shared_folder(
    bucket: tuple[Buckets, str], second: ArchivedMoment, tmp_path: Path
) -> None:
    """The cluster has two worker processes; the credentials are in the environment only."""
    if not HAS_SPARK:
        pytest.skip(f"PySpark is not installed; {INSTALL}")
    if find_java() is None:
        pytest.skip(NO_JAVA)
    _, url = bucket
    columns = ", ".join(f"{name} {kind}" for name, kind in AS_IS)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, url, columns],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "src")))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = next(line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    found = json.loads(said.removeprefix("FOUND "))
    assert found["workers"] == 2
    topics = by_topic([row for row in found["rows"] if row["topic"] != TICKS])
    for name, rows in second.rows.items():
        assert digests(topics.get(name, [])) == digests(rows), name
    assert not any(key in text for key in KEYS for text in (done.stdout, done.stderr))
