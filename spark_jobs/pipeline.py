"""`topics pipeline`: from a server's log to a lake and results by day, with one command.

Steps: seal, the lake (an incremental export, or days as Parquet), then the jobs, by day or once a
run. A step is done if the state file has it with the current mark: the epoch and last sealed seq of
each topic within the day. So a run after a kill continues at the interrupted step, a run without
new records does nothing, and a new day adds only its own steps. Each step replaces its own output,
so repeating it gives the same result. A file lock allows one run at a time.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from spark_jobs.reader.listing import Lister
from spark_jobs.reader.options import names_of
from spark_jobs.reader.query import Query
from spark_jobs.running.outputs import OutputRefused, publish_json, resolve
from spark_jobs.running.pipeline_config import (
    EXAMPLE,
    BadConfig,
    Config,
    JobConfig,
    day_of,
    read_config,
)
from topics_server.values.errors import StorageError

STATE: Final = "state.json"
LOCK: Final = "lock"
VERSION: Final = 1
DAY_MS: Final = 86_400_000
EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_LOCKED = 0, 1, 2, 3
# Options of jobs that name topics outside `source.topics`: a lease log, a router's source.
_OF_OTHER_TOPICS: Final = frozenset({"queue_latency", "router_lag"})
_EPOCH: Final = date(1970, 1, 1)
_SEAL_TIMEOUT_S: Final = 600

Marks = dict[str, list[int]]  # by topic: epoch, last sealed seq


@dataclass(slots=True)
class Step:
    """One step.

    `mark` identifies the records for which it is done; None: the step runs every time.
    """

    name: str
    day: str | None
    words: list[str]
    mark: Marks | None
    state: str = "planned"  # planned, done, skipped, failed
    seconds: float = 0.0
    detail: str = ""

    @property
    def key(self) -> str:
        """The step's key in the state file: equal arguments mean the same step."""
        digest = hashlib.sha256(json.dumps(self.words).encode()).hexdigest()[:12]
        return f"{self.name} {self.day or '-'} {digest}"


@dataclass(slots=True)
class PipelineRun:
    """One run of a pipeline: its plan and the results."""

    config: Config
    steps: list[Step] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0, or 1 if a step failed."""
        return EXIT_FAILED if any(step.state == "failed" for step in self.steps) else EXIT_DONE


# -- days and their marks -------------------------------------------------------------


def days_of(config: Config) -> dict[date, Marks]:
    """Days that may have sealed records of the selected topics, with the marks of each.

    Uses manifests only. The mark of a day is the last seq of the segments that begin on that day or
    earlier, so records of later days do not change it.
    """
    query = Query(topics=names_of(config.topics), is_tolerant=True)
    cold = None if config.cold_dir is None else str(config.cold_dir)
    topics = Lister(str(config.data_dir), query, cold_dir=cold).topics
    found: dict[date, Marks] = {}
    for name, topic in topics.items():
        manifest = topic.manifest
        by_day: dict[int, int] = {}
        for entry in manifest.segments:
            for number in range(entry.first_ts // DAY_MS, entry.last_ts // DAY_MS + 1):
                by_day[number] = max(by_day.get(number, 0), entry.last_seq)
        for number, last_seq in by_day.items():
            day = _day(number)
            if day is not None and (config.first_day is None or day >= config.first_day):
                found.setdefault(day, {})[name] = [manifest.epoch, last_seq]
    return dict(sorted(found.items()))


def _day(number: int) -> date | None:
    """The day of a number since the epoch; None for years outside the calendar."""
    try:
        return _EPOCH + timedelta(days=number)
    except OverflowError:
        return None


def plan(config: Config, chosen: tuple[date, date] | None = None) -> list[Step]:
    """All steps in order. `chosen`: the first and the last day to include."""
    days = _within(days_of(config), chosen)
    of_all = _within(days_of(replace(config, topics=None)), chosen) if config.topics else days
    whole: Marks = {}
    for marks in days.values():
        for name, mark in marks.items():
            whole[name] = max(whole.get(name, [0, 0]), mark)
    steps: list[Step] = []
    if config.lake is not None and config.lake_kind == "export":
        steps.append(Step("export", None, _export_words(config), whole))
    elif config.lake is not None:
        steps += [
            Step("to_parquet", str(day), _lake_words(config, day), marks)
            for day, marks in days.items()
        ]
    for job in config.jobs:
        if job.by == "run":
            steps.append(Step(job.name, None, [*_source_words(config), *_out_words(job)], None))
            continue
        for day, marks in (of_all if job.name in _OF_OTHER_TOPICS else days).items():
            words = [*_source_words(config), *_day_words(day), *_out_words(job, day)]
            steps.append(Step(job.name, str(day), words, marks))
    return steps


def _within(days: dict[date, Marks], chosen: tuple[date, date] | None) -> dict[date, Marks]:
    if chosen is None:
        return days
    return {day: marks for day, marks in days.items() if chosen[0] <= day <= chosen[1]}


def _out_words(job: JobConfig, day: date | None = None) -> list[str]:
    out = job.out if day is None else job.out / f"day={day}"
    words = ["--out", str(out), *job.options]
    if job.picture is not None:
        words += ["--picture", str(job.picture).replace("{day}", str(day or "all"))]
    return words


def _source_words(config: Config) -> list[str]:
    words = [str(config.data_dir), "--rows", "0"]
    words += ["--cold-dir", str(config.cold_dir)] if config.cold_dir is not None else []
    return words + (["--topics", config.topics] if config.topics else [])


def _day_words(day: date) -> list[str]:
    return ["--from", str(day), "--to", str(day + timedelta(days=1))]


def _lake_words(config: Config, day: date) -> list[str]:
    words = [*_source_words(config), *_day_words(day), "--out", str(config.lake)]
    words += ["--schema", config.schema] if config.schema else ["--payload", config.payload]
    return words


def _export_words(config: Config) -> list[str]:
    words = ["--to", str(config.lake), "--format", config.lake_format, "--sealed"]
    words += ["--data-dir", str(config.data_dir)]
    words += ["--cold-dir", str(config.cold_dir)] if config.cold_dir is not None else []
    return words + ([each.strip() for each in config.topics.split(",")] if config.topics else [])


# -- the state ---------------------------------------------------------------------------------


class PipelineState:
    """The finished steps with their marks, in a file that is replaced after each step."""

    def __init__(self, folder: Path) -> None:
        """Read the file. Raises `BadConfig` if it is not the state of a pipeline."""
        self._path = folder / STATE
        self.done: dict[str, Any] = {}
        try:
            found = json.loads(self._path.read_text("utf-8"))
        except FileNotFoundError:
            return
        except ValueError:
            raise BadConfig(f"{self._path}: is not the state of a pipeline") from None
        if found.get("version") != VERSION:
            raise BadConfig(f"{self._path}: is of version {found.get('version')}, not {VERSION}")
        self.done = found["done"]

    def has(self, step: Step) -> bool:
        """Whether a step is done for the current records."""
        known = self.done.get(step.key)
        return known is not None and step.mark is not None and known["mark"] == step.mark

    def note(self, step: Step) -> None:
        """Store that a step is done."""
        self.done[step.key] = {"mark": step.mark, "at": int(time.time() * 1000)}
        publish_json(self._path, {"version": VERSION, "done": self.done})


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Allow one run at a time. Raises `BlockingIOError`."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


# -- running the steps ---------------------------------------------------------------------------


def seal(config: Config) -> str:
    """Ask the server to seal all records; return its answer. Raises `RuntimeError`."""
    headers = {"Content-Type": "application/json"}
    token = os.environ.get(config.token_env)
    if token:
        headers["Authorization"] = f"Bearer {token}"
    assert config.url is not None
    request = urllib.request.Request(
        config.url.rstrip("/") + "/v0/admin/seal", b"{}", headers, method="POST"
    )
    if request.type not in ("http", "https"):
        raise RuntimeError(f"{config.url!r} is not the URL of a server")
    try:
        with urllib.request.urlopen(request, timeout=_SEAL_TIMEOUT_S) as answer:
            sealed = json.loads(answer.read())
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{config.url} answered {error.code} to a seal") from None
    except (OSError, ValueError) as error:
        raise RuntimeError(f"{config.url} does not answer: {error}") from None
    return ", ".join(f"{value} {name}" for name, value in sealed.items() if isinstance(value, int))


def do(step: Step) -> None:
    """Run one step in this process, and set its state, seconds and detail."""
    began = time.monotonic()
    try:
        # Steps print for the user; standard output is only for the summary.
        with redirect_stdout(sys.stderr):
            code = importlib.import_module(f"spark_jobs.{step.name}").main(step.words)
        step.state = "done" if code == 0 else "failed"
        step.detail = "" if code == 0 else f"exit code {code}"
    except SystemExit as error:
        step.state, step.detail = "failed", f"exit code {error.code}"
    except Exception as error:  # the other steps run after any error of a step
        step.state, step.detail = "failed", str(error).strip().splitlines()[0][:500]
    step.seconds = round(time.monotonic() - began, 3)


def run(
    config: Config,
    *,
    chosen: tuple[date, date] | None = None,
    is_dry: bool = False,
    on_step: Callable[[Step], None] = lambda _step: None,
) -> PipelineRun:
    """Run all steps, or only plan them. The `chosen` days run again even if they are done.

    Raises `BadConfig`, `OutputRefused`, `StorageError`, `BlockingIOError`.
    """
    made = PipelineRun(config)
    stores = (config.data_dir, config.cold_dir)
    for folder in (config.state, config.lake, *(job.out for job in config.jobs)):
        if folder is not None:
            resolve(folder, stores)
    if is_dry:
        state = PipelineState(config.state)
        if config.url is not None:
            made.steps.append(Step("seal", None, [], None))
        for step in plan(config, chosen):
            if chosen is None and state.has(step):
                step.state = "skipped"
            made.steps.append(step)
        return made
    with locked(config.state):
        state = PipelineState(config.state)
        if config.url is not None and not _seal(config, made, on_step):
            return made
        for step in plan(config, chosen):
            made.steps.append(step)
            if chosen is None and state.has(step):
                step.state = "skipped"
            else:
                if step.name != "export":
                    _start_spark(config)
                do(step)
                if step.state == "done":
                    state.note(step)
            on_step(step)
    return made


def _seal(config: Config, made: PipelineRun, on_step: Callable[[Step], None]) -> bool:
    """The first step, without which the others would not read new records."""
    step = Step("seal", None, [], None)
    made.steps.append(step)
    began = time.monotonic()
    try:
        step.detail, step.state = seal(config), "done"
    except RuntimeError as error:
        step.detail, step.state = str(error), "failed"
    step.seconds = round(time.monotonic() - began, 3)
    on_step(step)
    return step.state == "done"


def _start_spark(config: Config) -> None:
    """Start the session of all steps of this process; later steps reuse it."""
    from spark_jobs.session import spark_session

    spark_session("topics pipeline", master=config.master, config=dict(config.spark))


def _stop_spark() -> None:
    if "pyspark" not in sys.modules:
        return
    from pyspark.sql import SparkSession

    session = SparkSession.getActiveSession()
    if session is not None:
        session.stop()


# -- the command line ----------------------------------------------------------------------------


def arguments() -> argparse.ArgumentParser:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="topics pipeline",
        description="From a server's log to a lake and results by day, with one command.",
        epilog="Exit codes: 0 done, 1 a step failed or found something, 2 wrong usage or "
        "configuration, 3 another run is at work.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="run|init")
    init = verbs.add_parser("init", help="write a configuration with comments")
    init.add_argument("file", type=Path, metavar="CONFIG.toml")
    runs = verbs.add_parser("run", help="run the steps that have new input")
    runs.add_argument("file", type=Path, metavar="CONFIG.toml")
    runs.add_argument("--dry-run", action="store_true", help="list the steps and run none")
    runs.add_argument("--from", dest="first", metavar="DAY", help="first day to run again")
    runs.add_argument("--to", dest="last", metavar="DAY", help="last day to run again")
    runs.add_argument("--json", action="store_true", help="print the summary as JSON")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; exit codes are in its help."""
    given = arguments().parse_args(words)
    if given.verb == "init":
        return _init(given.file)
    was_running = _is_running()
    try:
        config = read_config(given.file)
        made = run(config, chosen=_chosen(given), is_dry=given.dry_run, on_step=_tell)
    except BlockingIOError:
        _note("another run of this pipeline is at work")
        return EXIT_LOCKED
    except (BadConfig, OutputRefused, StorageError) as error:
        _note(str(error))
        return EXIT_USAGE
    finally:
        if not was_running:
            _stop_spark()
    sys.stdout.write(summary_json(made) if given.json else summary(made))
    return made.exit_code


def _is_running() -> bool:
    if "pyspark" not in sys.modules:
        return False
    from spark_jobs.session import is_running

    return is_running()


def _chosen(given: argparse.Namespace) -> tuple[date, date] | None:
    if given.first is None and given.last is None:
        return None
    first = day_of(given.first, "--from") if given.first else _EPOCH
    last = day_of(given.last, "--to") if given.last else datetime.now(UTC).date()
    return first, last


def _init(path: Path) -> int:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(EXAMPLE)
    except FileExistsError:
        _note(f"{path}: is there already; it is not replaced")
        return EXIT_USAGE
    except OSError as error:
        _note(f"{path}: cannot be written: {error.strerror}")
        return EXIT_USAGE
    _note(f"written: {path}; then: topics pipeline run {path} --dry-run")
    return EXIT_DONE


def _note(text: str) -> None:
    sys.stderr.write(f"topics pipeline: {text}\n")


def _tell(step: Step) -> None:
    if step.state != "skipped":
        _note(f"{step.name} {step.day or ''}".rstrip() + f": {step.state} {step.detail}".rstrip())


def summary(made: PipelineRun) -> str:
    """A table of the steps."""
    rows = [("step", "day", "state", "seconds", "")]
    rows += [(s.name, s.day or "", s.state, f"{s.seconds:.1f}", s.detail) for s in made.steps]
    widths = [max(len(row[n]) for row in rows) for n in range(4)]
    lines = []
    for name, day, state, seconds, detail in rows:
        cells = (name.ljust(widths[0]), day.ljust(widths[1]), state.ljust(widths[2]))
        lines.append("  ".join((*cells, seconds.rjust(widths[3]), detail)).rstrip())
    return "\n".join(lines) + "\n"


def summary_json(made: PipelineRun) -> str:
    """The summary as JSON, for programs."""
    steps = [{k: v for k, v in asdict(s).items() if k not in ("words", "mark")} for s in made.steps]
    return json.dumps({"steps": steps, "exit_code": made.exit_code}) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
