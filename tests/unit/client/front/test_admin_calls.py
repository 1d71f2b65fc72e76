"""Requests on topics as values: which of them may be sent again."""

from __future__ import annotations

import pytest

from topics_server.client.front.admin_calls import any_call


@pytest.mark.parametrize(
    ("method", "repeatable"),
    [("GET", True), ("put", True), ("DELETE", True), ("POST", False), ("post", False)],
)
def test_only_a_request_whose_repeat_is_harmless_is_sent_again(
    method: str, repeatable: bool
) -> None:
    assert any_call(method, "/v0/topics/orders", None).repeatable is repeatable
