"""A server that takes every condition as met: the judge of the deciders must notice it."""

from __future__ import annotations

from topics_server.__main__ import main
from topics_server.engine.topic.topic import Topic
from topics_server.engine.topic.writes.condition import ConditionCheck


def _take_as_met(_check: ConditionCheck, _topic: Topic, _now_ms: int) -> None:
    return


ConditionCheck.decide = _take_as_met  # type: ignore[method-assign, assignment]

if __name__ == "__main__":
    main()
