"""Every server setting as an option, for `serve` and `config`.

The options are generated from `Settings`, so they always match it. Values are passed on as text:
`settings` checks values of flags and of the environment in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from topics_server.settings import Loaded, Settings, SettingsError, load, variable

# Secrets get no option, because every user of the machine can read a command line.
NO_FLAG = frozenset({"api_keys"})


def settings_flags(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Add an option for each setting; the verb gets keyword arguments named like the fields."""
    for name, field in reversed(Settings.model_fields.items()):
        if name in NO_FLAG:
            continue
        text = f"{field.description}  [env: {variable(name)}; default: {shown_default(name)}]"
        metavar = "N" if field.annotation is int else "VALUE"
        if metavar == "N" and name.endswith("_ms"):
            metavar = "DURATION"
        elif metavar == "N" and name.endswith("_bytes"):
            metavar = "SIZE"
        option = "--" + name.replace("_", "-")
        verb = click.option(option, name, default=None, metavar=metavar, help=text)(verb)
    return verb


def shown_default(name: str) -> str:
    """A field's default in the form that a user writes."""
    field = Settings.model_fields[name]
    return shown(name, field.get_default(call_default_factory=True, validated_data={}))


def shown(name: str, value: object) -> str:
    """A value in the form that a user writes in the environment.

    Secrets are masked; a missing value is `-`.
    """
    if value is None:
        return "-"
    if name in NO_FLAG:
        return "***"
    if name == "data_dir_mode":
        return f"{value:04o}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def loaded(flags: dict[str, Any]) -> Loaded:
    """Return the settings in force; print each error as a line and exit with code 2."""
    try:
        return load(flags)
    except SettingsError as error:
        for line in error.lines:
            click.echo(line, err=True)
        raise click.exceptions.Exit(2) from None
