"""Draws routers as a tree or as a Graphviz DOT graph.

A topic whose branches were already shown (in a cycle, or fed by several routers) is not expanded
again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec


class Reason(msgspec.Struct, frozen=True):
    """Why a router is stalled."""

    code: str


class Edge(msgspec.Struct, frozen=True):
    """A router, from the answer with its state."""

    router: str
    source: str
    dest: str
    filter: tuple[str, str, str] | None = None
    guarantee: str = "at_least_once"
    lag: int = 0
    state: str = "running"
    reason: Reason | None = None

    @property
    def is_stalled(self) -> bool:
        """Whether the router is stalled."""
        return self.state == "stalled"

    def notes(self) -> list[str]:
        """Short remarks about the router, with its name if that is not the default name."""
        said = [] if self.router == f"{self.source}->{self.dest}" else [self.router]
        if self.filter is not None:
            _, operator, value = self.filter
            # As JSON, because a tag may contain control characters of a terminal or DOT syntax.
            text = msgspec.json.encode(value.removesuffix("*") if operator == "Glob" else value)
            said.append(f"tag {text.decode()}{'*' if operator == 'Glob' else ''}")
        if self.guarantee != "at_least_once":
            said.append(self.guarantee)
        if self.is_stalled:
            said.append("stalled" if self.reason is None else f"stalled: {self.reason.code}")
        if self.lag:
            said.append(f"lag {self.lag}")
        return said


def tree(edges: Iterable[Edge]) -> Iterator[str]:
    """The lines of a tree; topics without an incoming router are at the left."""
    below: dict[str, list[Edge]] = {}
    fed: set[str] = set()
    for edge in sorted(edges, key=lambda edge: (edge.dest, edge.router)):
        below.setdefault(edge.source, []).append(edge)
        fed.add(edge.dest)
    shown: set[str] = set()
    # Cycles have no beginning: each remaining cycle begins with its first name.
    for root in (*sorted(set(below) - fed), *sorted(set(below) & fed)):
        if root not in shown:
            shown.add(root)
            yield root
            yield from _branches(root, below, shown)


def _branches(root: str, below: dict[str, list[Edge]], shown: set[str]) -> Iterator[str]:
    # A loop and not recursion: chains may be longer than Python's stack.
    open_branches = [("", iter(_last_marked(below[root])))]
    while open_branches:
        indent, rest = open_branches[-1]
        step = next(rest, None)
        if step is None:
            open_branches.pop()
            continue
        edge, is_last = step
        notes = ", ".join(edge.notes())
        again = edge.dest in shown and edge.dest in below
        line = f"{indent}{'└── ' if is_last else '├── '}{edge.dest}"
        yield line + (f"  ({notes})" if notes else "") + ("  (above)" if again else "")
        if edge.dest in below and not again:
            shown.add(edge.dest)
            deeper = indent + ("    " if is_last else "│   ")
            open_branches.append((deeper, iter(_last_marked(below[edge.dest]))))


def _last_marked(edges: list[Edge]) -> list[tuple[Edge, bool]]:
    return [(edge, edge is edges[-1]) for edge in edges]


def dot(edges: Iterable[Edge]) -> Iterator[str]:
    """The lines of a directed graph; stalled routers are red."""
    yield "digraph routers {"
    yield "  rankdir=LR;"
    yield "  node [shape=box];"
    for edge in edges:
        notes = ", ".join(edge.notes())
        attributes = [f"label={_quoted(notes)}"] if notes else []
        if edge.is_stalled:
            attributes += ["color=red", "fontcolor=red"]
        marks = f" [{', '.join(attributes)}]" if attributes else ""
        yield f"  {_quoted(edge.source)} -> {_quoted(edge.dest)}{marks};"
    yield "}"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
