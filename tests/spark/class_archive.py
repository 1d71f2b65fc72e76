"""An archive of Spark's classes for every Java that the Spark tests start.

Without it each Java reads, verifies and links more than 12,000 classes of 279 jars, which is much
of the processor time of a session. The first test with a session makes the archive in the
environment's folder, once, in a process beside the tests; Java processes started later map it.
Without an archive the tests run as well, only slower.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from spark_jobs.session import find_java
from tests.contract.driver import ROOT

FOLDER: Final = Path(sys.prefix, ".spark-classes")
# Java compiles quickly instead of well: the programs of the tests are short. Java then reserves 48
# MiB for compiled code, which all Spark tests of one process fill: no later call succeeds. So it
# gets as much as without the first option.
QUICK: Final = "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m"
# Java's warnings go to the output, which tests read.
QUIET: Final = "-Xlog:disable"
OPTIONS: Final = ("SPARK_SUBMIT_OPTS", "SPARK_DAEMON_JAVA_OPTS")
# Uses Spark as most tests do, so that the archive holds the classes they need.
PROGRAM: Final = """
import sys
import pyarrow as pa
from pyspark import SparkContext
from pyspark.sql import functions as F
from pyspark.sql.datasource import DataSource, DataSourceReader
from spark_jobs.session import spark_session

class Reader(DataSourceReader):
    def read(self, partition):
        yield pa.RecordBatch.from_pylist([{"seq": 1, "tag": "a", "data": '{"n": 1}'}])

class Few(DataSource):
    @classmethod
    def name(cls):
        return "few"

    def schema(self):
        return "seq bigint, tag string, data string"

    def reader(self, schema):
        return Reader()

out = sys.argv[1]
spark = spark_session("classes", master="local[2]", config={
    "spark.driver.memory": "512m", "spark.sql.shuffle.partitions": "1",
    "spark.driver.extraJavaOptions": "-XX:+UseSerialGC"})
spark.dataSource.register(Few)
frame = spark.read.format("few").load()
counts = frame.groupBy("tag").agg(F.count("*").alias("n"), F.max("seq"))
counts.selectExpr("*", "rank() over (order by n) as place").collect()
frame.selectExpr("parse_json(data) as data", "tag").write.parquet(out + "/variant")
frame.write.partitionBy("tag").mode("overwrite").parquet(out + "/rows")
spark.read.parquet(out + "/rows").orderBy("seq").collect()
spark.createDataFrame([(1, "a")], "n bigint, tag string").join(frame, "tag").collect()
java = SparkContext._gateway.proc
spark.stop()
java.stdin.close()
sys.exit(java.wait())
"""


def start_making() -> subprocess.Popen[bytes] | None:
    """Make the archive in a process beside this one, unless it is there."""
    key = key_of()
    if key is None or find(key) is not None:
        return None
    return subprocess.Popen(
        [sys.executable, "-m", "tests.spark.class_archive"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": _PATHS},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def use() -> Path | None:
    """Let each Java that is started from now on map the archive, if there is one."""
    key = key_of()
    found = None if key is None else find(key)
    if found is not None:
        os.environ["SPARK_CONF_DIR"] = str(FOLDER / "conf")
        for variable in OPTIONS:
            os.environ[variable] = f"{QUICK} -XX:SharedArchiveFile={found} {QUIET}"
    return found


def java_options() -> str:
    """The options of a Java, for settings that tests write themselves."""
    return os.environ[OPTIONS[0]]


def plain_environment() -> dict[str, str]:
    """Return the environment as a user has it: without archive, and with Spark's own settings."""
    ours = (*OPTIONS, "SPARK_CONF_DIR")
    return {name: value for name, value in os.environ.items() if name not in ours}


def find(key: str, folder: Path = FOLDER) -> Path | None:
    """The archive of this key, if it has the size in its name: Java crashes in a shorter file."""
    for path in folder.glob(f"{key}-*.jsa"):
        if path.stem == f"{key}-{path.stat().st_size}":
            return path
    return None


def make(key: str, folder: Path = FOLDER) -> Path | None:
    """Make the archive of this key unless it is there; one process makes it, others wait.

    It gets its name after a Java has mapped it and verified its checksums.
    """
    # Java archives no classes while a folder of the class path has files: so not `pyspark/conf`.
    (folder / "conf").mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (found := find(key, folder)) is not None:
            return found
        for path in folder.glob("*.jsa"):
            path.unlink()
        new = folder / "new.jsa"
        with tempfile.TemporaryDirectory() as out:
            program = [sys.executable, "-c", PROGRAM, out]
            code = _run(program, folder, f"-XX:ArchiveClassesAtExit={new} {QUIET}")
        if code == 0 and new.exists() and is_mapped(new, folder):
            return new.rename(folder / f"{key}-{new.stat().st_size}.jsa")
        new.unlink(missing_ok=True)
        return None


def is_mapped(archive: Path, folder: Path = FOLDER) -> bool:
    """Whether a Java takes Spark's classes from this archive, after it verified the checksums."""
    import pyspark

    submit = str(Path(pyspark.__file__).parent / "bin" / "spark-submit")
    with tempfile.TemporaryDirectory() as out:
        log = Path(out, "classes.txt")
        words = f"-XX:SharedArchiveFile={archive} -XX:+UnlockDiagnosticVMOptions"
        words += f" -XX:+VerifySharedSpaces {QUIET} -Xlog:class+load:file={log}"
        # A file that is cut off ends Java here.
        words += f" -XX:ErrorFile={out}/crash.txt -XX:-CreateCoredumpOnCrash"
        code = _run([submit, "--version"], folder, words)
        lines = log.read_text("utf-8").splitlines() if log.exists() else []
    shared = "org.apache.spark.deploy.SparkSubmit source: shared objects file (top)"
    return code == 0 and any(shared in line for line in lines)


@functools.cache
def key_of() -> str | None:
    """A hash of all that needs an archive of its own; None without Spark or a Java."""
    java = find_java()
    try:
        import pyspark
    except ImportError:
        return None
    if java is None:
        return None
    jars = Path(pyspark.__file__).parent / "jars"
    files = [path for path in (Path(java, "release"), *sorted(jars.glob("*.jar"))) if path.exists()]
    facts = [f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files]
    return hashlib.sha256("\n".join([PROGRAM, *facts]).encode()).hexdigest()[:16]


_PATHS: Final = os.pathsep.join((str(ROOT), str(ROOT / "src")))


def _run(command: list[str], folder: Path, java_options: str) -> int:
    java = find_java()
    assert java is not None
    environment = {
        **os.environ,
        "JAVA_HOME": java,
        "PYTHONPATH": _PATHS,
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_CONF_DIR": str(folder / "conf"),
        "SPARK_SUBMIT_OPTS": f"{QUICK} {java_options}",
    }
    quiet = subprocess.DEVNULL
    return subprocess.run(
        command, cwd=folder, env=environment, stdin=quiet, stdout=quiet, stderr=quiet, check=False
    ).returncode


if __name__ == "__main__":
    KEY = key_of()
    sys.exit(KEY is None or make(KEY) is None)
