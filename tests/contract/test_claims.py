"""The list of claims is well-formed, due claims have tests, and the document is up to date."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract import claims

ALL = claims.load()


def test_claims_have_unique_well_formed_ids_and_one_line_of_text() -> None:
    assert claims.problems(ALL) == []
    assert len(ALL) >= 300


def test_every_chapter_of_the_contract_has_claims() -> None:
    assert {claims.chapter(claim) for claim in ALL} == set(claims.TITLES)


def test_every_due_claim_names_a_test() -> None:
    assert claims.unheld(ALL) == []


def test_every_named_test_exists() -> None:
    assert claims.missing_tests(ALL) == []


def test_every_claim_named_by_a_docstring_exists_and_names_that_test() -> None:
    tests_of = {claim.id: claim.tests for claim in ALL}
    wrong = [
        f"{test} says {claim}"
        for claim, tests in claims.brackets().items()
        for test in tests
        if test not in tests_of.get(claim, ())
    ]
    assert wrong == []


def test_the_document_is_what_the_claims_generate() -> None:
    written = claims.DOCUMENT.read_text(encoding="utf-8")
    assert written == claims.render(ALL), "run: python -m tests.contract.claims"


def _claim(
    section: str = "2", due: str = "store", text: str = "a", tests: tuple[str, ...] = ()
) -> claims.Claim:
    return claims.Claim("2-01", section, due, text, tests)


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ([_claim(), _claim()], "used 2 times"),
        ([_claim(due="someday")], "no part of the project"),
        ([_claim(section="3")], "does not belong"),
        ([_claim(text=" ")], "not one line"),
        ([_claim(tests=("a.py::b", "a.py::b"))], "twice"),
    ],
)
def test_the_check_finds_a_broken_list(rows: list[claims.Claim], complaint: str) -> None:
    assert any(complaint in problem for problem in claims.problems(rows))


def test_the_check_finds_due_claims_without_tests_and_tests_that_do_not_exist(
    tmp_path: Path,
) -> None:
    (tmp_path / "test_a.py").write_text("class TestB:\n    def test_c(self): ...\n")
    held = _claim(tests=("test_a.py::TestB::test_c",))
    assert claims.unheld([_claim(), held]) == ["2-01: a"]
    assert claims.unheld([_claim(due="streams")], frozenset({"store"})) == []
    assert claims.missing_tests([held], tmp_path) == []
    for gone in ("test_a.py::test_c", "test_b.py::test_c", "test_a.py::TestB::test_d"):
        assert claims.missing_tests([_claim(tests=(gone,))], tmp_path) == [f"2-01: {gone}"]
