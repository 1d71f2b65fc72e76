"""`python -m benchmarks.analytics`: the cost of reading sealed segments with Spark.

    scan      six queries over segments, Parquet (zstd) and JSON lines of the same records
    scaling   full scans of more and more records, and of the same records in more segments
    export    rows a second of `topics export`
    plan      10,000 segments planned on the driver, and a stream's trigger after them
    compare   scan and plan of another build (--base ROOT) and of this one, in turns
    beside    a server's append latencies, without and with a full scan on the same machine
    cluster   full scans by two workers, from an archive on an S3 server and from the disk

Sides take turns, round by round, and the fastest round of each counts: on a noisy machine this
round is closest to the cost of the work itself. Results are printed, and stored with --json FILE.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from benchmarks.clustered import cluster
from benchmarks.sealed_data import START_MS, STEP_MS, make_sealed

ROOT: Final = Path(__file__).resolve().parents[1]
SIDES: Final = ("segments", "parquet", "json")
SCALES: Final = (100_000, 300_000, 1_000_000, 3_000_000, 10_000_000)
SEGMENTS: Final = (10, 100, 1_000, 10_000)
FIELDS: Final = "kind string, amount long"
Query = Callable[[Any], Any]


def say(text: str) -> None:
    """Print a line to standard error."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def timed(work: Callable[[], object]) -> float:
    """The seconds that a call takes."""
    gc.collect()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def sink(frame: Any) -> None:
    """Compute every row and discard it."""
    frame.write.format("noop").mode("overwrite").save()


def queries(records: int) -> dict[str, Query]:
    """The queries by name. Each takes a frame with all columns."""
    low = START_MS + STEP_MS * records // 2
    high = low + STEP_MS * records // 100

    def json_field(frame: Any) -> Any:
        fields = "get_json_object(data, '$.kind') k", "get_json_object(data, '$.amount') a"
        return frame.selectExpr(*fields).groupBy("k").agg({"a": "sum"})

    def typed_field(frame: Any) -> Any:
        """Give payloads types by a schema: with the source's own option, or with Spark's
        `from_json` for texts.
        """
        if dict(frame.dtypes)["data"] == "string":
            frame = frame.selectExpr(f"from_json(data, '{FIELDS}') data")
        return frame.groupBy("data.kind").agg({"data.amount": "sum"})

    return {
        "full scan": lambda frame: frame,
        "two columns": lambda frame: frame.select("seq", "tag"),
        "one tag of 5,000": lambda frame: frame.where("tag = 'user-77'"),
        "1 % of the time": lambda frame: frame.where(
            f"ts >= timestamp_millis({low}) and ts < timestamp_millis({high})"
        ),
        "sum of a JSON field": json_field,
        "the same by a schema": typed_field,
    }


class Sides:
    """The same records in three forms."""

    def __init__(self, spark: Any, folder: Path, records: int) -> None:
        self.spark = spark
        self.data_dir = str(make_sealed(folder, records, 65_536))
        self.parquet = str(folder / f"parquet-{records}")
        self.json = str(folder / f"json-{records}")
        frame = self.segments()
        self.schema = frame.schema
        if not Path(self.parquet, "_SUCCESS").exists():
            writer = frame.write.mode("overwrite").option("compression", "zstd")
            writer.parquet(self.parquet)
        if not Path(self.json, "_SUCCESS").exists():
            frame.write.mode("overwrite").json(self.json)

    def segments(self, columns: str | None = None) -> Any:
        """A frame of our source. A schema selects the columns, as in users' jobs."""
        reader = self.spark.read.format("topics").option("warn", "false")
        return (reader.schema(columns) if columns else reader).load(self.data_dir)

    def frame(self, side: str, query: str) -> Any:
        """The frame on which a query of a side runs."""
        if side == "parquet":
            return self.spark.read.parquet(self.parquet)
        if side == "json":
            return self.spark.read.schema(self.schema).json(self.json)
        pruned = {
            "two columns": "seq long, tag string",
            "sum of a JSON field": "data string",
            "the same by a schema": f"data struct<{FIELDS}>",
        }
        return self.segments(pruned.get(query))


def scan(spark: Any, given: argparse.Namespace) -> dict[str, Any]:
    """Run every query on every side, in turns."""
    say(f"making {given.records:,} records in three forms")
    sides = Sides(spark, given.dir, given.records)
    times: dict[str, dict[str, list[float]]] = {}
    for number in range(given.rounds + 1):
        for name, query in queries(given.records).items():
            for side in SIDES:
                if given.only and not any(word in name for word in given.only.split(",")):
                    continue
                took = timed(lambda q=query, s=side, n=name: sink(q(sides.frame(s, n))))  # type: ignore[misc]
                if number:  # the first round is a warm-up
                    times.setdefault(name, {}).setdefault(side, []).append(took)
    rows = {
        name: {side: round(min(found), 3) for side, found in by_side.items()}
        for name, by_side in times.items()
    }
    for name, best in rows.items():
        ours = best["segments"]
        say(
            f"{name:22} segments {ours:7.2f} s   parquet {best['parquet']:7.2f} s "
            f"({ours / best['parquet']:.2f}x)   json {best['json']:7.2f} s "
            f"({best['json'] / ours:.1f}x slower)"
        )
    return {"records": given.records, "rounds": given.rounds, "seconds": rows}


def scaling(spark: Any, given: argparse.Namespace) -> dict[str, Any]:
    """Full scans by size, and by number of segments at one size: packed, and with one task for each
    file.
    """
    found: dict[str, Any] = {"records": {}, "segments": {}}

    from spark_jobs.reader.listing import list_segments
    from spark_jobs.reader.packing import cost
    from spark_jobs.reader.query import Query as SealedQuery

    def scan_of(data_dir: Path, **options: str) -> float:
        reader = spark.read.format("topics").options(warn="false", **options)
        work = lambda: sink(reader.load(str(data_dir)))  # noqa: E731
        return min(timed(work) for _ in range(given.rounds))

    for records in (n for n in SCALES if n <= given.records):
        took = scan_of(make_sealed(given.dir, records, 65_536))
        found["records"][records] = round(took, 3)
        say(f"{records:>12,} records: {took:6.2f} s, {records / took:12,.0f}/s")
    records = min(1_000_000, given.records)
    for count in SEGMENTS:
        data_dir = make_sealed(given.dir, records, -(-records // count))
        took = scan_of(data_dir)
        alone = None
        if count <= 1_000:
            each = cost(list_segments(str(data_dir), SealedQuery()).segments[0], payload=True)
            alone = round(scan_of(data_dir, partitionBytes=str(each), minPartitions="1"), 3)
        found["segments"][count] = {"packed": round(took, 3), "task a segment": alone}
        said = "" if alone is None else f", a task each {alone:6.2f} s"
        say(f"{records:,} records in {count:>6,} segments: {took:6.2f} s{said}")
    return found


def export(_spark: Any, given: argparse.Namespace) -> dict[str, Any]:
    """Rows a second of an export of sealed segments to files."""
    from spark_jobs.export import main

    records = min(given.records, 1_000_000)
    data_dir = make_sealed(given.dir, records, 65_536)
    rates: dict[str, int] = {}
    for kind in ("parquet", "arrow", "ndjson"):
        with tempfile.TemporaryDirectory(dir=given.dir) as target:
            words = ["--to", target, "--data-dir", str(data_dir), "--sealed", "--format", kind]
            rates[kind] = int(records / timed(lambda w=words: main(w)))  # type: ignore[misc]
        say(f"export as {kind}: {rates[kind]:,} records/s")
    return {"records": records, "records_per_s": rates}


def beside(spark: Any, given: argparse.Namespace) -> dict[str, Any]:
    """Appends of 100 records, 50 a second, to a server; then the same during a Spark scan."""
    import signal
    import threading

    from tests.contract.driver import Server

    data_dir = make_sealed(given.dir, given.records, 65_536)
    body = {"records": [{"data": {"n": n, "pad": "x" * 180}, "tag": "t"} for n in range(100)]}
    content = json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=given.dir) as folder:
        server = Server(Path(folder))
        api = server.start()
        stop = threading.Event()

        def scanning() -> None:
            while not stop.is_set():
                sink(spark.read.format("topics").option("warn", "false").load(str(data_dir)))

        try:
            for name in ("alone", "while Spark scans"):
                worker = threading.Thread(target=scanning, daemon=True)
                if name != "alone":
                    worker.start()
                    time.sleep(2)
                latencies: list[float] = []
                due = time.perf_counter()
                for _ in range(50 * given.seconds):
                    due += 0.02
                    time.sleep(max(0.0, due - time.perf_counter()))
                    began = time.perf_counter()
                    api.http.post("/v0/topics/a", content=content, headers=headers)
                    latencies.append((time.perf_counter() - began) * 1e3)
                cuts = statistics.quantiles(latencies, n=100)
                found[name] = {"p50_ms": round(cuts[49], 2), "p99_ms": round(cuts[98], 2)}
                say(f"append of 100, {name}: p50 {cuts[49]:.2f} ms, p99 {cuts[98]:.2f} ms")
            stop.set()
            worker.join(120)
        finally:
            stop.set()
            server.signal(signal.SIGKILL)
    return found


def _planned(root: Path, data_dir: Path) -> dict[str, Any]:
    """The result of `benchmarks/planning.py` for the build in `root`."""
    done = subprocess.run(
        [str(root / ".venv" / "bin" / "python"), str(ROOT / "benchmarks/planning.py"), data_dir],
        cwd=root,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _many_segments(given: argparse.Namespace) -> Path:
    records = min(1_000_000, given.records)
    return make_sealed(given.dir, records, -(-records // SEGMENTS[-1]))


def plan(_spark: Any, given: argparse.Namespace) -> dict[str, Any]:
    """The driver's cost of planning 10,000 segments, for this build."""
    found = _planned(ROOT, _many_segments(given))
    say(", ".join(f"{name} {value}" for name, value in found.items()))
    return found


def compare(_spark: Any, given: argparse.Namespace) -> dict[str, Any]:
    """Scan and plan of two builds in turns: base, this, base, this; the faster turn of each counts.

    Each build runs its own benchmark with its own interpreter on the same files. The base makes the
    files, because a newer build reads the files of an older one.
    """
    if given.base is None:
        raise SystemExit("compare: --base names the checkout of the other build, with its .venv")
    builds = {"base": given.base.resolve(), "this": ROOT}
    made: dict[str, list[dict[str, dict[str, float]]]] = {name: [] for name in builds}
    plans: dict[str, list[dict[str, float]]] = {name: [] for name in builds}
    for turn in range(given.turns):
        for name, root in builds.items():
            say(f"-- {name}, turn {turn + 1} of {given.turns}: scan")
            report = given.dir / f"{name}.json"
            words = ["scan", "--dir", given.dir, "--json", report, "--rounds", given.rounds]
            words += ["--records", given.records, *(["--only", given.only] if given.only else [])]
            subprocess.run(
                [str(root / ".venv/bin/python"), "-m", "benchmarks.analytics", *map(str, words)],
                cwd=root,
                stdout=subprocess.DEVNULL,
                check=True,
            )
            made[name].append(json.loads(report.read_text("utf-8"))["scan"]["seconds"])
        data_dir = _many_segments_of(builds["base"], given)
        for name, root in builds.items():
            plans[name].append(_planned(root, data_dir))
            say(f"-- {name}: plan {plans[name][-1]}")
    scans = {
        name: {
            query: {side: min(each[query][side] for each in turns) for side in SIDES}
            for query in turns[0]
        }
        for name, turns in made.items()
    }
    best = {
        name: {key: min(each[key] for each in turns) for key in turns[0]}
        for name, turns in plans.items()
    }
    say(_table(scans, best))
    return {"records": given.records, "scan": scans, "plan": best, "all_plans": plans}


def _many_segments_of(root: Path, given: argparse.Namespace) -> Path:
    """The directory of 10,000 segments, made by another build."""
    code = (
        "import sys; from pathlib import Path; from benchmarks.sealed_data import make_sealed; "
        "print(make_sealed(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))"
    )
    records = min(1_000_000, given.records)
    words = [given.dir, records, -(-records // SEGMENTS[-1])]
    done = subprocess.run(
        [str(root / ".venv/bin/python"), "-c", code, *map(str, words)],
        cwd=root,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return Path(done.stdout.split()[-1])


def _table(scans: dict[str, Any], plans: dict[str, Any]) -> str:
    """Both builds side by side, as Markdown."""
    lines = ["", "| seconds | base | this | Parquet | JSON lines |", "|---|---|---|---|---|"]
    for query, this in scans["this"].items():
        ours = [scans["base"][query]["segments"], this["segments"], this["parquet"], this["json"]]
        lines.append(f"| {query} | " + " | ".join(f"{each:.2f}" for each in ours) + " |")
    lines += ["", "| 10,000 segments | base | this |", "|---|---|---|"]
    for name, value in plans["this"].items():
        lines.append(f"| {name} | {plans['base'][name]} | {value} |")
    return "\n".join(lines)


CASES: Final = {
    "scan": scan,
    "scaling": scaling,
    "export": export,
    "plan": plan,
    "compare": compare,
    "beside": beside,
    "cluster": cluster,
}
# All of these run by default.
USUAL: Final = ("scan", "scaling", "export", "plan", "beside")
# These run only when named: they start processes of their own, which another JVM would disturb.
WITHOUT_SPARK: Final = frozenset({"plan", "compare", "export", "cluster"})


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.analytics",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("cases", nargs="*", default=list(USUAL), help=", ".join(CASES))
    parser.add_argument("--records", type=int, default=5_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help="scan: words in names of queries, separated by commas")
    parser.add_argument("--base", type=Path, metavar="ROOT", help="compare: the other checkout")
    parser.add_argument("--turns", type=int, default=2, help="compare: turns of each build (2)")
    parser.add_argument("--seconds", type=int, default=20, help="seconds of appends for each side")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir(), "topics-analytics"))
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    unknown = set(given.cases) - set(CASES)
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    given.dir.mkdir(parents=True, exist_ok=True)
    from spark_jobs.session import spark_session

    spark: Any = None
    report: dict[str, Any] = {}
    try:
        for name in given.cases:
            if spark is None and name not in WITHOUT_SPARK:
                spark = spark_session(
                    "topics analytics", master="local[2]", config={"spark.driver.memory": "4g"}
                )
            report[name] = CASES[name](spark, given)
            if given.json is not None:
                given.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    finally:
        if spark is not None:
            spark.stop()
    sys.stdout.write(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
