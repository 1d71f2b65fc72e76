"""Routers in a dict: just enough for tests of the API itself.

Topics are those of a `FakeStore`; no record is forwarded. The next `put` raises `trouble`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tests.api.fake_store import FakeStore, FakeTopic
from topics_server.values.errors import Code, TopicsError
from topics_server.values.model import RouterDefinition, TopicConfig
from topics_server.values.router_answers import (
    RouterListPage,
    RouterOutcome,
    RouterSpec,
    RouterState,
)


@dataclasses.dataclass
class FakeRouters:
    store: FakeStore
    routers: dict[str, RouterState] = dataclasses.field(default_factory=dict)
    specs: list[RouterSpec] = dataclasses.field(default_factory=list)
    trouble: Exception | None = None

    async def put(self, name: str, spec: RouterSpec) -> RouterOutcome:
        self.specs.append(spec)
        if self.trouble is not None:
            trouble, self.trouble = self.trouble, None
            raise trouble
        created = name not in self.routers
        for topic in (spec.definition.source, spec.definition.dest):
            self.store.topics.setdefault(topic, FakeTopic(TopicConfig()))
        self.routers[name] = RouterState(name, spec.definition, 7, 9, 2)
        return RouterOutcome(created, spec.definition, 0.25, 0.5)

    def add(self, name: str, source: str, dest: str, reason: tuple[str, str] | None = None) -> None:
        """Add a router before the test begins."""
        definition = RouterDefinition(source, dest)
        self.routers[name] = RouterState(name, definition, 7, 9, 2, reason)

    def get(self, name: str) -> RouterState:
        if name not in self.routers:
            raise TopicsError(Code.ROUTER_NOT_FOUND, f"no {name}", {"router": name})
        return self.routers[name]

    def page(
        self,
        *,
        prefix: str,
        source: str | None,
        dest: str | None,
        after: str | None,
        page_size: int,
        may_name: Callable[[str], bool] | None = None,
    ) -> RouterListPage:
        found = [
            state
            for name, state in sorted(self.routers.items())
            if name.startswith(prefix)
            and (after is None or name > after)
            and source in (None, state.definition.source)
            and dest in (None, state.definition.dest)
            and (may_name is None or may_name(name))
        ]
        more = found[page_size - 1].name if len(found) > page_size else None
        return RouterListPage(found[:page_size], more)

    async def delete(self, name: str) -> bool:
        return self.routers.pop(name, None) is not None

    def routers_of(self, topic_name: str) -> list[str]:
        return sorted(
            name
            for name, state in self.routers.items()
            if topic_name in (state.definition.source, state.definition.dest)
        )

    def __len__(self) -> int:
        return len(self.routers)
