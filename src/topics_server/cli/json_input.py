"""JSON that a person types: checks it, and says how to quote a string."""

from __future__ import annotations

import click
import msgspec

from topics_server.cli.connection import wrong_text

_RAISED = (msgspec.DecodeError, UnicodeDecodeError, UnicodeEncodeError, RecursionError)


def json_value(text: bytes, what: str = "the data", call: str | None = None) -> msgspec.Raw:
    """Return `text` if it is one JSON value; raise a usage error if not.

    `call`: the command that got the text as an argument; the error then suggests the quotes.
    """
    try:
        text.decode()
        msgspec.json.decode(text, type=msgspec.Raw)
    except _RAISED as error:
        message = f"{what} is not JSON: {wrong_text(error)}"
        if call is not None and not isinstance(error, UnicodeDecodeError):
            quoted = msgspec.json.encode(text.decode()).decode()
            if "'" not in quoted:
                message += f"\nFor a string, write:  {call} '{quoted}'"
        raise click.UsageError(message) from None
    return msgspec.Raw(text.strip())


def json_object(text: str, option: str) -> msgspec.Raw:
    """The value of an option that takes a JSON object."""
    try:
        msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except _RAISED as error:
        raise click.UsageError(f"{option} is not a JSON object: {wrong_text(error)}") from None
    return msgspec.Raw(text.encode())
