"""The contract as numbered claims: parses, checks and renders them, and links them to their tests.

Owns the form of `tests/contract/sections/*.toml` and of `docs/CONTRACT.md`. A claim is one sentence
of the contract in our own words; `due` names the part of the project that must satisfy it; `tests`
are the ids of its tests. A test names its claims in the first lines of its docstring, in square
brackets: `Contract §3.3 [3.3-04, S-50]`.

`python -m tests.contract.claims` copies those brackets into the `tests` lists and writes the
document. Everything but `main` is pure except for reading the given files. Called by
`tests/contract/test_claims.py`.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
SECTIONS: Final = ROOT / "tests" / "contract" / "sections"
DOCUMENT: Final = ROOT / "docs" / "CONTRACT.md"

DUE_NAMES: Final = ("store", "live", "queues", "routers", "operate", "streams")
# The parts whose claims must be satisfied now; a later part adds its word here.
DUE: Final = frozenset(DUE_NAMES)

TITLES: Final[Mapping[str, str]] = {
    "0": "Conventions",
    "1": "Topics",
    "2": "Append",
    "3": "Diff",
    "4": "Loop prevention by node",
    "5": "Delete",
    "6": "Routers",
    "7": "Watch and WebSocket",
    "8": "Health, readiness, metrics",
    "9": "Index of endpoints",
    "10": "Queues",
    "11": "Resource limits",
    "12": "Threat model",
    "S": "Settled where the contract is silent",
    "P": "Producer headers",
    "V": "Views, and keys of records",
}
_ID: Final = re.compile(r"(?:\d{1,2}(?:\.\d{1,2}|-ws)?|[SPV])-\d{2,3}")
_BRACKET: Final = re.compile(r"\[([^\]]*)\]")


@dataclass(frozen=True, slots=True)
class Claim:
    """One sentence of the contract: `id`, `section`, `due` word, `text`, ids of its tests."""

    id: str
    section: str
    due: str
    text: str
    tests: tuple[str, ...]


def parse(text: str) -> list[Claim]:
    """The claims of one sections file; raises `ValueError` for a malformed claim."""
    claims = []
    for row in tomllib.loads(text)["claim"]:
        if set(row) != {"id", "section", "due", "text", "tests"}:
            raise ValueError(f"claim {row.get('id')} has fields {sorted(row)}")
        claims.append(
            Claim(row["id"], row["section"], row["due"], row["text"], tuple(row["tests"]))
        )
    return claims


def load(directory: Path = SECTIONS) -> list[Claim]:
    """All claims, in the order of the file names."""
    claims: list[Claim] = []
    for path in sorted(directory.glob("*.toml")):
        claims += parse(path.read_text(encoding="utf-8"))
    return claims


def tests_in(source: str) -> dict[str, str]:
    """Names of the tests in a module (`test_x` or `TestY::test_x`) with their docstrings."""
    found: dict[str, str] = {}

    def walk(body: Sequence[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
                walk(node.body, f"{prefix}{node.name}::")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if node.name.startswith("test"):
                    found[prefix + node.name] = ast.get_docstring(node) or ""
            elif isinstance(node, ast.If | ast.Try):
                walk(node.body, prefix)

    walk(ast.parse(source).body, "")
    return found


def claims_named(docstring: str) -> list[str]:
    """The claim ids that a docstring's brackets name."""
    return [
        word
        for bracket in _BRACKET.findall(docstring)
        for word in re.split(r"[,\s]+", bracket)
        if _ID.fullmatch(word)
    ]


def missing_tests(claims: Iterable[Claim], root: Path = ROOT) -> list[str]:
    """Test ids in claims that no file under `root` defines."""
    cache: dict[str, dict[str, str]] = {}
    missing = []
    for claim in claims:
        for test in claim.tests:
            path, _, name = test.partition("::")
            if path not in cache:
                file = root / path
                cache[path] = tests_in(file.read_text(encoding="utf-8")) if file.is_file() else {}
            if name not in cache[path]:
                missing.append(f"{claim.id}: {test}")
    return missing


def problems(claims: Sequence[Claim]) -> list[str]:
    """The problems of the list itself: duplicate or malformed ids, unknown words, missing text."""
    counts = Counter(claim.id for claim in claims)
    found = [f"{id_}: used {count} times" for id_, count in counts.items() if count > 1]
    for claim in claims:
        if not _ID.fullmatch(claim.id) or claim.id.rpartition("-")[0] != claim.section:
            found.append(f"{claim.id}: does not belong to section {claim.section}")
        if claim.due not in DUE_NAMES:
            found.append(f"{claim.id}: due with {claim.due!r}, which is no part of the project")
        if not claim.text.strip() or "\n" in claim.text:
            found.append(f"{claim.id}: the text is not one line")
        if len(set(claim.tests)) != len(claim.tests):
            found.append(f"{claim.id}: names a test twice")
    return found


def unheld(claims: Iterable[Claim], due: frozenset[str] = DUE) -> list[str]:
    """Claims that are due and name no test."""
    return [f"{c.id}: {c.text}" for c in claims if c.due in due and not c.tests]


def chapter(claim: Claim) -> str:
    """The key of `TITLES` for the claim's section."""
    return re.split(r"[.-]", claim.section)[0]


def render(claims: Sequence[Claim]) -> str:
    """The text of `docs/CONTRACT.md`."""
    held = sum(1 for claim in claims if claim.tests)
    lines = [
        "# The contract, claim by claim",
        "",
        "Generated by `python -m tests.contract.claims` from `tests/contract/sections/`; do not",
        "edit. `due` names the part of the project that holds the claim; a claim that is due now",
        f"({', '.join(sorted(DUE))}) and names no test fails the check.",
        "",
        f"{len(claims)} claims, {held} held. "
        + "; ".join(
            f"{name}: {sum(c.due == name and bool(c.tests) for c in claims)}"
            f" of {sum(c.due == name for c in claims)}"
            for name in DUE_NAMES
        )
        + ".",
    ]
    current = ""
    for claim in claims:
        if chapter(claim) != current:
            current = chapter(claim)
            mark = f"§{current} " if current.isdigit() else ""
            lines += ["", f"## {mark}{TITLES[current]}", ""]
            lines += ["| id | claim | due | held by |", "|---|---|---|---|"]
        tests = "<br>".join(f"`{test.removeprefix('tests/')}`" for test in claim.tests)
        text = claim.text.replace("|", "\\|")
        lines.append(f"| {claim.id} | {text} | {claim.due} | {tests} |")
    return "\n".join(lines) + "\n"


def brackets(root: Path = ROOT) -> dict[str, list[str]]:
    """Claim id → ids of the contract tests whose docstring names it.

    Ids of tests in other folders are written into the sections by hand.
    """
    found: dict[str, list[str]] = {}
    for path in sorted((root / "tests" / "contract").rglob("test_*.py")):
        for name, doc in tests_in(path.read_text(encoding="utf-8")).items():
            for claim in claims_named(doc):
                test = f"{path.relative_to(root).as_posix()}::{name}"
                if test not in found.setdefault(claim, []):
                    found[claim].append(test)
    return found


def link(text: str, named: Mapping[str, Sequence[str]], root: Path = ROOT) -> str:
    """A sections file's text with the bracketed tests added and missing tests removed."""
    rewritten = text
    for claim in parse(text):
        kept = [t for t in claim.tests if not missing_tests([_only(claim, t)], root)]
        tests = kept + [t for t in named.get(claim.id, ()) if t not in kept]
        body = "".join(f'    "{test}",\n' for test in tests)
        value = f"[\n{body}]" if tests else "[]"
        pattern = rf'(id = "{re.escape(claim.id)}"\n(?:.*\n){{3}})tests = \[[^\]]*\]'
        rewritten, count = re.subn(pattern, rf"\g<1>tests = {value}", rewritten)
        assert count == 1, f"{claim.id} is not laid out as id, section, due, text, tests"
    return rewritten


def _only(claim: Claim, test: str) -> Claim:
    return Claim(claim.id, claim.section, claim.due, claim.text, (test,))


def main() -> None:
    """Copy the brackets into the sections, then write the document."""
    named = brackets()
    for path in sorted(SECTIONS.glob("*.toml")):
        path.write_text(link(path.read_text(encoding="utf-8"), named), encoding="utf-8")
    DOCUMENT.parent.mkdir(exist_ok=True)
    DOCUMENT.write_text(render(load()), encoding="utf-8")


if __name__ == "__main__":
    main()
