"""`Client` and `AsyncClient` are twins: the same names, options and results; so are their parts.

`tests/contract/clients` runs both against a server.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import topics_server.client
from topics_server.client import (
    AsyncClient,
    AsyncConsumer,
    AsyncDurableStream,
    AsyncIdempotentProducer,
    AsyncQueue,
    AsyncTopicClient,
    AsyncViewClient,
    Client,
    Consumer,
    DurableStream,
    IdempotentProducer,
    Queue,
    TopicClient,
    ViewClient,
)

TWINS = [
    (Client, AsyncClient),
    (Consumer, AsyncConsumer),
    (DurableStream, AsyncDurableStream),
    (IdempotentProducer, AsyncIdempotentProducer),
    (Queue, AsyncQueue),
    (TopicClient, AsyncTopicClient),
    (ViewClient, AsyncViewClient),
]
# Names that only one of the two has, and why.
ALONE = {
    "work": "jobs as a stream: `worker` uses it",
    "aclose": "the name that `AsyncViewClient` had for `close`",
}
# Options that only coroutines have, because `worker` uses them.
OPTIONS_ALONE = {"AsyncQueue.extend": {"no_more", "timeout_ms"}}


def public(kind: type) -> dict[str, Any]:
    return {
        name: value
        for name, value in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_") or name == "__init__"
    }


@pytest.mark.parametrize(("blocking", "awaited"), TWINS)
def test_twins_have_the_same_names_and_options(blocking: type, awaited: type) -> None:
    plain, other = public(blocking), public(awaited)
    assert plain.keys() == other.keys() - ALONE.keys()
    for name, method in plain.items():
        more = OPTIONS_ALONE.get(f"{awaited.__name__}.{name}", set())
        mine = inspect.signature(method).parameters
        theirs = inspect.signature(other[name]).parameters
        assert list(mine) == [key for key in theirs if key not in more], name
        for key, parameter in mine.items():
            assert parameter.kind == theirs[key].kind, (name, key)
            assert parameter.default == theirs[key].default, (name, key)


@pytest.mark.parametrize(("blocking", "awaited"), TWINS)
def test_what_blocks_is_awaited_or_iterated(blocking: type, awaited: type) -> None:
    """If a call of one client returns at once, so does the same call of the other."""
    for name, method in public(blocking).items():
        if name == "__init__":
            continue
        result = str(get_type_hints(method)["return"])
        other = public(awaited)[name]
        if "Generator[" in result:
            assert "AsyncGenerator[" in str(get_type_hints(other)["return"]), name
        else:
            is_at_once = name in {"view", "queue", "worker", "producer", "stream"}
            assert inspect.iscoroutinefunction(other) is not is_at_once, name


def test_every_name_is_exported_once_and_exists() -> None:
    names = topics_server.client.__all__
    assert len(names) == len(set(names))
    for name in names:
        assert hasattr(topics_server.client, name)
    assert set(names) <= set(dir(topics_server.client))


def test_a_name_is_imported_from_the_module_that_type_checkers_see() -> None:
    tree = ast.parse(Path(topics_server.client.__file__).read_text())
    (for_types,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {
        name.name: getattr(importlib.import_module(item.module), name.name)
        for item in for_types.body
        if isinstance(item, ast.ImportFrom) and item.module is not None
        for name in item.names
    }
    assert seen == {
        name: getattr(topics_server.client, name) for name in topics_server.client.__all__
    }


def test_a_part_of_the_package_is_there_without_an_import_of_its_own() -> None:
    folder = Path(topics_server.client.__file__).parent
    parts = sorted(path.stem for path in folder.glob("[a-z]*") if path.suffix in ("", ".py"))
    # Each for itself: a part imports others.
    code = "import sys\n" + "".join(
        "import topics_server.client as c\n"
        f"assert c.{part}.__name__ == 'topics_server.client.{part}'\n"
        "for name in [n for n in sys.modules if n.startswith('topics_server')]:\n"
        "    del sys.modules[name]\n"
        for part in parts
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    with pytest.raises(AttributeError, match="no attribute 'Clients'"):
        topics_server.client.Clients  # noqa: B018


def test_a_wrong_address_is_refused_at_once() -> None:
    for url in ("localhost:4000", "http://user:pass@host", "ftp://host"):
        with pytest.raises(ValueError, match="URL"):
            Client(url)
    with pytest.raises(ValueError, match="token"):
        Client(token="a b")
