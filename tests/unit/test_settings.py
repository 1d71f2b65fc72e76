"""`settings`: ranges, relations, sources, refusals; and `.env.example` lists all of them."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

import pytest

from topics_server.settings import (
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
from topics_server.values.texts.key_list import READ, KeyGrant

EXAMPLE = Path(__file__).parents[2] / ".env.example"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith("TOPICS_"):
            monkeypatch.delenv(name)


def the_line(**flags: object) -> str:
    """The only line of complaint about this environment."""
    with pytest.raises(SettingsError) as caught:
        load(flags)
    assert len(caught.value.lines) == 1
    assert "\n" not in caught.value.lines[0]
    return caught.value.lines[0]


def test_nothing_has_to_be_set() -> None:
    found = load()
    assert (found.settings.host, found.settings.port) == ("127.0.0.1", 4000)
    assert found.settings.data_dir == Path("topics-data")
    assert 1 <= found.settings.wal_shards <= 4
    assert set(found.sources.values()) == {"default"}
    assert found.warnings == ()
    assert refusal(found.settings) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOPICS_PORT", "seventy"),
        ("TOPICS_PORT", "65536"),
        ("TOPICS_PORT", "-1"),
        ("TOPICS_PORT", "4000.0"),
        ("TOPICS_PORT", " 4000"),
        ("TOPICS_PORT", "4_000"),
        ("TOPICS_PORT", "٤"),
        ("TOPICS_HOST", "a b"),
        ("TOPICS_HOST", "localhost:99999"),
        ("TOPICS_HOST", "localhost:"),
        ("TOPICS_HOST", "[::1"),
        ("TOPICS_HOST", "[nine]:4000"),
        ("TOPICS_HOST", "http://localhost"),
        ("TOPICS_DATA_DIR_MODE", "0777"),
        ("TOPICS_DATA_DIR_MODE", "0755"),
        ("TOPICS_DATA_DIR_MODE", "448"),
        ("TOPICS_DATA_DIR_MODE", "private"),
        ("TOPICS_MIN_FREE_BYTES", "5XB"),
        ("TOPICS_MIN_FREE_BYTES", "-1"),
        ("TOPICS_WAL_SHARDS", "0"),
        ("TOPICS_WAL_SHARDS", "65"),
        ("TOPICS_WAL_SHARDS", "x"),
        ("TOPICS_WAL_FSYNC_INTERVAL_MS", "0"),
        ("TOPICS_SEGMENT_MAX_EVENTS", "many"),
        ("TOPICS_SEGMENT_MAX_EVENTS", "0"),
        ("TOPICS_SEGMENT_MAX_BYTES", "64mi"),
        ("TOPICS_SEGMENT_MAX_AGE_MS", "-5"),
        ("TOPICS_HOT_RETAIN_SEGMENTS", "99999999999999999999"),
        ("TOPICS_MAX_LIMIT", "-5"),
        ("TOPICS_MAX_LIMIT", "0"),
        ("TOPICS_MAX_BODY_BYTES", "1e6"),
        ("TOPICS_MAX_TAG_BYTES", "65536"),
        ("TOPICS_MAX_TOPICS", "none"),
        ("TOPICS_READY_DEGRADED", "500"),
        ("TOPICS_CORS_ORIGINS", "*"),
        ("TOPICS_CORS_ORIGINS", "https://*.example.org"),
        ("TOPICS_CORS_ORIGINS", "null"),
        ("TOPICS_CORS_ORIGINS", "example.org"),
        ("TOPICS_CORS_ORIGINS", "http://example.org/"),
        ("TOPICS_CORS_ORIGINS", "http://example.org/page"),
        ("TOPICS_CORS_ORIGINS", "http://user@example.org"),
        ("TOPICS_CORS_ORIGINS", "http://example.org:0"),
        ("TOPICS_CORS_ORIGINS", "http://example.org:65536"),
        ("TOPICS_CORS_ORIGINS", "http://a http://b"),
        ("TOPICS_CORS_ORIGINS", "http://bücher.example"),
        ("TOPICS_MAX_WATCH_TOPICS", "0"),
        ("TOPICS_MAX_WATCH_SESSIONS", "-1"),
        ("TOPICS_SESSION_TTL_MS", "0"),
        ("TOPICS_SLOW_CONSUMER_TIMEOUT_MS", "0"),
        ("TOPICS_MAX_WS_MESSAGE_BYTES", "63"),
        ("TOPICS_MAX_WS_COMMANDS", "0"),
        ("TOPICS_ALLOW_INSECURE_NO_AUTH", "maybe"),
        ("TOPICS_PROBE_AUTH", "yes"),
        ("TOPICS_LOG_LEVEL", "loud"),
        ("TOPICS_LOG_FORMAT", "xml"),
    ],
)
def test_a_bad_value_is_one_line_with_name_value_and_what_is_allowed(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    field = name.removeprefix("TOPICS_").lower()
    assert the_line() == f"{name}={value}: allowed is {allowed_values(field)}"


def test_every_bad_value_gets_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOPICS_PORT", "x")
    monkeypatch.setenv("TOPICS_MAX_LIMIT", "y")
    with pytest.raises(SettingsError) as caught:
        load()
    assert sorted(line.partition("=")[0] for line in caught.value.lines) == [
        "TOPICS_MAX_LIMIT",
        "TOPICS_PORT",
    ]


def test_a_flag_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOPICS_MAX_LIMIT", "5")
    monkeypatch.setenv("TOPICS_MAX_TOPICS", "6")
    found = load({"max_limit": "7", "max_topics": None})
    assert (found.settings.max_limit, found.settings.max_topics) == (7, 6)
    assert found.sources["max_limit"] == "flag"
    assert found.sources["max_topics"] == "environment"
    assert found.sources["port"] == "default"


def test_an_empty_variable_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOPICS_COLD_DIR", "")
    monkeypatch.setenv("TOPICS_API_KEYS", "")
    found = load()
    assert found.settings.cold_dir is None
    assert found.sources["cold_dir"] == "default"
    assert refusal(found.settings) is None


def test_no_file_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("TOPICS_PORT=5\n")
    monkeypatch.chdir(tmp_path)
    assert load().settings.port == 4000


def test_settings_cannot_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load().settings.port = 5


# -- where it listens --------------------------------------------------------------------------


def test_a_port_in_the_host_wins_over_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOPICS_HOST", "[::1]:77")
    monkeypatch.setenv("TOPICS_PORT", "78")
    assert (load().settings.host, load().settings.port) == ("::1", 77)


def test_a_wrong_flag_is_named_as_it_was_given() -> None:
    assert the_line(max_limit="x").startswith("--max-limit x: allowed is ")
    assert the_line(data_dir="") == "--data-dir : allowed is a path"


def test_a_port_flag_wins_over_a_port_in_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOPICS_HOST", "localhost:77")
    found = load({"port": "5"})
    assert (found.settings.host, found.settings.port) == ("localhost", 5)
    assert load({"port": "5", "host": "127.0.0.2:6"}).settings.port == 5


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("localhost", ("localhost", None)),
        ("localhost:0", ("localhost", 0)),
        ("0.0.0.0:80", ("0.0.0.0", 80)),
        ("::", ("::", None)),
        ("::1", ("::1", None)),
        ("[::1]", ("::1", None)),
        ("[::1]:65535", ("::1", 65535)),
    ],
)
def test_hosts_and_ports_are_told_apart(text: str, expected: tuple[str, int | None]) -> None:
    assert split_host(text) == expected


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost", "LOCALHOST"])
def test_loopback_may_go_without_keys(host: str) -> None:
    assert is_loopback(host)
    assert refusal(load({"host": host}).settings) is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "0.0.0.0:0", "192.168.1.1", "example.org"])
def test_other_binds_want_to_be_insisted_on(host: str) -> None:
    reason = refusal(load({"host": host}).settings)
    assert reason is not None
    assert "TOPICS_ALLOW_INSECURE_NO_AUTH=1" in reason
    assert "\n" not in reason
    assert refusal(load({"host": host, "allow_insecure_no_auth": "1"}).settings) is None


def test_with_keys_any_bind_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOPICS_API_KEYS", "secret-1:read")
    assert refusal(load({"host": "0.0.0.0"}).settings) is None


def test_keys_are_digests_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOPICS_API_KEYS", "secret-1:read,secret-2")
    found = load()
    keys = found.settings.api_keys
    assert keys is not None
    assert keys.grants[0] == KeyGrant(hashlib.sha256(b"secret-1").digest(), READ)
    assert "secret" not in repr(found) + str(keys)
    assert keys.grants[0].digest.hex() not in repr(found)


@pytest.mark.parametrize("key", ["1234567890123456", "true", "null", "1e400"])
def test_a_key_that_is_json_is_a_key(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("TOPICS_API_KEYS", key)
    keys = load().settings.api_keys
    assert keys is not None
    assert [grant.digest for grant in keys.grants] == [hashlib.sha256(key.encode()).digest()]


def test_the_environment_forgets_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOPICS_API_KEYS", "secret-1:read")
    forget_secrets()
    assert "TOPICS_API_KEYS" not in os.environ


def test_a_malformed_key_is_one_line_that_shows_nothing_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TOPICS_API_KEYS", "good,secret-1:reed")
    line = the_line()
    assert line.startswith("TOPICS_API_KEYS: entry 2 has an unknown scope; scopes are read")
    assert not any(word in line for word in ("secret", "reed", "good"))


# -- relations ---------------------------------------------------------------------------------


def test_default_limits_give_way_to_a_smaller_one_around_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TOPICS_MAX_BODY_BYTES", "1000")
    settings = load().settings
    assert (settings.max_record_bytes, settings.max_meta_bytes) == (1000, 1000)


def test_limits_that_contradict_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOPICS_MAX_BODY_BYTES", "1000")
    monkeypatch.setenv("TOPICS_MAX_RECORD_BYTES", "2000")
    line = the_line()
    assert "TOPICS_MAX_RECORD_BYTES=2000" in line
    assert "TOPICS_MAX_BODY_BYTES, which is 1000" in line


def test_meta_is_part_of_a_record() -> None:
    assert "TOPICS_MAX_META_BYTES=60" in the_line(max_meta_bytes="60", max_record_bytes="50")


def test_a_buffer_is_given_no_more_grace_than_a_slow_consumer_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert load({"slow_consumer_timeout_ms": "100"}).settings.buffer_grace_ms == 100
    line = the_line(slow_consumer_timeout_ms="100", buffer_grace_ms="200")
    assert "TOPICS_BUFFER_GRACE_MS=200" in line
    assert "TOPICS_SLOW_CONSUMER_TIMEOUT_MS, which is 100" in line


def test_origins_are_kept_as_browsers_write_them() -> None:
    assert load().settings.allowed_origins == frozenset()
    sent = "http://localhost:8000, HTTPS://Example.org:443,http://[::1]:80,,chrome-extension://abc"
    assert load({"cors_origins": sent}).settings.allowed_origins == {
        b"http://localhost:8000",
        b"https://example.org",
        b"http://[::1]",
        b"chrome-extension://abc",
    }


def test_the_cold_folder_is_another_one() -> None:
    assert "TOPICS_COLD_DIR" in the_line(data_dir="x", cold_dir="x")


# -- names -------------------------------------------------------------------------------------


def test_unknown_names_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOPICS_PROT", "5000")
    monkeypatch.setenv("TOPICS_URL", "http://localhost")
    assert load().warnings == ("TOPICS_PROT is set, but there is no such setting",)


def test_the_example_lists_every_setting_with_its_default_and_a_line() -> None:
    pattern = re.compile(r"^# (TOPICS_[A-Z_]+)=(\S*) +(\S.*)$", re.MULTILINE)
    found = {
        name: (default, about) for name, default, about in pattern.findall(EXAMPLE.read_text())
    }
    assert found == {
        variable(name): (example_default(name), field.description)
        for name, field in Settings.model_fields.items()
    }
    assert list(found) == [variable(name) for name in Settings.model_fields]


def example_default(name: str) -> str:
    """A default in the form of the example: empty if unset, or if the machine decides."""
    field = Settings.model_fields[name]
    default = field.default
    if field.default_factory is not None or default is None:
        return ""
    if name == "data_dir":
        return f"./{default}"
    if name == "data_dir_mode":
        return f"{default:04o}"
    return str(default).lower() if isinstance(default, bool) else str(default)


def test_the_defaults_of_the_example_are_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    untouched = dict(load().settings)
    for line in EXAMPLE.read_text().splitlines():
        if match := re.match(r"# (TOPICS_[A-Z_]+)=(\S+)", line):
            monkeypatch.setenv(match[1], match[2])
    found = load()
    assert dict(found.settings) == untouched
    assert found.sources["port"] == "environment"
