"""The threads that append until the server dies, one for each topic."""

from __future__ import annotations

import threading
from typing import Final

import msgspec

from topics_server.cli.connection import Answer, ServerConnection, ServerUnreachable, topic_path
from topics_server.cli.torture.acknowledged import AcknowledgedTopic, Unknown
from topics_server.runtime.clock import random_u64

RECORDS_MAX: Final = 60
# About how many records a topic keeps; older records are deleted.
KEPT_RECORDS: Final = 6_000
_DELETE_EVERY: Final = 1_000
_PAUSE_S: Final = 0.05


class _Appended(msgspec.Struct):
    first_seq: int
    deduped: bool = False


_APPENDED: Final = msgspec.json.Decoder(_Appended)


class TopicWriter(threading.Thread):
    """Appends to one topic and deletes its oldest records, until `stop`.

    `problems`: wrong answers.
    """

    def __init__(self, url: str, topic: AcknowledgedTopic, stop: threading.Event) -> None:
        super().__init__(name=f"writer of {topic.name}", daemon=True)
        self.problems: list[str] = []
        self.appends = 0
        self._client = ServerConnection(url)
        self._topic = topic
        self._stopped = stop

    def run(self) -> None:
        """Write until the server is gone."""
        try:
            while not self._stopped.is_set() and not self.problems:
                self._append()
                self._delete()
        except ServerUnreachable:
            pass  # killed; the call under way stays unknown
        finally:
            self._client.close()

    def _append(self) -> None:
        topic = self._topic
        call = topic.unknown or topic.send(1 + random_u64() % RECORDS_MAX)
        answer = append(self._client, topic, call)
        if answer.status in (200, 201):
            topic.acknowledge(_APPENDED.decode(answer.body).first_seq)
            self.appends += 1
        elif answer.status == 429:
            topic.refuse()
            self._stopped.wait(_PAUSE_S)
        elif answer.status == 503:
            self._stopped.wait(_PAUSE_S)
        else:
            self.problems.append(f"{topic.name}: an append was answered {answer.refusal.message}")

    def _delete(self) -> None:
        topic = self._topic
        first = max(topic.deleted_below, topic.delete_sent)
        if topic.head_seq - first < KEPT_RECORDS + _DELETE_EVERY:
            return
        topic.delete_sent = topic.head_seq - KEPT_RECORDS
        answer = delete_below(self._client, topic)
        if answer.status == 200:
            topic.delete_acknowledged()
        elif answer.status not in (429, 503):
            self.problems.append(f"{topic.name}: a delete was answered {answer.refusal.message}")


def append(client: ServerConnection, topic: AcknowledgedTopic, call: Unknown) -> Answer:
    """Send a call once."""
    body = {"records": topic.records(call), "idempotency_key": call.key}
    path = topic_path(topic.name, "?return_seqs=false")
    return client.ask("POST", path, msgspec.json.encode(body))


def delete_below(client: ServerConnection, topic: AcknowledgedTopic) -> Answer:
    """Delete everything below `topic.delete_sent`."""
    body = msgspec.json.encode({"before_seq": topic.delete_sent})
    return client.ask("POST", topic_path(topic.name, "/delete"), body)


def repeat_unknown(
    client: ServerConnection, topic: AcknowledgedTopic, stored_at: int | None
) -> list[str]:
    """Repeat the unknown call with its key: it must be stored once. Returns the problems."""
    call = topic.unknown
    if call is None:
        return []
    answer = append(client, topic, call)
    if answer.status == 429:
        return []  # the disk is full: it stays unknown
    if answer.status not in (200, 201):
        return [f"{topic.name}: a repeated call was answered {answer.refusal.message}"]
    appended = _APPENDED.decode(answer.body)
    topic.acknowledge(appended.first_seq)
    if stored_at is not None and (not appended.deduped or appended.first_seq != stored_at):
        return [f"{topic.name}: a call was stored twice, as {stored_at} and {appended.first_seq}"]
    return []
