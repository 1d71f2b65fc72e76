"""The settings: the environment, read once into one frozen `Settings`.

A program that embeds the store imports their names from here.

- `key_file`: reads API keys from the environment and from the key file.
- `setting_values`: how the text of a setting becomes a value, and how its field is declared.
- `settings`: every setting with its range, the relations between them, and unsafe binds.
"""

from topics_server.settings.settings import (
    Loaded,
    Settings,
    SettingsError,
    allowed_values,
    forget_secrets,
    is_loopback,
    load,
    refusal,
    split_host,
    variable,
)

__all__ = [
    "Loaded",
    "Settings",
    "SettingsError",
    "allowed_values",
    "forget_secrets",
    "is_loopback",
    "load",
    "refusal",
    "split_host",
    "variable",
]
