"""The URL of an archive names a place, and neither a user nor an option."""

from __future__ import annotations

import pytest

from topics_server.values.texts.archive_url import is_url, parse_archive_url


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
    ("text", "named"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/", "s3://bucket"),
        ("gs://bucket/a/b=1/", "gs://bucket/a/b=1"),
        ("az://container/prefix", "az://container/prefix"),
    ],
)
def test_an_object_store_is_named_by_bucket_and_prefix(text: str, named: str) -> None:
    assert parse_archive_url(text) == (text[:2], "", named)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "scheme"),
        ("/mnt/archive", "scheme"),
        ("ftp://host/archive", "scheme"),
        ("s3://", "bucket"),
        ("s3:///prefix", "bucket"),
        ("s3://bucket:80/prefix", "bucket"),
        ("s3://bucket/a/../b", "plain characters"),
        ("s3://bucket/a//b", "plain characters"),
        ("s3://bucket/a%20b", "plain characters"),
        ("s3://user:secret@bucket/prefix", "credentials"),
        ("gs://bucket/prefix?token=secret", "credentials"),
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
