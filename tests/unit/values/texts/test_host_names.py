"""`values/texts/host_names`: host names in one spelling each."""

from __future__ import annotations

import pytest

from topics_server.values.texts.host_names import normal_host, split_hosts


def test_lists_are_normal() -> None:
    assert split_hosts("A.example, ::1,[0::2] ,") == ["a.example", "::1", "::2"]
    assert normal_host("[localhost]") is None
    for bad in ("a b", "a/b", "http://a", "a:4000", "[x]"):
        with pytest.raises(ValueError, match="is not a host name"):
            split_hosts(bad)
