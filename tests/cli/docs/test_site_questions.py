"""Ten fixed questions are answered at most two clicks from the front page of the documentation.

`./run docs` counts the clicks on the built site; this test counts them in the pages of the
repository, which have the same links.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Final

import pytest

from tests.contract.driver import ROOT

LINK: Final = re.compile(r"\[[^\]\n]+\]\(([^)#:\s]+)(?:#[^)\s]*)?\)")
CODE: Final = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def _loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_build", ROOT / "website" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


BUILD: Final = _loaded()


def linked(page: Path) -> Iterator[Path]:
    """The pages that a page links; a link to a folder leads to its README."""
    for link in LINK.findall(CODE.sub("", page.read_text("utf-8"))):
        target = (page.parent / link).resolve()
        target = target / "README.md" if target.is_dir() else target
        if target.suffix == ".md" and target.is_file():
            yield target


def clicks() -> dict[Path, int]:
    """For each page the smallest number of links from the front page to it."""
    start = ROOT / "README.md"
    found = {start: 0}
    waiting = deque([start])
    while waiting:
        page = waiting.popleft()
        for target in linked(page):
            if target not in found:
                found[target] = found[page] + 1
                waiting.append(target)
    return found


def page_of(address: str) -> Path:
    """The page of an address of the site."""
    page = ROOT / f"{address.rstrip('/')}.md"
    return page if page.is_file() else ROOT / address / "README.md"


def test_there_are_ten_questions() -> None:
    assert len(BUILD.QUESTIONS) == 10
    assert BUILD.CLICKS_MAX == 2


@pytest.mark.parametrize("question", BUILD.QUESTIONS)
def test_a_question_is_answered_within_two_clicks(question: str) -> None:
    address, words = BUILD.QUESTIONS[question]
    page = page_of(address)
    assert words in page.read_text("utf-8")
    assert clicks()[page] <= BUILD.CLICKS_MAX


def test_a_page_that_is_too_far_or_without_the_answer_is_told() -> None:
    """The check of the built site can fail."""

    def page(text: str, *links: str) -> object:
        reader = BUILD.PageReader()
        reader.feed(f"<article>{text}{''.join(f'<a href={link!r}>x</a>' for link in links)}")
        return reader

    first, *_ = BUILD.QUESTIONS
    address, words = BUILD.QUESTIONS[first]
    near = {"": page("", "/one/"), "one/": page("", f"/{address}"), address: page(words)}
    far = near | {"one/": page("", "/two/"), "two/": page("", f"/{address}")}
    beside = near | {"one/": page("")}
    assert BUILD.clicks(near)[address] == 2
    assert not [each for each in BUILD.unanswered(near) if first in each]
    for pages in (far, beside, near | {address: page("nothing")}):
        assert [each for each in BUILD.unanswered(pages) if first in each]
