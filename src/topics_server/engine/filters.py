"""Filters on the tag and the node of a record. Pure.

A filter is a tree: leaves compare the tag or the node, inner nodes combine. Records without a tag
match no leaf on tags, so `Not` of one matches them. `Matcher` decides rows of blocks in memory;
sealed segments are searched through their index (`engine/read/filtered`). Requests are parsed in
`api/messages/filters`.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from topics_server.values.model import TagMatch


class TagLeaf(msgspec.Struct, frozen=True):
    """A record whose tag matches one of these."""

    matches: tuple[TagMatch, ...]


class NodeLeaf(msgspec.Struct, frozen=True):
    """A record whose node is one of these."""

    nodes: frozenset[str]


class AnyOf(msgspec.Struct, frozen=True):
    """A record that one of the parts matches."""

    parts: tuple[Filter, ...]


class AllOf(msgspec.Struct, frozen=True):
    """A record that every part matches."""

    parts: tuple[Filter, ...]


class Not(msgspec.Struct, frozen=True):
    """A record that the part does not match."""

    part: Filter


Filter = TagLeaf | NodeLeaf | AnyOf | AllOf | Not


def matches(wanted: Filter, tag: str | None, node: str | None) -> bool:
    """Whether a record with this tag and node passes the filter."""
    match wanted:
        case TagLeaf(found):
            return any(leaf.matches(tag) for leaf in found)
        case NodeLeaf(nodes):
            return node in nodes
        case AnyOf(parts):
            return any(matches(part, tag, node) for part in parts)
        case AllOf(parts):
            return all(matches(part, tag, node) for part in parts)
        case Not(part):
            return not matches(part, tag, node)


def has_node(wanted: Filter) -> bool:
    """Whether a leaf looks at the node."""
    match wanted:
        case NodeLeaf():
            return True
        case AnyOf(parts) | AllOf(parts):
            return any(map(has_node, parts))
        case Not(part):
            return has_node(part)
        case _:
            return False


def leaves_of(wanted: Filter) -> Iterator[TagLeaf | NodeLeaf]:
    """Every leaf, from left to right."""
    match wanted:
        case TagLeaf() | NodeLeaf():
            yield wanted
        case AnyOf(parts) | AllOf(parts):
            for part in parts:
                yield from leaves_of(part)
        case Not(part):
            yield from leaves_of(part)


def tags_of(wanted: Filter) -> tuple[TagMatch, ...] | None:
    """Matches one of which every record that passes has; None if there are none.

    So a record whose tag is none of them need not be looked at.
    """
    match wanted:
        case TagLeaf(found):
            return found
        case AnyOf(parts):
            every = [tags_of(part) for part in parts]
            named = [found for found in every if found is not None]
            return sum(named, ()) if len(named) == len(every) else None
        case AllOf(parts):
            some = [each for each in map(tags_of, parts) if each is not None]
            return min(some, key=len, default=None)
        case _:
            return None


class Matcher:
    """Decides records by their labels; each pair of labels is evaluated once.

    Topics have few labels and many records. Beyond `_KNOWN_MAX` pairs all are forgotten. Matchers
    of equal filters are equal, and their hash costs nothing.
    """

    _KNOWN_MAX = 4096

    def __init__(self, wanted: Filter) -> None:
        self.wanted = wanted
        self._has_node = has_node(wanted)
        self._hash = hash(wanted)
        self.tags = tags_of(wanted)
        self._known: dict[tuple[str | None, str | None], bool] = {}

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Matcher) and self.wanted == other.wanted)

    def __call__(self, tag: str | None, node: str | None) -> bool:
        """Whether a record with these labels passes."""
        labels = tag, node if self._has_node else None
        found = self._known.get(labels)
        if found is None:
            if len(self._known) >= self._KNOWN_MAX:
                self._known.clear()
            found = self._known[labels] = matches(self.wanted, *labels)
        return found
