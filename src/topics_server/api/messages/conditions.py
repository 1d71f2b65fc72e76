"""Reads the condition of a write: the member `if` of its body, or the header `If-Match`. Pure.

Unknown members are refused, unlike everywhere else: an unknown condition must not be ignored. The
filter of a condition has no `Not`, because the condition already names records that must not exist.
Called by the handlers of appends, deletes and topics, and by `api/websocket/commands`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import msgspec

from topics_server.api.messages.filters import decode_filter, filter_of
from topics_server.auth.api_keys import Caller
from topics_server.auth.authorize import check_scopes
from topics_server.engine.filters import AllOf, AnyOf, Filter, Not, TagLeaf
from topics_server.engine.topic.writes.condition import Condition
from topics_server.values.appends import decode_json
from topics_server.values.errors import Code, TopicsError, invalid
from topics_server.values.limits import CONDITION_BYTES_MAX, U64_MAX
from topics_server.values.model import SentCondition, TagMatch
from topics_server.values.texts.key_list import READ, WRITE

IF_MATCH: Final = b"if-match"
_ABSENT: Final = msgspec.Raw(b"")
_TAG: Final = re.compile(rb'"(0|[1-9][0-9]{0,19})-(0|[1-9][0-9]{0,19})"')


class _If(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    head_seq: int | None = None
    none_match: msgspec.Raw = _ABSENT
    after: int | None = None
    exists: bool | None = None
    epoch: int | None = None


class _Conditional(msgspec.Struct, gc=False):
    """A body of any kind, of which only the undecoded condition is read."""

    if_: msgspec.Raw = msgspec.field(default=_ABSENT, name="if")


_BOTH: Final = READ | WRITE
# A tag with at most this many characters is within every limit.
_SHORT_TAG_CHARS: Final = 64
_IF: Final = msgspec.json.Decoder(_If)
_CONDITIONAL: Final = msgspec.json.Decoder(_Conditional)


def topic_tag(epoch: int, head_seq: int) -> bytes:
    """The entity tag of a topic, which changes with every record, and when the topic is created
    again.
    """
    return b'"%d-%d"' % (epoch, head_seq)


def condition_of(
    sent: SentCondition | bytes | None,
    headers: Mapping[bytes, bytes],
    caller: Caller,
    max_node_bytes: int,
) -> Condition | None:
    """The condition of a request, from its body's `if` or from its header.

    Raises `invalid_request`, and `forbidden` for a filter if the caller may not both read and
    write.
    """
    if (
        isinstance(sent, SentCondition)
        and isinstance(sent.none_match, str)
        and sent.exists is sent.epoch is sent.head_seq is None
        and len(sent.none_match) <= _SHORT_TAG_CHARS
        and 0 <= (sent.after or 0) <= U64_MAX
        and caller.scopes & _BOTH == _BOTH
        and IF_MATCH not in headers
    ):
        # The usual condition, one tag: `decode_condition` written out here.
        tag = TagLeaf((TagMatch(sent.none_match),))
        return Condition(none_match=tag, after=sent.after or 0)
    condition = None if sent is None else decode_condition(sent, max_node_bytes)
    if IF_MATCH in headers:
        if condition is not None:
            raise invalid("if and If-Match are two conditions; give one", "if")
        condition = _of_header(headers[IF_MATCH])
    # `check_condition_scopes` written out here.
    wanted = None if condition is None else condition.none_match
    if wanted is not None and caller.scopes & _BOTH != _BOTH:
        check_scopes(caller, _BOTH)
    return condition


def condition_of_body(
    body: bytes, headers: Mapping[bytes, bytes], caller: Caller, max_node_bytes: int
) -> Condition | None:
    """The condition of a control-plane request; see `condition_of`."""
    sent = decode_json(_CONDITIONAL, body).if_ if body else _ABSENT
    return condition_of(bytes(sent) or None, headers, caller, max_node_bytes)


def check_condition_scopes(caller: Caller, condition: Condition) -> None:
    """Raise `forbidden` unless the caller may learn whether records match."""
    if condition.none_match is not None:
        check_scopes(caller, _BOTH)


def decode_condition(sent: SentCondition | bytes, max_node_bytes: int) -> Condition | None:
    """The condition in this JSON; None for null. Raises `invalid_request`."""
    found: SentCondition | _If
    if isinstance(sent, SentCondition):
        found = sent
    elif len(sent) > CONDITION_BYTES_MAX:
        raise invalid(f"if has over {CONDITION_BYTES_MAX} bytes", "if")
    elif sent == b"null":
        return None
    else:
        found = _decode_if(sent)
    exists, epoch, head_seq, after = found.exists, found.epoch, found.head_seq, found.after
    if not 0 <= (head_seq or 0) | (after or 0) | (epoch or 0) <= U64_MAX:
        _check_numbers(found)
    none_match = None
    if isinstance(found, _If):
        none_match = _filter_of(bytes(found.none_match), max_node_bytes)
    elif found.none_match is not None:
        none_match = filter_of(found.none_match, max_node_bytes, "if.none_match")
    if none_match is None:
        if after is not None:
            raise invalid("if.after needs if.none_match", "if.after")
        if exists is None and epoch is None and head_seq is None:
            raise invalid("if needs one of head_seq, none_match, exists and epoch", "if")
    elif not isinstance(none_match, TagLeaf) and _has_not(none_match):
        raise invalid("a condition's filter must not have Not", "if.none_match")
    if exists is False and (none_match, epoch, head_seq) != (None, None, None):
        raise invalid(
            "if.exists: false cannot be combined with other conditions on the topic", "if.exists"
        )
    return Condition(exists, epoch, head_seq, none_match, after or 0)


def _decode_if(sent: bytes) -> _If:
    try:
        return decode_json(_IF, sent)
    except TopicsError as error:
        field = error.detail.get("field")
        raise invalid(error.message, f"if.{field}" if field else "if") from None


def _check_numbers(found: SentCondition | _If) -> None:
    for name in ("head_seq", "after", "epoch"):
        value = getattr(found, name)
        if value is not None and not 0 <= value <= U64_MAX:
            raise invalid(f"if.{name} must be an integer from 0 to {U64_MAX}", f"if.{name}")


def _filter_of(sent: bytes, max_node_bytes: int) -> Filter | None:
    if sent in (b"", b"null"):
        return None
    return decode_filter(sent, max_node_bytes, "if.none_match")


def _has_not(wanted: Filter) -> bool:
    match wanted:
        case Not():
            return True
        case AnyOf(parts) | AllOf(parts):
            return any(map(_has_not, parts))
        case _:
            return False


def _of_header(sent: bytes) -> Condition:
    value = sent.strip()
    if value == b"*":
        return Condition(exists=True, code=Code.PRECONDITION_FAILED)
    found = _TAG.fullmatch(value)
    if found is None:
        raise invalid('If-Match takes * or one tag, "<epoch>-<head_seq>"', "If-Match")
    epoch, head_seq = int(found[1]), int(found[2])
    if max(epoch, head_seq) > U64_MAX:
        raise invalid(f"the numbers in If-Match are at most {U64_MAX}", "If-Match")
    return Condition(epoch=epoch, head_seq=head_seq, code=Code.PRECONDITION_FAILED)
