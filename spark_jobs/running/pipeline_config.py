"""The configuration of `topics pipeline`: a TOML file, checked completely before any step runs.

Paths are relative to the file's folder. Unknown keys are refused, because a misspelled key would
silently drop a step. The file never contains API keys: `token_env` names an environment variable.
Pure except for reading the file. Called by `pipeline`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, Final

from spark_jobs.catalog import JOBS, LAKES

EXAMPLE: Final = """\
# topics pipeline run THIS_FILE: from a server's log to a lake, once or every night.
# Paths are relative to this file's folder. Each step is done again only when there is more to do.

[source]
data_dir = "topics-data"              # of the server, or a copy
# cold_dir = "topics-cold"            # its TOPICS_COLD_DIR
# url = "http://127.0.0.1:4000"       # is asked to seal first; without it, what is sealed is taken
# token_env = "TOPICS_TOKEN"          # the variable that holds the key for it
# topics = "orders.*,clicks"          # names, prefixes, globs (all)

[lake]
path = "lake"
kind = "export"                       # "export": each record once, for good, a little more a run
# format = "parquet"                  #   parquet, ndjson or arrow
# kind = "to_parquet"                 # "to_parquet": days as the store has them now
# payload = "text"                    #   text or variant
# schema = "id long, type string"     #   or a schema of payloads, in Spark's words

[state]
path = "pipeline-state"               # which steps are done, and the lock of a run

[spark]
master = "local[*]"                   # or spark://HOST:7077, where all workers see these folders
# config = { "spark.driver.memory" = "4g" }

[days]
# first = "2026-01-01"                # earlier days are left alone

# One table a job. By day: OUT/day=YYYY-MM-DD, for each day with new records. By run: OUT.
[[jobs]]
name = "topic_volume"
out = "results/topic_volume"
options = ["--bucket", "1 hour"]
picture = "results/topic_volume-{day}.svg"

[[jobs]]
name = "tag_activity"
out = "results/tag_activity"

[[jobs]]
name = "integrity_audit"
out = "results/integrity_audit"
by = "run"
"""
_BY_RUN: Final = frozenset({"integrity_audit"})
# Options that the pipeline sets itself.
_OURS: Final = (
    "--out",
    "--cold-dir",
    "--topics",
    "--from",
    "--to",
    "--master",
    "--rows",
    "--picture",
)


class BadConfig(ValueError):
    """The file cannot be used; the message gives place and reason."""


@dataclass(frozen=True, slots=True)
class JobConfig:
    """One entry of `jobs`. `by`: `day` or `run`."""

    name: str
    out: Path
    by: str
    options: tuple[str, ...] = ()
    picture: Path | None = None


@dataclass(frozen=True, slots=True)
class Config:
    """The whole file."""

    data_dir: Path
    state: Path
    cold_dir: Path | None = None
    url: str | None = None
    token_env: str = "TOPICS_TOKEN"
    topics: str | None = None
    lake: Path | None = None
    lake_kind: str = "export"
    lake_format: str = "parquet"
    payload: str = "text"
    schema: str | None = None
    master: str = "local[*]"
    spark: Mapping[str, str] = field(default_factory=dict)
    first_day: date | None = None
    jobs: tuple[JobConfig, ...] = ()


class _Table:
    """A table whose keys are taken one by one; keys that remain are unknown."""

    def __init__(self, name: str, content: Any) -> None:
        if not isinstance(content, dict):
            raise BadConfig(f"[{name}] is a table")
        self._name = name
        self._left = dict(content)

    def text(self, key: str, known: tuple[str, ...] = ()) -> str | None:
        """A text, one of `known` if there are any; None if the key is missing."""
        value = self._left.pop(key, None)
        if value is not None and (not isinstance(value, str) or not value.strip()):
            raise BadConfig(f"{self._name}.{key} is a text that is not empty")
        if value is not None and known and value not in known:
            raise BadConfig(f"{self._name}.{key} is {' or '.join(known)}, not {value!r}")
        return value

    def needed(self, key: str) -> str:
        """A text that must be present."""
        value = self.text(key)
        if value is None:
            raise BadConfig(f"{self._name}.{key} is missing")
        return value

    def any(self, key: str, default: Any) -> Any:
        """A value of the default's type."""
        value = self._left.pop(key, default)
        if not isinstance(value, type(default)):
            raise BadConfig(f"{self._name}.{key} is a {type(default).__name__}")
        return value

    def day(self, key: str) -> date | None:
        """A day, as a TOML date or as a text."""
        value = self._left.pop(key, None)
        if value is None:
            return None
        if type(value) is date:
            return value
        return day_of(str(value), f"{self._name}.{key}")

    def end(self) -> None:
        """Refuse the keys that were not taken."""
        if self._left:
            raise BadConfig(f"{self._name}: there is no {', '.join(sorted(self._left))}")


def day_of(text: str, what: str) -> date:
    """Parse a day such as `2026-01-31`. Raises `BadConfig`."""
    try:
        return datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC).date()
    except ValueError:
        raise BadConfig(f"{what} is a day such as 2026-01-31, not {text!r}") from None


def read_config(path: Path) -> Config:
    """Read and check the file. Raises `BadConfig`."""
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise BadConfig(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadConfig(f"{path}: is not TOML: {error}") from None
    try:
        return _config(content, path.resolve().parent)
    except BadConfig as error:
        raise BadConfig(f"{path}: {error}") from None


def _config(content: dict[str, Any], base: Path) -> Config:
    tables = {name: content.pop(name, {}) for name in ("source", "lake", "state", "spark", "days")}
    jobs = content.pop("jobs", [])
    if content:
        raise BadConfig(f"there is no table {', '.join(sorted(content))}")
    source, lake = _Table("source", tables["source"]), _Table("lake", tables["lake"])
    state, spark = _Table("state", tables["state"]), _Table("spark", tables["spark"])
    days = _Table("days", tables["days"])
    cold, folder = source.text("cold_dir"), lake.text("path")
    config = Config(
        data_dir=base / source.needed("data_dir"),
        cold_dir=base / cold if cold else None,
        url=source.text("url"),
        token_env=source.text("token_env") or "TOPICS_TOKEN",
        topics=source.text("topics"),
        lake=base / folder if folder else None,
        lake_kind=lake.text("kind", ("export", "to_parquet")) or "export",
        lake_format=lake.text("format", ("parquet", "ndjson", "arrow")) or "parquet",
        payload=lake.text("payload", ("text", "variant")) or "text",
        schema=lake.text("schema"),
        state=base / state.needed("path"),
        master=spark.text("master") or "local[*]",
        spark={str(key): str(value) for key, value in spark.any("config", {}).items()},
        first_day=days.day("first"),
        jobs=tuple(_job(n, each, base) for n, each in enumerate(jobs, 1)),
    )
    for table in (source, lake, state, spark, days):
        table.end()
    outs = [job.out for job in config.jobs] + [each for each in (config.lake,) if each]
    if len({str(out.resolve()) for out in outs}) < len(outs):
        raise BadConfig("two outputs go to one folder")
    return config


def _job(number: int, content: Any, base: Path) -> JobConfig:
    table = _Table(f"jobs, number {number}", content)
    name = table.needed("name")
    if name not in JOBS or name in LAKES:
        known = ", ".join(each for each in JOBS if each not in LAKES)
        raise BadConfig(f"there is no job {name!r} here; there are: {known}")
    options = tuple(map(str, table.any("options", [])))
    for option in options:
        if option.split("=")[0] in _OURS:
            raise BadConfig(f"jobs, number {number}: {option} is said by the pipeline itself")
    by = table.text("by", ("day", "run")) or ("run" if name in _BY_RUN else "day")
    out, picture = base / table.needed("out"), table.text("picture")
    if picture is not None and by == "day" and "{day}" not in picture:
        raise BadConfig(
            f"jobs, number {number}: the picture of a job by day has {{day}} in its name"
        )
    job = JobConfig(name, out, by, options, base / picture if picture else None)
    table.end()
    return job
