"""Files vanish while the server runs: no server fails to start from a backup made then."""

from __future__ import annotations

import pytest

from tests.model.backups.backed_up import BackedUp
from topics_server.wal import layout


def sealed(made: BackedUp) -> dict[str, int]:
    """Start a node with two topics that have a sealed segment, and a backup; their ids."""
    made.start()
    run, node = made.world.run, made.world.node
    assert node is not None
    run(made.put_topics())
    for name in ("a", "q"):
        run(made.append(name, 30))
        topic = node.registry.find(name)
        assert topic is not None
        run(node.sealer.tend(topic, force_seal=True))
    run(made.back_up())
    assert made.backups.state.status == "done", made.backups.state
    found = {topic.name: topic.topic_id for topic in node.registry}
    return {name: found[name] for name in ("a", "q")}


@pytest.mark.parametrize("lost", ["manifest", "folder", "all folders", "older copy", "data", "idx"])
def test_a_lost_file_of_a_topic_fails_the_backup_by_name(lost: str) -> None:
    made = BackedUp(1)
    with made.world.life(1):
        topics = sealed(made)
        disk, node = made.world.disk, made.world.node
        assert node is not None
        folder = f"data/{layout.SEGMENTS}"
        of_topic = f"{folder}/{topics['a']}/"
        name = "manifest"
        if lost == "older copy":
            older = bytes(disk._files[f"{of_topic}manifest"].data)
            made.world.run(made.append("a", 30))
            topic = node.registry.find("a")
            assert topic is not None
            made.world.run(node.sealer.tend(topic, force_seal=True))
            disk.put(f"{of_topic}manifest", older)
        else:
            gone = {"manifest": f"{of_topic}manifest", "folder": of_topic, "all folders": folder}
            if lost in ("data", "idx"):
                name = f"{1:010d}.{lost}"
                gone[lost] = of_topic + name
            for path in [path for path in disk._files if path.startswith(gone[lost])]:
                disk.lose(path)
        made.world.run(made.back_up())
        assert made.backups.state.status == "failed"
        assert of_topic + name in str(made.backups.state.reason)
        assert made.repository().numbers() == [1]
        made.world.abandon()


def test_a_topic_that_is_dropped_beside_the_backup_is_not_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = BackedUp(2)
    with made.world.life(2):
        sealed(made)
        node = made.world.node
        assert node is not None
        taken = node.checkpointer.take

        async def take_and_drop() -> None:
            await taken()
            await made.store.drop_topic("q", if_empty=False)

        monkeypatch.setattr(node.checkpointer, "take", take_and_drop)
        made.world.run(made.back_up())
        assert made.backups.state.status == "done", made.backups.state
        made.world.crash("kill")
        facts = made.restore("restored")
        made.world.start()
        assert "q" not in made.records()
        made.check(facts)
