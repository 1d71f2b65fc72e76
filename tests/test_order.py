"""The longest files run first, and one process runs all files of Spark."""

from __future__ import annotations

from pathlib import Path

from tests.order import ROOT, SECONDS, SPARK, FilesTogether, weights


class Item:
    """As much of `pytest.Item` as `weights` needs."""

    def __init__(self, name: str, is_slow: bool = False) -> None:
        self.path = ROOT / name
        self.is_slow = is_slow

    def get_closest_marker(self, name: str) -> str | None:
        return name if self.is_slow and name == "slow" else None


def weights_of(*items: Item) -> dict[Path, int]:
    return weights(items)  # type: ignore[arg-type]


def test_every_file_with_a_weight_is_there() -> None:
    assert [name for name in SECONDS if not (ROOT / name).is_file()] == []
    assert list(SECONDS.values()) == sorted(SECONDS.values(), reverse=True)


def test_a_known_file_weighs_what_it_takes_and_a_slow_one_more_than_others() -> None:
    known, known_seconds = next(iter(SECONDS.items()))
    found = weights_of(Item("a.py"), Item(known, True), Item("b.py", True), Item("b.py"))
    assert found[ROOT / known] == known_seconds > found[ROOT / "b.py"] > found[ROOT / "a.py"] == 0


def test_files_of_spark_come_before_the_longest_file() -> None:
    longest = next(iter(SECONDS))
    found = weights_of(Item(f"{SPARK}/jobs/test_a.py"), Item(f"{SPARK}/test_b.py"), Item(longest))
    assert found[ROOT / SPARK / "jobs/test_a.py"] == found[ROOT / SPARK / "test_b.py"]
    assert found[ROOT / SPARK / "test_b.py"] > found[ROOT / longest]


def test_one_process_gets_all_of_spark_and_whole_files_otherwise() -> None:
    unit_of = FilesTogether.__new__(FilesTogether)._split_scope
    assert unit_of(f"{SPARK}/jobs/test_jobs.py::test_a[x::y]") == SPARK
    assert unit_of(f"{SPARK}/test_export.py::test_c") == SPARK
    assert unit_of("tests/unit/test_a.py::TestD::test_e") == "tests/unit/test_a.py"
    assert unit_of("tests/unit/test_a.py::test_b[tests/spark/]") == "tests/unit/test_a.py"
    assert unit_of("tests/sparkling/test_f.py::test_f") == "tests/sparkling/test_f.py"
