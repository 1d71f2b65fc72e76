"""`topics consumer`: cursors that the server keeps."""

from __future__ import annotations

from tests.cli.conftest import Topics
from tests.contract.driver import Api


def test_a_consumer_is_made_committed_listed_and_removed(
    topics: Topics, topic: str, api: Api
) -> None:
    api.add(topic, *range(5))
    assert topics.good("consumer", "put", topic, "billing").value["seq"] == 0
    assert topics.good("consumer", "put", topic, "late", "--head").value["seq"] == 5
    assert topics.good("consumer", "put", topic, "mid", "--from-seq", "2").value["seq"] == 2
    assert topics.good("consumer", "commit", topic, "billing", "3").value["moved"] is True
    assert topics.good("consumer", "commit", topic, "billing", "1").value["seq"] == 3
    ran = topics("consumer", "commit", topic, "billing", "4", "--if-seq", "0")
    assert (ran.code, ran.message.partition(":")[0]) == (1, "condition_failed")
    back = topics.good("consumer", "commit", topic, "billing", "1", "--rewind").value
    assert back["seq"] == topics.good("consumer", "get", topic, "billing").value["seq"] == 1
    rows = topics.good("consumer", "ls", topic, "--json").lines
    assert [(row["consumer"], row["lag"]) for row in rows] == [
        ("billing", 4),
        ("late", 0),
        ("mid", 3),
    ]
    assert topics("consumer", "rm", topic, "mid").code == 2
    assert topics.good("consumer", "rm", topic, "mid", "--yes").value["deleted"] is True
    ran = topics("consumer", "get", topic, "mid")
    assert (ran.code, ran.message.partition(":")[0]) == (1, "consumer_not_found")
    assert topics("consumer", "put", topic, "x", "--head", "--from-seq", "1").code == 2


def test_a_hold_is_given_changed_and_ended(topics: Topics, topic: str, api: Api) -> None:
    api.put(topic, {"cap_records": 2})
    hold = ("--hold-records", "4", "--hold-bytes", "1MiB")
    made = topics.good("consumer", "put", topic, "billing", *hold).value
    assert made["hold"] == {"max_records": 4, "max_bytes": 1 << 20}
    api.add(topic, *range(6))
    assert topics.good("consumer", "get", topic, "billing").value["held_records"] == 2
    assert topics.good("consumer", "put", topic, "billing").value["hold"] == made["hold"]
    assert topics.good("consumer", "put", topic, "billing", "--no-hold").value["hold"] is None
    for wrong in (hold[:2], hold[2:], (*hold, "--no-hold"), ("--hold-records", "0", *hold[2:])):
        assert topics("consumer", "put", topic, "billing", *wrong).code == 2
