"""Parameters that the queries of plain reads and of live streams share: numbers and filters."""

from __future__ import annotations

from collections.abc import Mapping

from topics_server.api.messages.bounded_lists import check_node, check_tag
from topics_server.api.messages.filters import decode_filter
from topics_server.engine.filters import AllOf, Filter, NodeLeaf, TagLeaf
from topics_server.values.errors import invalid
from topics_server.values.limits import U64_MAX
from topics_server.values.model import TagMatch


def whole_number(sent: Mapping[str, str], name: str, default: int) -> int:
    """A parameter that is a whole number. Raises `invalid_request` that names it."""
    text = sent.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit()) or len(text) > 20 or int(text) > U64_MAX:
        raise invalid(f"{name} must be a whole number of at most {U64_MAX}", name)
    return int(text)


def filter_of(sent: Mapping[str, str], max_node_bytes: int) -> Filter | None:
    """All filters of the query; a record passes if every filter accepts it."""
    parts: list[Filter] = []
    if "tag" in sent:
        check_tag(sent["tag"], "tag")
        parts.append(TagLeaf((TagMatch(sent["tag"]),)))
    if "tag_prefix" in sent:
        check_tag(sent["tag_prefix"], "tag_prefix")
        parts.append(TagLeaf((TagMatch(sent["tag_prefix"], is_prefix=True),)))
    if "node" in sent:
        check_node(sent["node"], max_node_bytes)
        parts.append(NodeLeaf(frozenset((sent["node"],))))
    if "filter" in sent:
        parts.append(decode_filter(sent["filter"].encode(), max_node_bytes))
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else AllOf(tuple(parts))
