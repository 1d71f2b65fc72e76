"""The graph of routers: refused ones would close a cycle or give a destination a second source."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from topics_server.engine.topic.applied import Applied, RouterCursor
from topics_server.engine.topic.registry import Registry
from topics_server.routers.router_table import RouterTable
from topics_server.values.entries import Entry, RouterDeleted, RouterPut, TopicDropped, TopicPut
from topics_server.values.errors import Code, TopicsError
from topics_server.values.model import RouterDefinition, TopicConfig

_TOPICS = ["a", "b", "c", "d", "e"]
_IDS = {name: number for number, name in enumerate(_TOPICS, 1)}
_PUTS = st.tuples(
    st.sampled_from(["r1", "r2", "r3", "r4", "r5", "r6"]),
    st.sampled_from(_TOPICS),
    st.sampled_from(_TOPICS),
    st.booleans(),
).filter(lambda put: put[1] != put[2])
_STEPS = st.lists(_PUTS | st.sampled_from(["r1", "r2", "r3"]), max_size=25)


def _reaches(edges: list[tuple[str, str]], start: str, goal: str) -> bool:
    reached = {start}
    for _ in edges:
        reached |= {dest for source, dest in edges if source in reached}
    return goal in reached


def _refusal(table: RouterTable, name: str, definition: RouterDefinition) -> TopicsError | None:
    try:
        table.check(name, definition)
    except TopicsError as error:
        return error
    return None


def _check_path(path: list[str], edges: list[tuple[str, str]]) -> None:
    source, dest = edges[-1]
    assert path[0] == path[-1] == source
    assert path[1] == dest
    assert all(edge in edges for edge in itertools.pairwise(path))


def _put(table: RouterTable, name: str, definition: RouterDefinition) -> RouterPut:
    known = table.find(name)
    ids = _IDS[definition.source], _IDS[definition.dest]
    is_same = known is not None and (known.source_id, known.dest_id) == ids
    router_id = known.router_id if known is not None and is_same else table.next_router_id
    return RouterPut(router_id, name, 0, definition, *ids, start_seq=0)


def _image(table: RouterTable) -> list[object]:
    return [(r.router_id, r.name, r.definition, r.source_id, r.dest_id) for r in table]


@given(_STEPS)
def test_what_is_let_in_is_what_the_rules_say(steps: list[object]) -> None:
    table = RouterTable()
    model: dict[str, RouterDefinition] = {}
    entries: list[tuple[int, Entry]] = []
    for lsn, step in enumerate(steps, 1):
        entry: Entry
        if isinstance(step, str):
            known = table.find(step)
            if known is None:
                continue
            del model[step]
            entry = RouterDeleted(known.router_id, step, 0)
        else:
            assert isinstance(step, tuple)
            name, source, dest, allow_cycle = step
            definition = RouterDefinition(source, dest, allow_cycle=allow_cycle)
            others = [d for other, d in model.items() if other != name]
            edges = [(d.source, d.dest) for d in others]
            now = model.get(name)
            is_same = now == RouterDefinition(source, dest)
            refusal = None
            if any(d.dest == dest and d.source != source for d in others):
                refusal = Code.TOPIC_EXISTS_INCOMPATIBLE
            elif not allow_cycle and not is_same and _reaches(edges, dest, source):
                refusal = Code.ROUTER_CYCLE
            error = _refusal(table, name, definition)
            assert (error and error.code) is refusal
            if error is not None:
                if refusal is Code.ROUTER_CYCLE:
                    _check_path((error.detail or {})["cycle"], [*edges, (source, dest)])
                continue
            model[name] = definition
            entry = _put(table, name, definition)
        table.apply(lsn, entry)
        entries.append((lsn, entry))
        assert {router.name: router.definition for router in table} == model
        rows, following = table.page(prefix="", source=None, dest=None, after=None, size=100)
        assert ([row.name for row in rows], following) == (sorted(model), None)
        strict = [(d.source, d.dest) for d in model.values() if not d.allow_cycle]
        assert not any(_reaches(strict, dest, source) for source, dest in strict), (
            "hops are counted"
        )
    _check_replay(table, entries)


def _check_replay(table: RouterTable, entries: list[tuple[int, Entry]]) -> None:
    """From any capture on, replay over everything gives the same routers."""
    parts = list(table.capture())
    again = RouterTable()
    for part in parts:
        again.restore(part)
    for lsn, entry in entries:
        again.apply(lsn, entry)
    assert sorted(map(str, _image(again))) == sorted(map(str, _image(table)))
    assert again.sources >= {router.source_id for router in table}
    assert again.next_router_id == table.next_router_id


@given(_STEPS, st.sampled_from(_TOPICS))
def test_a_dropped_topic_takes_its_routers_along(steps: list[object], gone: str) -> None:
    table = RouterTable()
    for lsn, step in enumerate(steps, 1):
        if isinstance(step, tuple):
            definition = RouterDefinition(step[1], step[2], allow_cycle=True)
            if _refusal(table, step[0], definition) is not None:
                continue
            table.apply(lsn, _put(table, step[0], definition))
    expected = [r.name for r in table if gone not in (r.definition.source, r.definition.dest)]
    told: list[str] = []
    table.on_gone = lambda router: told.append(router.name)
    before = len(table)
    names = table.of_topic(_IDS[gone])
    table.observe(99, TopicDropped(_IDS[gone], gone, 0), Applied())
    assert sorted(r.name for r in table) == sorted(expected)
    assert sorted(told) == names
    assert len(table) == before - len(names)


def test_after_replay_no_topic_keeps_the_cursor_of_a_deleted_router() -> None:
    """The router was deleted by an entry, or because its destination does not exist any more."""
    registry, table = Registry(), RouterTable()
    for topic_id, name in enumerate(["a", "b", "c", "d", "e"], 1):
        registry.apply(topic_id, TopicPut(topic_id, name, 1, TopicConfig(), 1))
    topics = list(registry)
    for number, (source, dest) in enumerate([(1, 2), (1, 3), (1, 9), (4, 5)], 1):
        definition = RouterDefinition(f"t{source}", f"t{dest}")
        put = RouterPut(number, f"r{number}", 0, definition, source, dest, start_seq=0)
        table.apply(10 + number, put)
    table.apply(20, RouterDeleted(2, "r2", 0))
    for topic in topics[:2]:
        topic.cursors = {number: RouterCursor(number) for number in (1, 2, 3)}
    topics[4].cursors = {4: RouterCursor(4)}
    table.finish_recovery(registry)
    assert [sorted(topic.cursors) for topic in topics] == [[1], [1], [], [], [4]]
