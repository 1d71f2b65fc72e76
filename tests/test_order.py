"""The longest files run first."""

from __future__ import annotations

from tests.order import ROOT, SECONDS, weights


def test_every_file_with_a_weight_is_there() -> None:
    assert [name for name in SECONDS if not (ROOT / name).is_file()] == []
    assert list(SECONDS.values()) == sorted(SECONDS.values(), reverse=True)


def test_a_known_file_weighs_what_it_takes_and_a_slow_one_more_than_others() -> None:
    class Item:
        def __init__(self, name: str, is_slow: bool) -> None:
            self.path = ROOT / name
            self.is_slow = is_slow

        def get_closest_marker(self, name: str) -> str | None:
            return name if self.is_slow and name == "slow" else None

    known, known_seconds = next(iter(SECONDS.items()))
    items = [Item("a.py", False), Item(known, True), Item("b.py", True), Item("b.py", False)]
    found = weights(items)  # type: ignore[arg-type]
    assert found[ROOT / known] == known_seconds > found[ROOT / "b.py"] > found[ROOT / "a.py"] == 0
