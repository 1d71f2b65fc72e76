"""Builds the documentation site strictly, and checks it: `python website/build.py`.

The pages are copied as they lie in the repository, so their links hold here as they do there. A
link to a folder leads to its README, or is plain text. The check follows every link and anchor,
refuses what other hosts would have to send, and counts the clicks to the answers of ten questions.
"""

from __future__ import annotations

import html.parser
import os
import re
import shutil
import subprocess
import sys
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

ROOT: Final = Path(__file__).resolve().parents[1]
SITE: Final = ROOT / ".site"
SOURCE: Final = SITE / "source"
HTML: Final = SITE / "html"
COPIED: Final = """README.md CONTRIBUTING.md CHANGELOG.md LICENSE .env.example docs examples clients
    docker""".split()
# A page with such a name would take the place of the README beside it.
LEFT_OUT: Final = tuple(
    str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("examples/*/index.html"))
)
CLICKS_MAX: Final = 2
# A question, the page that answers it, and words of the answer. Navigation does not count.
QUESTIONS: Final = {
    "How do I follow a topic as records come?": ("docs/RECIPES/", "topics tail"),
    "How do I read only some records?": ("docs/READS/", "filter"),
    "How do I back it up?": ("docs/BACKUP/", "topics backup"),
    "How do I secure it?": ("docs/OPERATIONS/", "TOPICS_API_KEYS"),
    "How does it scale?": ("docs/SCALING/", "a second"),
    "How do I delete a user's data?": ("docs/RECIPES/", "--tag-prefix user:7:"),
    "How do I run delayed jobs?": ("docs/RECIPES/", "--delay 10m"),
    "How does a browser resume?": ("clients/js/", "webStore"),
    "How do I query the current state?": ("docs/VIEWS/", "after=SEQ"),
    "How do I move from Redis?": ("docs/RECIPES/", "XREADGROUP"),
}
LINK: Final = re.compile(r"\[([^\]\n]+)\]\(([^)#:\s]+)(#[^)\s]*)?\)")


def copy_pages() -> None:
    """Make `SOURCE` anew."""
    shutil.rmtree(SITE, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__", "secrets", "tls")
    for name in COPIED:
        here, there = ROOT / name, SOURCE / name
        there.parent.mkdir(parents=True, exist_ok=True)
        if here.is_dir():
            shutil.copytree(here, there, ignore=ignored)
        else:
            shutil.copyfile(here, there)
    for name in LEFT_OUT:
        (SOURCE / name).unlink()
    for page in [path for path in SOURCE.rglob("*.md") if path.is_file()]:
        folder = ROOT / page.parent.relative_to(SOURCE)
        text = page.read_text("utf-8")
        page.write_text(LINK.sub(partial(leading, folder), text), "utf-8")


def leading(folder: Path, match: re.Match[str]) -> str:
    """A link of a page in this folder of the repository, as it is on the site.

    A file that only links name is copied.
    """
    words, link, anchor = match[1], match[2], match[3] or ""
    target = (folder / link).resolve()
    if not target.is_relative_to(ROOT):
        return match[0]
    if target.is_dir():
        has_readme = (target / "README.md").exists() and target != ROOT
        return f"[{words}]({link.rstrip('/')}/README.md)" if has_readme else words
    there = SOURCE / target.relative_to(ROOT)
    if target.is_file() and not there.exists() and target not in {ROOT / name for name in LEFT_OUT}:
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(target, there)
    return f"[{words}]({link}{anchor})"


class PageReader(html.parser.HTMLParser):
    """The anchors, links, loaded files and text of a page; `links` has those of its content."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.all_links: list[str] = []
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.text = ""
        self._depth = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what a tag names."""
        values = {name: value or "" for name, value in attrs}
        if "id" in values:
            self.ids.add(values["id"])
        if tag == "article":
            self._depth += 1
        if tag == "a" and "href" in values:
            self.all_links.append(values["href"])
            if self._depth:
                self.links.append(values["href"])
        if tag in ("script", "img", "iframe", "source") and "src" in values:
            self.loaded.append(values["src"])
        if tag == "link" and values.get("rel") in ("stylesheet", "icon", "preload"):
            self.loaded.append(values["href"])

    def handle_data(self, data: str) -> None:
        """Note the text."""
        self.text += data

    def handle_endtag(self, tag: str) -> None:
        """Leave the content."""
        if tag == "article":
            self._depth -= 1


def read_site() -> dict[str, PageReader]:
    """Every page of the site by its address; the front page is ``."""
    pages: dict[str, PageReader] = {}
    for path in HTML.rglob("*.html"):
        address = path.relative_to(HTML).as_posix()
        if address == "404.html" or (address.startswith("examples/") and "index" not in path.name):
            continue
        reader = PageReader()
        reader.feed(path.read_text("utf-8"))
        pages[address.removesuffix("index.html")] = reader
    return pages


def target_of(address: str, link: str) -> tuple[str, str] | None:
    """The address and anchor that a link of a page leads to; None for another host."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return None
    path, anchor = urldefrag(urljoin(f"/{address}", link))
    return unquote(path).lstrip("/"), unquote(anchor)


def broken_links(pages: dict[str, PageReader]) -> list[str]:
    """Links, anchors and files that are not there, and files of other hosts."""
    problems: list[str] = []
    for address, page in pages.items():
        for link in [*page.all_links, *page.loaded]:
            target = target_of(address, link)
            if target is None:
                if link in page.loaded and not link.startswith("data:"):
                    problems.append(f"/{address} loads {link} from another host")
                continue
            path, anchor = target
            if path in pages:
                if anchor and anchor not in pages[path].ids:
                    problems.append(f"/{address}: {link}: there is no such section")
            elif not (HTML / path).is_file() and not (HTML / path / "index.html").is_file():
                problems.append(f"/{address}: {link}: there is no such page")
    return problems


def clicks(pages: dict[str, PageReader]) -> dict[str, int]:
    """How many links of contents lead from the front page to each page."""
    found = {"": 0}
    waiting = deque([""])
    while waiting:
        address = waiting.popleft()
        for link in pages[address].links:
            target = target_of(address, link)
            if target is not None and target[0] in pages and target[0] not in found:
                found[target[0]] = found[address] + 1
                waiting.append(target[0])
    return found


def unanswered(pages: dict[str, PageReader]) -> list[str]:
    """Questions whose answer is not there, or too far away."""
    problems: list[str] = []
    far = clicks(pages)
    for question, (address, words) in QUESTIONS.items():
        if address not in pages or words not in pages[address].text:
            problems.append(f"{question} There is no {words!r} on /{address}")
        elif far.get(address, CLICKS_MAX + 1) > CLICKS_MAX:
            problems.append(f"{question} /{address} is {far.get(address)} clicks away")
        else:
            sys.stdout.write(f"{far[address]} clicks: {question}\n")
    return problems


def main() -> int:
    """Build and check; the exit code is the result."""
    began = time.monotonic()
    copy_pages()
    config = Path(__file__).with_name("mkdocs.yml")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", str(config)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    if subprocess.run(command, env=env, check=False).returncode:
        return 1
    pages = read_site()
    problems = [*broken_links(pages), *unanswered(pages)]
    for problem in problems:
        sys.stderr.write(f"{problem}\n")
    links = sum(len(page.all_links) for page in pages.values())
    took = time.monotonic() - began
    sys.stdout.write(f"{len(pages)} pages, {links} links in {took:.0f} s: {HTML}/index.html\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
