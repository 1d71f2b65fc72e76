"""The console's panel of consumers in a real browser: their positions, and commands that ask for
confirmation.

The longest names and names of JavaScript's own members stand for hostile ones: the server refuses
every other character.
"""

from __future__ import annotations

import json
from typing import Any, Final

from tests.browser.chromium import Browser, Page
from tests.browser.console_page import append, console, fill, picture, press, shows, submit
from tests.contract.driver import Server, eventually, good

PLACE: Final = "topic/orders/consumers"
LONGEST: Final = "x" * 255


def put(server: Server, consumer: str, start: int | str = "earliest") -> None:
    body = {"from": start}
    good(server.api.http.put(f"/v0/topics/orders/consumers/{consumer}", json=body))


def commit(server: Server, consumer: str, seq: int) -> None:
    good(server.api.http.post(f"/v0/topics/orders/consumers/{consumer}/commit", json={"seq": seq}))


def seq_of(server: Server, consumer: str) -> Any:
    return good(server.api.http.get(f"/v0/topics/orders/consumers/{consumer}"))["seq"]


def cells(page: Page, consumer: str) -> dict[str, str]:
    """The row of a consumer: heads and texts."""
    found: dict[str, str] = page.evaluate(f"""(() => {{
        const row = [...document.querySelectorAll("tbody tr")]
            .find((each) => each.cells[0].textContent === {json.dumps(consumer)});
        const cells = [...row?.cells ?? []];
        return Object.fromEntries(cells.map((cell) => [cell.dataset.head, cell.innerText]));
    }})()""")
    return found


def act(page: Page, label: str) -> None:
    """Press the button that has this accessible name."""
    labelled = json.dumps(f"[aria-label='{label}']")
    button = f"document.querySelector({labelled})"
    page.wait(f"Boolean({button})", f"there is a button {label!r}")
    page.evaluate(f"{button}.click()")


def at(page: Page, consumer: str, seq: int) -> None:
    """Wait until the panel shows the consumer at this position."""
    shown = f"{seq:,}"
    eventually(lambda: cells(page, consumer).get("Position") == shown, f"{consumer} is at {shown}")


def test_the_panel_is_live(browser: Browser, server: Server) -> None:
    append(server, "orders", [{"data": n} for n in range(1_200)])
    put(server, "billing")
    put(server, "search", "head")
    with console(browser, server, PLACE) as page:
        at(page, "billing", 0)
        row = cells(page, "billing")
        assert row["Lag (records)"] == "1,200"
        assert row["Lag (time)"].endswith(("ms", "s"))
        assert cells(page, "search")["Lag (time)"] == "caught up"
        shows(page, "have records to read")
        picture(page, "consumers")
        picture(page, "consumers-dark", is_dark=True)
        picture(page, "consumers-phone", width=390)
        commit(server, "billing", 1_000)
        at(page, "billing", 1_000)
        append(server, "orders", [{"data": n} for n in range(5)])
        eventually(lambda: cells(page, "search").get("Lag (records)") == "5", "search is behind")
        # Another reader's consumer appears by itself.
        put(server, "audit", 7)
        at(page, "audit", 7)


def test_consumers_are_made_moved_and_deleted(browser: Browser, server: Server) -> None:
    append(server, "orders", [{"data": n} for n in range(100)])
    with console(browser, server, PLACE) as page:
        shows(page, "This topic has no consumers")
        press(page, "New consumer")
        fill(page, name="billing", **{"from": "seq"}, seq="40")
        at(page, "billing", 40)
        press(page, "New consumer")
        fill(page, name="billing", **{"from": "head"})
        shows_toast(page, "it stays at 40")

        act(page, "Commit billing")
        submit(page, seq="10")
        page.wait("document.querySelector('.mistake').textContent.includes('Rewind')", "refused")
        fill(page, seq="60")
        at(page, "billing", 60)

        act(page, "Rewind billing")
        submit(page, seq="61")
        page.wait("document.querySelector('.mistake').textContent.includes('Commit')", "refused")
        submit(page, seq="1e9")
        page.wait("document.querySelector('.mistake').textContent.includes('number')", "refused")
        assert seq_of(server, "billing") == 60
        fill(page, seq="0")
        at(page, "billing", 0)

        act(page, "Delete billing")
        submit(page, confirm="bill")
        page.wait("document.querySelector('.mistake').textContent.includes('match')", "refused")
        assert seq_of(server, "billing") == 0
        fill(page, confirm="billing")
        shows(page, "This topic has no consumers")
        found = server.api.http.get("/v0/topics/orders/consumers/billing")
        assert found.status_code == 404


def test_a_commit_that_comes_too_late_is_told(browser: Browser, server: Server) -> None:
    """The reader commits while the console's dialog is open."""
    append(server, "orders", [{"data": n} for n in range(100)])
    put(server, "billing")
    with console(browser, server, PLACE) as page:
        at(page, "billing", 0)
        act(page, "Commit billing")
        page.wait("Boolean(document.querySelector('dialog[open]'))", "the question")
        commit(server, "billing", 90)
        fill(page, seq="50")
        shows_toast(page, "Nothing moved: billing is at 90 already.")
        act(page, "Commit billing")
        fill(page, seq="101")
        shows_toast(page, "above the topic's head, 100")
        assert seq_of(server, "billing") == 90


def test_odd_names_are_names(browser: Browser, server: Server) -> None:
    append(server, "orders", [{"data": 1}])
    for name in ("constructor", "toString", "a:b.c_d-e", LONGEST):
        put(server, name)
    with console(browser, server, PLACE) as page:
        at(page, LONGEST, 0)
        picture(page, "consumers-long-names", width=390)
        for name in ("constructor", "toString", "a:b.c_d-e", LONGEST):
            act(page, f"Commit {name}")
            page.wait("Boolean(document.querySelector('dialog[open]'))", "the question")
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
            fill(page)
            at(page, name, 1)


def key(page: Page, name: str, code: int) -> None:
    """Press a key of the keyboard."""
    text = {"text": "\r"} if name == "Enter" else {}
    for kind in ("keyDown", "keyUp"):
        page.call("Input.dispatchKeyEvent", type=kind, key=name, windowsVirtualKeyCode=code, **text)


def test_the_keyboard_is_enough_and_comes_back_to_its_button(
    browser: Browser, server: Server
) -> None:
    append(server, "orders", [{"data": n} for n in range(10)])
    put(server, "billing")
    focused = "document.activeElement.getAttribute('aria-label')"
    with console(browser, server, PLACE) as page:
        at(page, "billing", 0)
        page.evaluate("document.querySelector('[aria-label=\"Commit billing\"]').focus()")
        key(page, "Enter", 13)
        page.wait("document.activeElement.name === 'seq'", "the question takes the focus")
        # The table is drawn again while the dialog is open.
        page.evaluate("document.querySelector('tbody tr').isOld = true")
        page.wait("!document.querySelector('tbody tr').isOld", "the table is drawn again")
        key(page, "Escape", 27)
        page.wait("!document.querySelector('dialog[open]')", "the question is closed")
        page.wait(f"{focused} === 'Commit billing'", "the button has the focus again")
        assert seq_of(server, "billing") == 0
        key(page, "Enter", 13)
        page.wait("document.activeElement.name === 'seq'", "the question takes the focus")
        key(page, "Enter", 13)
        at(page, "billing", 10)
        page.wait(f"{focused} === 'Commit billing'", "the focus stays")


def shows_toast(page: Page, text: str) -> None:
    """Wait for a message; screen readers read it aloud, because its element has the role
    `status`.
    """
    shown = "document.querySelector('#toasts[role=status]')?.innerText ?? ''"
    page.wait(f"({shown}).includes({json.dumps(text)})", f"the message {text!r}")
