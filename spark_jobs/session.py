"""A Spark session for jobs, and the search for Java, with a message that says what to install.

Jobs run under `spark-submit` or alone. Only without `spark-submit`, this module makes a session, on
this machine's cores, with the source registered.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

NO_JAVA: Final = (
    "Spark needs Java 17 or newer, and none was found in JAVA_HOME, in PATH or in ~/.jdk. "
    "On Debian or Ubuntu: apt-get install openjdk-17-jre-headless. Without root: "
    "pip install install-jdk, then python -c \"import jdk; jdk.install('17')\""
)
# Most of a scan's time is spent in the JVM, which turns Arrow columns into rows. The first option
# switches off Arrow's check of every read, because Spark reads within the given lengths. The
# parallel collector uses less processor time than the default one, and its pauses do not matter to
# jobs.
JAVA_OPTIONS: Final = (
    "-Darrow.enable_unsafe_memory_access=true -Darrow.enable_null_check_for_get=false "
    "-XX:+UseParallelGC"
)
TIME_ZONE: Final = "spark.sql.session.timeZone"
# Settings of every session made here, unless spark-submit overrides them: times are computed and
# shown in UTC, and an object with a duplicate field is valid JSON (the last value counts).
DUPLICATES: Final = "spark.sql.variant.allowDuplicateKeys"
ALWAYS: Final = {TIME_ZONE: "UTC", DUPLICATES: "true"}
DEFAULTS: Final = {
    **ALWAYS,
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "8",
    "spark.driver.memory": "2g",
    "spark.driver.extraJavaOptions": JAVA_OPTIONS,
    "spark.executor.extraJavaOptions": JAVA_OPTIONS,
}
_BY_US: Final = "# by topics-server"
_PARENT: Final = str(Path(__file__).resolve().parents[1])


class NoJava(RuntimeError):
    """No Java was found; the message says what to install."""

    def __init__(self) -> None:
        super().__init__(NO_JAVA)


def find_java(environment: dict[str, str] | None = None) -> str | None:
    """The folder of a Java: `JAVA_HOME`, or else that of `java` in `PATH`, or else one in
    `~/.jdk`.
    """
    env = dict(os.environ) if environment is None else environment
    home = env.get("JAVA_HOME")
    if home and os.access(Path(home, "bin", "java"), os.X_OK):
        return home
    found = shutil.which("java", path=env.get("PATH", ""))
    if found is not None:
        return str(Path(found).resolve().parents[1])
    # The folder into which the package `install-jdk` downloads.
    for candidate in sorted(Path(env.get("HOME", "~")).glob(".jdk/*"), reverse=True):
        if os.access(candidate / "bin" / "java", os.X_OK):
            return str(candidate)
    return None


def spark_session(
    name: str, *, master: str | None = None, config: dict[str, str] | None = None
) -> Any:
    """The running session, or a new one in UTC with the source registered. Raises `NoJava`.

    In an existing session this only registers the source: `master`, `config` and the defaults apply
    to a new session. Without `master`, a new session uses that of `spark-submit`, or else all cores
    of this machine.
    """
    from pyspark.sql import SparkSession

    from spark_jobs.datasource import TopicsDataSource, register

    running = SparkSession.getActiveSession()
    if running is not None:
        running.dataSource.register(TopicsDataSource)
        return running
    java = find_java()
    if java is None:
        raise NoJava
    os.environ["JAVA_HOME"] = java
    # Workers are separate processes, which must find this package on the same path.
    paths = [_PARENT, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    # set by spark-submit, which takes precedence
    is_submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    builder = SparkSession.builder.appName(name)
    if is_submitted:
        submitted = _submitted_keys()
        defaults = {key: value for key, value in ALWAYS.items() if key not in submitted}
    else:
        defaults = DEFAULTS
        builder = builder.master(master or "local[*]")
        if (master or "local").startswith("local"):
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    for key, value in {**defaults, **(config or {})}.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    register(spark)
    return spark


def _submitted_keys() -> set[str]:
    """The keys that spark-submit sets."""
    from pyspark import SparkConf, SparkContext

    SparkContext._ensure_initialized()
    return {key for key, _ in SparkConf().getAll()}


def is_running() -> bool:
    """Whether this process has a session already; a job must not stop it."""
    from pyspark.sql import SparkSession

    return SparkSession.getActiveSession() is not None


def set_worker_python(folder: Path | None = None) -> Path:
    """Make Spark of this environment start its Python workers with this interpreter.

    Spark starts `python3` of PATH unless PYSPARK_PYTHON is set. Under `.venv/bin/python`, without
    an activated environment, `python3` is another Python, which has neither Spark nor this source,
    so that `format("topics")` is "not found". Spark reads `conf/spark-env.sh` of its own folder at
    start, so this function writes the variable's default there. `folder`: that of PySpark (this
    environment's).
    """
    import pyspark

    home = Path(pyspark.__file__).parent if folder is None else folder
    (home / "conf").mkdir(exist_ok=True)
    file = home / "conf" / "spark-env.sh"
    kept = [line for line in _lines_of(file) if not line.endswith(_BY_US)]
    default = shlex.quote(sys.executable)
    line = f'[ -n "${{PYSPARK_PYTHON-}}" ] || export PYSPARK_PYTHON={default} {_BY_US}'
    file.write_text("\n".join([*kept, line, ""]), "utf-8")
    return file


def _lines_of(file: Path) -> list[str]:
    return file.read_text("utf-8").splitlines() if file.exists() else []


def _show_java() -> int:
    java = find_java()
    if java is None:
        sys.stderr.write(NO_JAVA + "\n")
        return 1
    command = [str(Path(java, "bin", "java")), "-version"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    sys.stdout.write(f"Java: {shown.stderr.splitlines()[0] if shown.stderr else java}\n")
    return shown.returncode


if __name__ == "__main__":
    if sys.argv[1:] == ["--set-worker-python"]:
        sys.stdout.write(f"Python of Spark's workers: {set_worker_python()}\n")
    sys.exit(_show_java())
