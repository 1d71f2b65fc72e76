"""An archive whose server's clock is set, and records that must not be in it."""

from __future__ import annotations

import asyncio

from tests.model.archive.archived import ARCHIVE, Archived, at_time
from topics_server.archive.continuous.bases import ArchiveBases
from topics_server.values.appends import decode_append
from topics_server.values.entries import RecordsAppended
from topics_server.values.model import Durability, TopicConfig

YEAR_MS = 365 * 24 * 3_600_000
SECRET = b"only-in-memory"


def test_a_clock_that_was_a_year_ahead_keeps_no_base_back() -> None:
    made = Archived(7, archive_base_interval_ms=2_000)
    with made.world.life(7):
        made.start()
        run = made.world.run
        run(made.put_topics())
        run(made.load(10))
        run(made.settle())
        bases = made.archiver.metrics().bases
        made.world.clock.step(YEAR_MS)
        run(made.load(10))
        run(made.settle(bases + 1))
        assert made.archiver.metrics().base_ts_ms > made.world.clock.now_ms() - YEAR_MS // 2
        made.world.clock.step(-YEAR_MS)
        bases = made.archiver.metrics().bases
        lags = []

        async def lasting() -> None:
            for _ in range(20):
                await made.append("a", 1)
                lags.append(made.archiver.metrics().lag_s)
                await asyncio.sleep(0.5)

        run(lasting())
        run(made.settle(bases + 1))
        assert min(lags) >= 0
        assert max(lags) < 60
        # Times of parts never go back, and a restore of the newest one has everything.
        history = made.history()
        times = [history.facts(number).ts_ms for number in history.numbers()]
        assert times == sorted(times)
        expected, heads = made.records(), made.heads()
        made.world.crash("kill")
        made.restored("restored", at_time(times[-1]))
        made.world.start()
        made.check_records(expected, heads)


def test_payloads_of_ephemeral_topics_are_nowhere_in_an_archive() -> None:
    made = Archived(8, archive_base_interval_ms=1_500)
    with made.world.life(8):
        made.start()
        run = made.world.run
        run(made.put_topics())
        config = TopicConfig(durability=Durability.EPHEMERAL)
        run(made.store.put_topic("soft", config, keep_type=False))
        for _ in range(4):
            body = b'{"records":[{"data":"%s","meta":{"m":"%s"}}]}' % (SECRET, SECRET)
            run(made.store.append("soft", body, decode_append(body), header_key=None, config=None))
            run(made.load(6))
            run(made.settle())
        found = made.records()["soft"]
        assert len(found) == 4
        node = made.world.node
        assert node is not None
        run(node.checkpointer.take())
        bases = made.archiver.metrics().bases
        run(asyncio.sleep(2))
        run(made.append("a", 1))
        run(made.settle(bases + 1))
        history = made.history()
        entries = [entry for n in history.numbers() for _, entry in history.part(n)[1]]
        for base in ArchiveBases(made.folder, history).all()[0]:
            entries += [entry for _, entry in base.backup.entries()]
        bodies = [bytes(each.body) for each in entries if isinstance(each, RecordsAppended)]
        assert bodies
        assert not [body for body in bodies if SECRET in body]
        files = made.world.disk._files
        objects = [path for path in files if path.startswith(f"{ARCHIVE}/")]
        assert not [path for path in objects if SECRET in made.world.disk.content(path)]
        assert any(b"t1" in made.world.disk.content(path) for path in objects)
