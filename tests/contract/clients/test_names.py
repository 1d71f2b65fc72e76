"""Names that a URL resolves: a request for what is below a topic never reaches the topic itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.contract.clients.conftest import NewClient
from tests.contract.driver import Api

TRIES: dict[str, Callable[[Any, str], Any]] = {
    "view": lambda client, topic: client.view(topic, "..").drop(),
    "consumer": lambda client, topic: client._topic(topic).delete_consumer(".."),
    "new consumer": lambda client, topic: client.consumer(topic, ".."),
    "stream": lambda client, topic: client.stream(f"../../v0/topics/{topic}").delete(),
    "route": lambda client, topic: client.call("DELETE", f"/v0/topics/{topic}/views/.."),
    "escaped route": lambda client, topic: client.call("DELETE", f"/v0/topics/{topic}/x/%2e%2E"),
    "topic": lambda client, topic: client.drop_topic(".."),
    "live": lambda client, topic: next(client.live("..")),
    "queue": lambda client, topic: client.queue("."),
    "producer": lambda client, topic: client.producer(
        f"{client.url}/v1/stream/../x", "p", url=None
    ),
}


@pytest.mark.parametrize("name", TRIES)
def test_dots_are_no_name(new_client: NewClient, api: Api, topic: str, name: str) -> None:
    client = new_client(api.url)
    client.append(topic, 1)
    with pytest.raises(ValueError, match=r"name|segment"):
        TRIES[name](client, topic)
    assert client.topic(topic).count == 1
