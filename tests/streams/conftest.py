"""Fixtures of the Durable Streams tests: Node with the official packages, and a server of ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.streams import node, official


@pytest.fixture(scope="session")
def found_node() -> node.Node:
    """The path of a Node that is recent enough."""
    try:
        return node.find()
    except node.Missing as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def suite_folder(found_node: node.Node) -> Path:
    """The official suite and client, installed, with our scripts."""
    try:
        return node.installed(found_node, official.SUITE)
    except node.Missing as missing:
        pytest.skip(str(missing))
