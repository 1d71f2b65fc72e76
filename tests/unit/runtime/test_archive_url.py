"""The URL of an archive names a place, and neither a user nor an option."""

from __future__ import annotations

import pytest

from topics_server.runtime.archive_url import is_url, parse_archive_url


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("file:///mnt/archive", "/mnt/archive"),
        ("file:///mnt/archive/", "/mnt/archive"),
        ("file:///mnt/our%20archive", "/mnt/our archive"),
    ],
)
def test_a_folder_is_named_by_its_path(text: str, path: str) -> None:
    assert parse_archive_url(text) == ("file", path, text)
    assert is_url(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "scheme"),
        ("/mnt/archive", "scheme"),
        ("ftp://host/archive", "scheme"),
        ("file://host/archive", "absolute path"),
        ("file:archive", "absolute path"),
        ("file:///", "root folder"),
        ("file:///a%00b", "absolute path"),
        ("file:///archive?secret=1", "credentials"),
        ("file:///archive?", "credentials"),
        ("file:///archive#1", "credentials"),
        ("file://user:secret@host/archive", "credentials"),
        ("file://[/archive", "not a URL"),
    ],
)
def test_everything_else_is_refused_without_repeating_it(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as refused:
        parse_archive_url(text)
    assert "secret" not in str(refused.value)
