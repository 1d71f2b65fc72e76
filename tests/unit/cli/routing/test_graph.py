"""`cli.routing.graph`: the contents of the pictures of routers, and that drawing ends."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from topics_server.cli.routing.graph import Edge, Reason, dot, tree


def edge(source: str, dest: str, **more: Any) -> Edge:
    return Edge(f"{source}->{dest}", source, dest, **more)


def lines(*edges: Edge) -> list[str]:
    return list(tree(edges))


def test_a_forest_stands_on_what_nothing_is_forwarded_to() -> None:
    assert lines(edge("b", "x"), edge("a", "c"), edge("a", "b"), edge("z", "y")) == [
        "a",
        "├── b",
        "│   └── x",
        "└── c",
        "z",
        "└── y",
    ]


def test_a_router_is_told_by_what_is_not_usual() -> None:
    assert lines(
        edge("a", "b", filter=("tag", "Eq", "x*"), lag=7),
        edge("a", "c", filter=("tag", "Glob", "x:*"), guarantee="exactly_once"),
        edge("a", "d", state="stalled", reason=Reason("topic_full")),
        edge("a", "e", state="stalled"),
        Edge("other", "a", "f"),
    ) == [
        "a",
        '├── b  (tag "x*", lag 7)',
        '├── c  (tag "x:"*, exactly_once)',
        "├── d  (stalled: topic_full)",
        "├── e  (stalled)",
        "└── f  (other)",
    ]


def test_a_circle_is_shown_once() -> None:
    assert lines(edge("b", "a"), edge("a", "b")) == ["a", "└── b", "    └── a  (above)"]
    assert lines(edge("b", "a"), edge("a", "b"), edge("b", "c")) == [
        "a",
        "└── b",
        "    ├── a  (above)",
        "    └── c",
    ]


def test_two_routers_into_one_topic_unfold_it_once() -> None:
    more = Edge("r2", "a", "b", filter=("tag", "Eq", "t"))
    assert lines(edge("a", "b"), more, edge("b", "c")) == [
        "a",
        "├── b",
        "│   └── c",
        '└── b  (r2, tag "t")  (above)',
    ]


def test_no_routers_are_no_lines() -> None:
    assert lines() == []
    assert list(dot([])) == ["digraph routers {", "  rankdir=LR;", "  node [shape=box];", "}"]


def test_a_chain_longer_than_the_stack() -> None:
    found = lines(*(edge(f"t{i:05}", f"t{i + 1:05}") for i in range(5000)))
    assert len(found) == 5001
    assert found[-1].endswith("└── t05000")


def test_any_set_of_routers_is_shown_whole() -> None:
    chance = random.Random(7)
    for _ in range(200):
        names = [f"t{i}" for i in range(chance.randint(2, 8))]
        edges = []
        for number in range(chance.randint(1, 12)):
            source, dest = chance.sample(names, 2)
            edges.append(Edge(f"r{number}", source, dest))
        found = lines(*edges)
        told = re.findall(r"\((r\d+)\)", "\n".join(found))
        assert sorted(told) == sorted(each.router for each in edges)


def test_dot_names_topics_and_marks_what_stands_still() -> None:
    found = list(dot([edge("a", "b"), edge("a", "c", state="stalled", reason=Reason("throttled"))]))
    assert found[3] == '  "a" -> "b";'
    assert found[4] == '  "a" -> "c" [label="stalled: throttled", color=red, fontcolor=red];'


@pytest.mark.parametrize("tag", ["plain", 'a"b', "a\\", "a\nb\x1b[31m", "ä{}->;"])
def test_tags_stay_within_their_quotes(tag: str) -> None:
    (line,) = list(dot([edge("a", "b", filter=("tag", "Eq", tag))]))[3:-1]
    assert re.fullmatch(r'  "a" -> "b" \[label="(?:[^"\\\x00-\x1f]|\\.)*"\];', line)
    assert "\x1b" not in "".join(lines(edge("a", "b", filter=("tag", "Eq", tag))))


def test_every_line_is_a_statement_of_the_language() -> None:
    """The test contains only the used part of Graphviz's grammar, so that it does not need
    Graphviz.
    """
    text = r'"(?:[^"\\\x00-\x1f]|\\.)*"'
    value = rf"(?:{text}|[a-zA-Z]+)"
    listed = rf"\[[a-z]+={value}(?:, [a-z]+={value})*\]"
    statement = re.compile(
        rf"  (?:rankdir=LR|node {listed}|{text}|{text} -> {text}(?: {listed})?);"
    )
    found = list(
        dot(
            [
                edge("a", "b", filter=("tag", "Eq", 'a"\\')),
                edge("b", "a:1", lag=3),
                edge("a", "c", state="stalled", reason=Reason("throttled")),
            ]
        )
    )
    assert (found[0], found[-1]) == ("digraph routers {", "}")
    assert [line for line in found[1:-1] if not statement.fullmatch(line)] == []
    assert sum(" -> " in line for line in found) == 3
