"""An archive of a real server at two moments, with the diffs of those moments."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.contract.driver import Api, Server, eventually, good
from tests.spark.logs import Row, change_later, make_log, read_rows, seal_all

SEEDS = (3, 4, 6)
# Records of this topic make a new base due.
TICKS = "ticks"


@dataclass(frozen=True)
class ArchivedMoment:
    """A copy of the archive, and by topic the rows of a diff over all sealed records."""

    folder: Path
    rows: dict[str, list[Row]]
    epochs: dict[str, int]


def base_ts(api: Api) -> float:
    """The server's time of the newest base."""
    shown = good(api.http.get("/v0/metrics", headers={"Accept": "application/json"}))
    return float(shown["topics_archive_base_timestamp_ms"])


def archive_base(api: Api) -> None:
    """Return once the archive has a base that began after this call. A base that is under way may
    have copied its segments before the call, so this waits for two bases.
    """
    since = time.time() * 1000
    for _ in range(2):

        def is_newer(since: float = since) -> bool:
            api.add(TICKS, 1)
            time.sleep(0.05)
            return base_ts(api) > since

        eventually(is_newer, "a newer base", within_s=60)
        since = base_ts(api)


def _moment(api: Api, server: Server, folder: Path, names: list[str]) -> ArchivedMoment:
    """Seal and archive everything, and stop the server."""
    seal_all(api)
    archive_base(api)
    there = [name for name in names if api.state(name).status_code == 200]
    rows = {name: read_rows(api, name) for name in there}
    epochs = {name: int(api.get_state(name)["epoch"]) for name in there}
    server.stop()
    shutil.copytree(server.directory / "archive", folder)
    return ArchivedMoment(folder, rows, epochs)


@pytest.fixture(scope="session")
def moments(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[ArchivedMoment, ArchivedMoment]]:
    """An archive, and the same archive after appends, deletes, evictions and drops."""
    directory = tmp_path_factory.mktemp("archived")
    (directory / "archive").mkdir()
    server = Server(
        directory,
        {
            "TOPICS_WAL_SHARDS": "1",
            "TOPICS_SEGMENT_MAX_EVENTS": "8",
            "TOPICS_ARCHIVE_URL": (directory / "archive").as_uri(),
            "TOPICS_ARCHIVE_BASE_INTERVAL_MS": "1000",
        },
    )
    try:
        api = server.start()
        names = [name for seed in SEEDS for name in make_log(api, seed)] + ["orders", "dropped"]
        # Two segments: later a delete removes all records of one of them.
        api.add("orders", *({"id": n, "name": f"o{n}"} for n in range(16)), tag="early")
        api.add("dropped", *range(10))
        first = _moment(api, server, directory / "first", names)
        api = server.start()
        for seed in SEEDS:
            change_later(api, seed)
        good(api.drop("dropped"))
        api.add("orders", *({"id": n, "name": f"o{n}"} for n in range(16, 30)), tag="late")
        good(api.delete("orders", before_seq=4))
        second = _moment(api, server, directory / "second", names)
        yield first, second
    finally:
        if server.process is not None:
            server.stop()


@pytest.fixture
def first(moments: tuple[ArchivedMoment, ArchivedMoment]) -> ArchivedMoment:
    """The earlier moment; not to be changed."""
    return moments[0]


@pytest.fixture
def second(moments: tuple[ArchivedMoment, ArchivedMoment]) -> ArchivedMoment:
    """The later moment; not to be changed."""
    return moments[1]


@pytest.fixture
def copied(second: ArchivedMoment, tmp_path: Path) -> Path:
    """A copy of the later moment, which may be damaged."""
    return Path(shutil.copytree(second.folder, tmp_path / "copied"))
