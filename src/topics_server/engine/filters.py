"""Filters on the tag and the node of a record. Pure.

A filter is a tree: leaves compare the tag or the node, inner nodes combine. Records without a tag
match no leaf on tags, so they match `Not` of such a leaf. `Matcher` decides rows of blocks in
memory; sealed segments are searched through their index (`engine/read/filtered`). Requests are
parsed in `api/messages/filters`.

`matches` defines the meaning of a filter. `Matcher` gives the same results by sets: 256 tags of one
`In` or `Or` cost as much as one tag.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator

import msgspec

from topics_server.values.model import TagMatch


class TagLeaf(msgspec.Struct, frozen=True, gc=False):
    """Passes a record whose tag matches one of these."""

    matches: tuple[TagMatch, ...]


class NodeLeaf(msgspec.Struct, frozen=True):
    """Passes a record whose node is one of these."""

    nodes: frozenset[str]


class AnyOf(msgspec.Struct, frozen=True):
    """Passes a record that passes one of the parts."""

    parts: tuple[Filter, ...]


class AllOf(msgspec.Struct, frozen=True):
    """Passes a record that passes every part."""

    parts: tuple[Filter, ...]


class Not(msgspec.Struct, frozen=True):
    """Passes a record that does not pass the part."""

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
    """Whether the filter has a leaf on the node."""
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
    """Tag matches of which every passing record has at least one; None if there are none.

    A record whose tag matches none of them need not be examined.
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


Decision = Callable[[str | None, str | None], bool]


class _Labels:
    """Decides whether a record has one of these tags or nodes, by two look-ups."""

    def __init__(self, leaves: Iterable[TagLeaf | NodeLeaf]) -> None:
        matches_: set[TagMatch] = set()
        nodes: set[str] = set()
        for leaf in leaves:
            if isinstance(leaf, TagLeaf):
                matches_.update(leaf.matches)
            else:
                nodes |= leaf.nodes
        self._tags = frozenset(each.text for each in matches_ if not each.is_prefix)
        self._nodes = frozenset(nodes)
        # No prefix in the list begins with another one, so a tag can only begin with the last
        # prefix that sorts before it.
        self._prefixes: list[str] = []
        for prefix in sorted(each.text for each in matches_ if each.is_prefix):
            if not self._prefixes or not prefix.startswith(self._prefixes[-1]):
                self._prefixes.append(prefix)

    def __call__(self, tag: str | None, node: str | None) -> bool:
        if tag is not None:
            if tag in self._tags:
                return True
            at = bisect_right(self._prefixes, tag)
            if at and tag.startswith(self._prefixes[at - 1]):
                return True
        return node in self._nodes


def _compiled(wanted: Filter) -> tuple[Decision, int]:
    """A function that returns what `matches` returns, and how many look-ups it makes at most."""
    match wanted:
        case TagLeaf() | NodeLeaf():
            return _Labels((wanted,)), 1
        case Not(part):
            decide, cost = _compiled(part)
            return lambda tag, node: not decide(tag, node), cost
        case AnyOf(parts):
            leaves = [part for part in parts if isinstance(part, TagLeaf | NodeLeaf)]
            decisions = [(_Labels(leaves), 1)] if leaves else []
            others = [_compiled(part) for part in parts if part not in leaves]
            return _joined(decisions + others, is_any=True)
        case AllOf(parts):
            return _joined([_compiled(part) for part in parts], is_any=False)


def _joined(compiled: list[tuple[Decision, int]], *, is_any: bool) -> tuple[Decision, int]:
    """A decision that returns `is_any` as soon as one of these does, and the sum of their costs."""
    decisions = tuple(decide for decide, _ in compiled)
    if len(decisions) == 1:
        return compiled[0]

    def decide_all(tag: str | None, node: str | None) -> bool:
        for decide in decisions:
            if decide(tag, node) is is_any:
                return is_any
        return not is_any

    return decide_all, sum(cost for _, cost in compiled)


class Matcher:
    """Decides records by their labels; each pair of labels is evaluated once.

    Topics have few labels and many records. Beyond `_KNOWN_MAX` pairs all are forgotten. `spent`
    counts the look-ups so far: a caller that examines many records stops when `spent` is too high.
    Matchers of equal filters are equal, and their hash is cheap.
    """

    _KNOWN_MAX = 4096

    def __init__(self, wanted: Filter) -> None:
        self.wanted = wanted
        self.spent = 0
        self._decide, self._cost = _compiled(wanted)
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
            self.spent += self._cost
            found = self._known[labels] = self._decide(*labels)
        return found
