"""Reads the filter of a read: JSON to a tree of `engine/filters`. Pure.

A filter is an exact tag, `["tag"|"node", "Eq"|"In", …]`, `["tag", "Glob", "prefix*"]`,
`["Or", filter, …]`, `["And", filter, …]` or `["Not", filter]`. Size, depth and the number of leaves
are checked while it is read. Deletes and routers accept fewer forms (`requests.tag_match`). Called
by the request shapes of reads.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from topics_server.api.messages.bounded_lists import check_node, check_tag
from topics_server.engine.filters import AllOf, AnyOf, Filter, NodeLeaf, Not, TagLeaf
from topics_server.values.appends import decode_json
from topics_server.values.errors import TopicsError, clipped, invalid
from topics_server.values.limits import FILTER_BYTES_MAX, FILTER_DEPTH_MAX, FILTER_LEAVES_MAX
from topics_server.values.model import TagMatch

_ANYTHING: Final[msgspec.json.Decoder[Any]] = msgspec.json.Decoder()
_FORMS: Final = (
    'a tag, ["tag"|"node", "Eq"|"In", value], ["tag", "Glob", "prefix*"], '
    '["Or"|"And", filter, …] or ["Not", filter]'
)


def decode_filter(sent: bytes | memoryview, max_node_bytes: int, where: str = "filter") -> Filter:
    """The filter in this JSON. Raises `invalid_request` with the path of the invalid part."""
    if len(sent) > FILTER_BYTES_MAX:
        raise invalid(f"{where} has over {FILTER_BYTES_MAX} bytes", where)
    try:
        value = decode_json(_ANYTHING, bytes(sent))
    except TopicsError as error:
        raise invalid(f"{where} is not JSON: {error.message}", where) from None
    return filter_of(value, max_node_bytes, where)


def filter_of(value: object, max_node_bytes: int, where: str) -> Filter:
    """The filter in decoded JSON. Raises `invalid_request`."""
    # One tag, the most frequent filter, in either spelling.
    if isinstance(value, str):
        check_tag(value, where)
        return TagLeaf((TagMatch(value),))
    match value:
        case ["tag", "Eq", str(tag)]:
            check_tag(tag, f"{where}[2]")
            return TagLeaf((TagMatch(tag),))
        case _:
            pass
    return _Parser(max_node_bytes).parse(value, where, 1)


class _Parser:
    """Counts the leaves of one filter while reading it."""

    def __init__(self, max_node_bytes: int) -> None:
        self._max_node_bytes = max_node_bytes
        self._leaves = 0

    def parse(self, value: object, where: str, depth: int) -> Filter:
        """Read one part of the filter."""
        if depth > FILTER_DEPTH_MAX:
            raise invalid(f"{where} is nested deeper than {FILTER_DEPTH_MAX} filters", where)
        match value:
            case str(tag):
                return TagLeaf((self._tag(tag, where),))
            case ["Or" | "And" as word, *parts] if parts:
                self._count(len(parts) - 1, where)
                found = tuple(
                    self.parse(part, f"{where}[{index}]", depth + 1)
                    for index, part in enumerate(parts, 1)
                )
                return AnyOf(found) if word == "Or" else AllOf(found)
            case ["Not", part]:
                return Not(self.parse(part, f"{where}[1]", depth + 1))
            case ["tag", "Eq", str(tag)]:
                return TagLeaf((self._tag(tag, f"{where}[2]"),))
            case ["tag", "In", list(tags)] if tags:
                self._count(len(tags) - 1, where)
                return TagLeaf(
                    tuple(self._tag(tag, f"{where}[2][{index}]") for index, tag in enumerate(tags))
                )
            case ["tag", "Glob", str(pattern)]:
                return TagLeaf((self._glob(pattern, f"{where}[2]"),))
            case ["node", "Eq", str(node)]:
                return NodeLeaf(frozenset((self._node(node, f"{where}[2]"),)))
            case ["node", "In", list(nodes)] if nodes:
                self._count(len(nodes) - 1, where)
                return NodeLeaf(
                    frozenset(
                        self._node(node, f"{where}[2][{index}]") for index, node in enumerate(nodes)
                    )
                )
        raise invalid(f"{where} must be {_FORMS}", where)

    def _count(self, more: int, where: str) -> None:
        """Count the items of a list; refuse too many before any of them is read."""
        if self._leaves + more >= FILTER_LEAVES_MAX:
            raise invalid(f"a filter has at most {FILTER_LEAVES_MAX} leaves", where)

    def _leaf(self, where: str) -> None:
        self._leaves += 1
        if self._leaves > FILTER_LEAVES_MAX:
            raise invalid(f"a filter has at most {FILTER_LEAVES_MAX} leaves", where)

    def _tag(self, tag: object, where: str) -> TagMatch:
        self._leaf(where)
        if not isinstance(tag, str):
            raise invalid(f"{where} must be a string", where)
        check_tag(tag, where)
        return TagMatch(tag)

    def _glob(self, pattern: str, where: str) -> TagMatch:
        self._leaf(where)
        check_tag(pattern, where)
        if not pattern.endswith("*"):
            raise invalid(f'a Glob ends with *; "{clipped(pattern)}" does not', where)
        if "*" in pattern[:-1]:
            raise invalid("a Glob pattern must have exactly one *, at its end", where)
        return TagMatch(pattern[:-1], is_prefix=True)

    def _node(self, node: object, where: str) -> str:
        self._leaf(where)
        if not isinstance(node, str):
            raise invalid(f"{where} must be a string", where)
        check_node(node, self._max_node_bytes, where)
        return node
