"""The console in a test: opens a panel, presses buttons, fills in dialogs, takes pictures."""

from __future__ import annotations

import base64
import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tests.browser.chromium import Browser, Page
from tests.contract.driver import ROOT, Server, good

FOLDER: Final = ROOT / "src" / "topics_server" / "console"
SCRIPT: Final = "<img src=x onerror='window.ran = true'><script>window.ran = true</script>"
RIGHT_TO_LEFT: Final = "\u202eevil\u202c שלום עולם"
LONG: Final = "x" * 1_000_000
# JavaScript: the text that the page shows.
TEXT: Final = "document.getElementById('main').innerText"
# The folder that the tests write screenshots to; without it they take none.
PICTURES: Final = os.environ.get("TOPICS_TEST_PICTURES")


@contextlib.contextmanager
def console(browser: Browser, server: Server, place: str) -> Iterator[Page]:
    """The console with this panel open; checks at the end that no exception stayed uncaught and no
    hostile content ran.
    """
    with browser.page(f"{server.api.url}/console#/{place}") as page:
        yield page
        assert page.evaluate("window.ran === undefined")
        assert page.exceptions == []


def shows(page: Page, text: str) -> None:
    page.wait(f"{TEXT}.includes({json.dumps(text)})", f"the console shows {text!r}")


def press(page: Page, label: str, within: str = "document") -> None:
    """Press the button with this label."""
    found = (
        f"[...{within}.querySelectorAll('button')].find(b => b.innerText === {json.dumps(label)})"
    )
    page.wait(f"Boolean({found})", f"there is a button {label!r}")
    page.evaluate(f"{found}.click()")


def submit(page: Page, **values: str) -> None:
    """Fill in the dialog that is open, and submit it."""
    page.wait("Boolean(document.querySelector('dialog[open] form'))", "a dialog is open")
    for name, value in values.items():
        inputs = f"document.querySelector('dialog[open] [name={name}]')"
        page.evaluate(f"{inputs}.value = {json.dumps(value)}")
    page.evaluate("document.querySelector('dialog[open] form').requestSubmit()")


def fill(page: Page, **values: str) -> None:
    """Fill in the dialog that is open, submit it, and wait until the console has accepted it."""
    submit(page, **values)
    page.wait("!document.querySelector('dialog[open]')", "the dialog is closed")


def picture(page: Page, name: str, width: int = 1280, *, is_dark: bool = False) -> None:
    """Keep a screenshot if there is a folder for them; in any case check that the page has no
    overflow.
    """
    page.call(
        "Emulation.setEmulatedMedia",
        features=[{"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}],
    )
    page.call(
        "Emulation.setDeviceMetricsOverride",
        width=width,
        height=800,
        deviceScaleFactor=1,
        mobile=width < 600,
    )
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
    if PICTURES:
        data = page.call("Page.captureScreenshot", format="png")["data"]
        (Path(PICTURES) / f"{name}.png").write_bytes(base64.b64decode(data))


def append(server: Server, topic: str, records: list[dict[str, Any]]) -> None:
    good(server.api.append(topic, records))
