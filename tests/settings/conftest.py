"""Servers of one's own, as the contract tests make them."""

from __future__ import annotations

from tests.contract.conftest import own, topic

__all__ = ["own", "topic"]
