"""Fixtures: further servers, as in the contract tests."""

from __future__ import annotations

from tests.contract.conftest import own, topic

__all__ = ["own", "topic"]
