"""A hook of mkdocs: writes `llms.txt`, the list of pages for programs that read text.

Each line has a page of the navigation, its address below the site, and its first sentence.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any


def first_sentence(markdown: str) -> str:
    """The first sentence of the first paragraph, without marks."""
    for block in re.split(r"\n\s*\n", markdown):
        text = " ".join(block.split())
        if text and not re.match(r"    |\s*(?:[#|!<>-]|```|\* )", block):
            plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("`", "").replace("*", "")
            return re.split(r"(?<=[.!?:]) ", plain)[0].rstrip(":")
    return ""


def on_post_build(config: Any, **_: Any) -> None:
    """Write the file beside the pages."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    for entry in config.nav:
        [(title, below)] = entry.items()
        if isinstance(below, str):
            below = [{title: below}]
        else:
            lines += ["", f"## {title}", ""]
        for page in below:
            [(name, path)] = page.items()
            text = (Path(config.docs_dir) / path).read_text("utf-8")
            address = re.sub(r"(README)?\.md$", "", path)
            address = f"{address}/" if address and not address.endswith("/") else address
            lines.append(f"- [{name}]({address or '.'}): {first_sentence(text)}".removesuffix(": "))
    text = "\n".join(lines) + "\n"
    (Path(config.site_dir) / "llms.txt").write_text(text, "utf-8")
