"""Sixty-four clients decide under conditions while the server is killed."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from tests.contract.driver import Server
from tests.crash.conditions.deciders import Deciders, judge, prepare
from tests.ports import lasting_port

CLIENTS = 64


async def _decide_over_kills(server: Server, deciders: Deciders, rounds: int, kills: int) -> None:
    running = asyncio.create_task(deciders.run())
    try:
        for kill in range(1, kills + 1):
            due = rounds * kill // (kills + 1)
            reaching = asyncio.create_task(deciders.until(due))
            await asyncio.wait((running, reaching), return_when=asyncio.FIRST_COMPLETED)
            reaching.cancel()
            await asyncio.to_thread(server.crash)
        await running
    finally:
        running.cancel()


def _decided(server: Server, rounds: int, kills: int, seed: int) -> Deciders:
    api = server.start()
    prepare(api)
    deciders = Deciders(api.url, CLIENTS, rounds, seed)
    asyncio.run(_decide_over_kills(server, deciders, rounds, kills))
    return deciders


@pytest.mark.crash
@pytest.mark.timeout(0)
def test_what_many_clients_decide_holds_over_kills(
    tmp_path: Path, decisions: int, kills: int, first_seed: int
) -> None:
    """In `--decisions` attempts every refusal has a conflict, and the replay breaks no rule."""
    server = Server(tmp_path, {"TOPICS_PORT": str(lasting_port())})
    try:
        deciders = _decided(server, decisions, kills, first_seed)
        accepted, refused = judge(server, deciders)
    finally:
        server.stop()
    print(f"\n{accepted} decisions accepted, {refused} refused, {kills} kills")
    assert accepted + refused >= decisions
    assert refused
    assert accepted >= 0.3 * (accepted + refused)


@pytest.mark.crash
@pytest.mark.timeout(0)
def test_the_judge_notices_a_server_that_checks_nothing(tmp_path: Path, first_seed: int) -> None:
    unchecked = str(Path(__file__).with_name("unchecked.py"))
    server = Server(tmp_path, {"TOPICS_PORT": str(lasting_port())})
    server.command = (sys.executable, unchecked, "serve")
    try:
        deciders = _decided(server, 300, 0, first_seed)
        with pytest.raises(AssertionError, match=r"was given|overdrawn|conflicts with"):
            judge(server, deciders)
    finally:
        server.stop()
