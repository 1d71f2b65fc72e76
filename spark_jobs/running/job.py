"""The shared part of all jobs: arguments, reading, writing Parquet, printing, a picture.

A job is a pure `transform(frame, ...) -> frame` and a `main`; this module has the code around it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from spark_jobs.reader.options import parse_options, place_of
from spark_jobs.reader.query import BadOption
from spark_jobs.running import outputs, pictures
from spark_jobs.session import NoJava, is_running, spark_session

SHOWN_ROWS: Final = 20


def parser_of(name: str, about: str) -> argparse.ArgumentParser:
    """The options of every job."""
    parser = argparse.ArgumentParser(prog=f"topics jobs {name}", description=about)
    parser.add_argument(
        "data_dir",
        type=place,
        help="data directory of a server, or a copy of one, or its archive: a folder or a URL",
    )
    parser.add_argument("--cold-dir", type=Path, help="the server's cold folder")
    parser.add_argument("--topics", metavar="A,B*", help="topics: names, prefixes*, globs (all)")
    parser.add_argument(
        "--from", dest="from_ts", metavar="TIME", help="first time: ISO 8601, or ms"
    )
    parser.add_argument("--to", dest="to_ts", metavar="TIME", help="end time, exclusive")
    parser.add_argument("--tolerant", action="store_true", help="skip and report damaged records")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the result as Parquet")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="draw the result: .svg or .png"
    )
    parser.add_argument("--rows", type=int, default=SHOWN_ROWS, help="rows to print (20)")
    parser.add_argument("--master", help="Spark master; default: all cores of this machine")
    return parser


def place(text: str) -> Path | str:
    """A folder, or the URL of an archive in a bucket; argparse shows the error."""
    try:
        found = place_of(text)
    except BadOption as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if "://" in found:
        return found
    return Path(found) if text.startswith("file:") else Path(text)


def options_of(given: argparse.Namespace, **more: str) -> dict[str, str]:
    """The options of the source. Raises `BadOption`."""
    found = {
        "coldDir": given.cold_dir,
        "topics": given.topics,
        "fromTs": given.from_ts,
        "toTs": given.to_ts,
        "checks": "tolerant" if given.tolerant else None,
        **more,
    }
    options = {name: str(value) for name, value in found.items() if value is not None}
    parse_options({"path": str(given.data_dir), **options})
    return options


def load(spark: Any, given: argparse.Namespace, **more: str) -> Any:
    """Load the records of the named directory."""
    return (
        spark.read.format("topics").options(**options_of(given, **more)).load(str(given.data_dir))
    )


def finish(
    result: Any,
    given: argparse.Namespace,
    draw: Callable[[Sequence[Any]], pictures.Figure] | None = None,
    name: str = "",
    drawn: Callable[[Any], pictures.Figure] | None = None,
) -> None:
    """Write, draw and print a result, which is computed once. `draw` gets all rows.

    `drawn` gets the frame, so that it collects only the drawn rows of an unbounded result.
    """
    result = result.cache()
    try:
        if given.out is not None:
            target = given.out / name if name else given.out
            outputs.replace_files(result, target)
            say(f"written: {target}")
        if draw is not None:
            picture(given, lambda: draw(result.collect()))
        if drawn is not None:
            picture(given, lambda: drawn(result))
        if given.rows:
            result.show(given.rows, truncate=60)
    finally:
        result.unpersist()


def dated(frame: Any, name: str, draw: Callable[[Any], pictures.Figure]) -> pictures.Figure:
    """Draw the rows whose time in column `name` Python can represent (years 1 to 9999), and report
    the others.
    """
    from pyspark.sql import functions as F

    low, high = F.lit("0001-01-02").cast("date"), F.lit("9999-12-30").cast("date")
    is_held = F.col(name).cast("date").between(low, high)
    figure = draw(frame.where(is_held))
    left = frame.where(~is_held).count()
    if left:
        pictures.add_note(figure, f"{left:,} times of years outside 1 to 9999 are not shown")
    return figure


def picture(given: argparse.Namespace, draw: Callable[[], pictures.Figure]) -> None:
    """Draw a picture if one was requested."""
    if given.picture is None:
        return
    given.picture.parent.mkdir(parents=True, exist_ok=True)
    pictures.save(draw(), given.picture)
    say(f"drawn: {given.picture}")


def say(text: str) -> None:
    """Print a line for the user; results go to standard output."""
    sys.stderr.write(f"{text}\n")


def run(
    name: str,
    given: argparse.Namespace,
    work: Callable[[Any, argparse.Namespace], int | None],
    details: Mapping[str, Any] | None = None,
) -> int:
    """Run a job with a session; exit code 2 for wrong options, a refused output or a missing Java.

    `details`: the arguments that all runs into one output must share.
    """
    try:
        options_of(given)
        with _claimed(name, given, details):
            is_ours = not is_running()
            if is_ours:
                say(f"topics jobs {name}: waiting for Spark to start (a JVM: some seconds)")
            since = time.monotonic()
            spark = spark_session(f"topics {name}", master=given.master)
            if is_ours:
                took = time.monotonic() - since
                where = spark.sparkContext.master
                say(f"Spark {spark.version} started after {took:.1f} s, on {where}")
            say(f"computing the result from the sealed segments of {given.data_dir}")
            try:
                return work(spark, given) or 0
            finally:
                if is_ours:
                    spark.stop()
    except (BadOption, NoJava, pictures.NoPictures, outputs.OutputRefused) as error:
        say(f"topics jobs {name}: {error}")
        return 2


@contextmanager
def _claimed(
    name: str, given: argparse.Namespace, details: Mapping[str, Any] | None
) -> Iterator[None]:
    """Claim the output folder, if there is one, and set `given.out` to its real path."""
    stores = (given.data_dir, given.cold_dir)
    if given.picture is not None:
        outputs.check_picture(given.picture, stores)
        pictures.require()
    if given.out is None:
        yield
        return
    given.out = outputs.resolve(given.out, stores)
    outputs.claim(given.out, name, details)
    with outputs.locked(given.out):
        yield
