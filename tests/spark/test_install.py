"""A new user's first steps: a plain session, missing packages, an export that fails at once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from spark_jobs import export
from spark_jobs.running import installing
from spark_jobs.session import NO_JAVA, find_java, set_worker_python
from tests.contract.driver import ROOT, Server, good
from tests.spark.class_archive import plain_environment
from tests.spark.conftest import HAS_SPARK, INSTALL

PLAIN = """
import sys
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
print("ROWS", spark.read.format("topics").load(sys.argv[1]).count())
"""
# Simulates missing packages, in a process of its own.
WITHOUT = """
import importlib.util, sys
found = importlib.util.find_spec
absent = sys.argv[1].split(",")
importlib.util.find_spec = lambda name, *more: None if name in absent else found(name, *more)
from topics_server.__main__ import main
sys.argv[:2] = ["topics"]
main()
"""


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_plain_session_finds_the_source(server: Server, tmp_path: Path) -> None:
    """`.venv/bin/python` by its path, while `python3` of PATH has neither Spark nor the source.

    `./run spark-setup` has written the default of PYSPARK_PYTHON where Spark looks for it.
    """
    if not HAS_SPARK:
        pytest.skip(f"PySpark is not installed; {INSTALL}")
    java = find_java()
    if java is None:
        pytest.skip(NO_JAVA)
    api = server.start()
    good(api.put("t", {}))
    good(api.append("t", [{"data": n} for n in range(3)]))
    good(api.http.post("/v0/admin/seal"))
    hidden = ("PYSPARK_PYTHON", "PYTHONPATH")
    env = {k: v for k, v in plain_environment().items() if k not in hidden}
    done = subprocess.run(
        [sys.executable, "-c", PLAIN, str(server.data_dir)],
        cwd=tmp_path,
        env={**env, "PATH": "/usr/bin:/bin", "JAVA_HOME": java, "SPARK_LOCAL_IP": "127.0.0.1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "ROWS 3" in done.stdout, done.stderr[-2000:]


def test_the_default_python_is_written_once_and_the_variable_wins(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "spark-env.sh").write_text("export OWN=1\n", "utf-8")
    for _ in range(2):
        file = set_worker_python(tmp_path)
    assert file.read_text("utf-8").count("PYSPARK_PYTHON=") == 1
    for given, expected in (("", sys.executable), ("/other/python", "/other/python")):
        shown = subprocess.run(
            ["sh", "-c", '. "$0"; echo "$OWN $PYSPARK_PYTHON"', str(file)],
            env={"PYSPARK_PYTHON": given} if given else {},
            capture_output=True,
            text=True,
            check=True,
        )
        assert shown.stdout == f"1 {expected}\n"


@pytest.mark.parametrize(
    ("absent", "words", "expected"),
    [
        ("pyspark", ["jobs", "topic_volume", "x"], ["pyspark and pyarrow", "'.[spark]'"]),
        ("pyspark", ["pipeline", "run", "x"], ["pyspark and pyarrow", "./run spark-setup"]),
        ("pyarrow", ["export", "--to", "{out}"], ["pyarrow", "'.[parquet]'"]),
        ("pyarrow", ["export", "--to", "{out}", "--format", "ndjson", "--data-dir", "x"], ["'.["]),
    ],
)
def test_a_missing_package_is_reported_with_its_extra(
    absent: str, words: Sequence[str], expected: Sequence[str], tmp_path: Path
) -> None:
    """The message names the extra and commands of a checkout, and says that no registry has it."""
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, absent, *(each.format(out=out) for each in words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "No registry has topics-server" in done.stderr
    assert "install 'topics-server" not in done.stderr
    for each in expected:
        assert each.replace("'.[spark]'", "[spark]") in done.stderr
    assert not out.exists()


def test_the_extras_hold_what_the_messages_name() -> None:
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    for need, packages in installing.PACKAGES.items():
        extra = {"pictures": "spark"}.get(need, need)
        line = next(each for each in text.splitlines() if each.startswith(f"{extra} = "))
        assert all(f'"{package}>=' in line for package in packages)


def test_an_export_that_fails_leaves_no_folder(server: Server, tmp_path: Path) -> None:
    """The export fails without a server, and for a topic with unreadable records; a folder that
    existed before stays.
    """
    out = tmp_path / "out"
    assert export.main(["--to", str(out), "--url", "http://127.0.0.1:9"]) == 1
    assert not out.exists()
    api = server.start()
    good(api.put("t", {}))
    good(api.append("t", [{"data": "x" * 100} for _ in range(3)]))
    good(api.http.post("/v0/admin/seal"))
    server.stop()
    data = next(server.data_dir.glob("segments/*/*.data"))
    content = bytearray(data.read_bytes())
    content[150] ^= 0xFF
    data.write_bytes(content)
    words = ["--to", str(out), "--data-dir", str(server.data_dir), "--sealed"]
    assert export.main(words) == 1
    assert not out.exists()
    out.mkdir()
    assert export.main(words) == 1
    assert out.is_dir()
    assert not list(out.glob("topic=*"))


def test_a_file_that_cannot_be_written_leaves_no_folder(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full in the middle of the first file."""
    api = server.start()
    good(api.put("t", {}))
    good(api.append("t", [{"data": 1}]))

    def full(*_: object) -> object:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("spark_jobs.exporter.exporting.line_of", full)
    with pytest.raises(OSError, match="No space"):
        export.main(["--to", str(tmp_path / "o"), "--url", api.url, "--format", "ndjson"])
    assert not (tmp_path / "o").exists()
