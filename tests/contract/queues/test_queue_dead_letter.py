"""§10.6: jobs delivered too often move to the dead-letter topic; a redrive moves them back.

The server moves a job after the claim that found it dead, so these tests wait for the result and
not for a fixed time.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.contract.conftest import NewServer, new_name
from tests.contract.driver import Api, Json, eventually, good, refused
from tests.contract.queues.queues import LONG_MS, SHORT_MS, Queue, datas_of, seqs_of

Names = Callable[[str], str]
STAMPS = {"$dead_letter_from", "$dead_letter_deliveries", "$dead_letter_src_seq"}


@pytest.fixture
def queue(api: Api, topic: str) -> Queue:
    """A queue whose jobs die at their third delivery."""
    return Queue.made(api, topic, max_deliveries=2, dead_letter=f"{topic}.dlq", lease_ms=LONG_MS)


def _dlq(queue: Queue) -> str:
    name: str = queue.state()["config"]["dead_letter"]
    return name


def _letters(queue: Queue) -> list[Json]:
    return queue.api.read_all(_dlq(queue), include_tags=True)


def _fail_all(queue: Queue, times: int = 2) -> None:
    """Deliver every job this often, and release it each time."""
    for _ in range(times):
        queue.nack("w", seqs_of(queue.take("w", 1000)))


def _bury_all(queue: Queue, count: int) -> None:
    """Make every job in the queue a dead letter."""
    before = queue.counts()[2]
    _fail_all(queue)
    assert queue.take("w", 1000) == []
    eventually(lambda: queue.counts()[2] == before + count, "all are dead-lettered")


def test_a_job_is_delivered_so_often_and_then_dies(queue: Queue) -> None:
    """Contract §10.6 [10.6-05, 10.6-08, 10.6-09, 10.7-01]"""
    queue.add("bad")
    refused(queue.api.state(f"{queue.name}.dlq"), 404, "topic_not_found")
    for deliveries in (1, 2):
        [job] = queue.take("w")
        assert job["deliveries"] == deliveries
        queue.nack("w", [1])
        assert queue.counts() == (1, 0, 0)
    answer = queue.claim("w")
    assert (answer["claimed"], answer["count"], answer["ready"]) == ([], 0, 0)
    eventually(lambda: queue.counts() == (0, 0, 1), "the job is dead-lettered")
    assert queue.state()["count"] == 0
    assert queue.api.read(queue.name)["tombstone"] is None
    [letter] = _letters(queue)
    assert letter["data"] == "bad"
    assert queue.api.get_state(_dlq(queue))["type"] == "log"


def test_expiries_count_as_deliveries(api: Api, topic: str) -> None:
    """Contract §10.6, §10.3 [10.6-05, 10.3-02]"""
    queue = Queue.made(api, topic, max_deliveries=1, dead_letter=f"{topic}.dlq", lease_ms=SHORT_MS)
    queue.add("slow", "next")
    assert datas_of(queue.take("w")) == ["slow"]
    queue.is_expired()
    # The dead job makes room for the next one in the same claim.
    assert datas_of(queue.take("w", lease_ms=LONG_MS)) == ["next"]
    eventually(lambda: queue.counts() == (0, 1, 1), "the job is dead-lettered")


def test_an_ack_of_the_last_delivery_saves_the_job(queue: Queue) -> None:
    """Contract §10.6 [10.6-05]"""
    queue.add("just so")
    queue.nack("w", seqs_of(queue.take("w")))
    assert queue.ack("w", seqs_of(queue.take("w")))["acked"] == 1
    assert queue.take("w") == []
    assert queue.counts() == (0, 0, 0)
    refused(queue.api.state(_dlq(queue)), 404, "topic_not_found")


def test_extending_costs_no_delivery(queue: Queue) -> None:
    """Contract §10.6 [10.6-04, 10.6-05]"""
    queue.add("long")
    queue.take("w")
    for _ in range(5):
        queue.extend("w", [1], LONG_MS)
    queue.nack("w", [1])
    assert queue.take("w")[0]["deliveries"] == 2


def test_a_letter_is_the_record_with_stamps(queue: Queue) -> None:
    """Contract §10.6 [10.6-06]"""
    records = [
        {"data": {"n": [1, {}]}, "tag": "tenant:1", "meta": {"trace": "z9"}},
        {"data": None},
        {"data": "x", "meta": {}},
    ]
    good(queue.api.append(queue.name, records))
    _bury_all(queue, 3)
    letters = sorted(_letters(queue), key=lambda letter: letter["meta"]["$dead_letter_src_seq"])
    assert [letter["data"] for letter in letters] == [{"n": [1, {}]}, None, "x"]
    assert letters[0]["$tag"] == "tenant:1"
    assert "$tag" not in letters[1]
    assert letters[0]["meta"]["trace"] == "z9"
    for number, letter in enumerate(letters):
        assert set(letter["meta"]) - {"trace"} == STAMPS
        assert letter["meta"]["$dead_letter_from"] == queue.name
        assert letter["meta"]["$dead_letter_deliveries"] == 2
        assert letter["meta"]["$dead_letter_src_seq"] == number + 1


def _stamp(letter: Json, name: str) -> object:
    return letter["meta"][f"$dead_letter_{name}"]


@pytest.mark.parametrize("data", ["1e400", '{"a" : 1 ,  "a":2}', '"\\u0061\\/"', str(2**70)])
def test_a_letter_is_the_record_byte_for_byte(queue: Queue, data: str) -> None:
    """Contract §10.6, settled rules [10.6-06]"""
    body = b'{"records":[{"data":%b,"meta":{"k": %b}}]}' % (data.encode(), data.encode())
    media = {"Content-Type": "application/json"}
    good(queue.api.http.post(queue.path, content=body, headers=media))
    for _ in range(2):
        queue.post("claim", {"node": "w"})
        queue.nack("w", [1])
    queue.post("claim", {"node": "w"})
    eventually(lambda: queue.counts()[2] == 1, "it is dead-lettered")
    text = queue.api.diff(_dlq(queue)).content
    assert b'"data":%b' % data.encode() in text
    assert b'"k": %b' % data.encode() in text


def test_stamps_do_not_count_against_the_bounds_of_meta(queue: Queue) -> None:
    """Settled rules of the contract [S-59]: stamps count neither as keys nor as bytes."""
    keys = {f"k{n}": n for n in range(64)}
    size = {"k": "v" * (16 * 1024 - 8)}
    good(queue.api.append(queue.name, [{"data": 1, "meta": keys}, {"data": 2, "meta": size}]))
    _bury_all(queue, 2)
    metas = {letter["data"]: letter["meta"] for letter in _letters(queue)}
    for data, meta in ((1, keys), (2, size)):
        assert {k: v for k, v in metas[data].items() if k not in STAMPS} == meta
    assert queue.redrive(all=True)["redriven"] == 2
    assert sorted(job["meta"] == keys for job in queue.take("w", 9)) == [False, True]


@pytest.mark.parametrize("config", [{"max_deliveries": 0}, {"dead_letter": None}])
def test_without_a_limit_or_a_topic_jobs_come_without_end(
    api: Api, topic: str, config: Json
) -> None:
    """Contract §10.6 [10.6-07]"""
    dlq = f"{topic}.dlq"
    queue = Queue.made(api, topic, **({"max_deliveries": 2, "dead_letter": dlq} | config))
    queue.add("again")
    for deliveries in range(1, 12):
        [job] = queue.take("w")
        assert job["deliveries"] == deliveries
        queue.nack("w", [1])
    assert queue.counts() == (1, 0, 0)
    refused(api.state(dlq), 404, "topic_not_found")


def test_many_jobs_die_each_once(queue: Queue) -> None:
    """Contract §10.6 [10.6-05, 10.6-09]: although many workers claim at once, each job becomes one
    dead letter.
    """
    queue.add(*range(200))
    _fail_all(queue)
    with ThreadPoolExecutor(8) as pool:
        pages = list(pool.map(lambda n: queue.take(f"w{n}", 50), range(16)))
    assert pages == [[]] * 16
    eventually(lambda: queue.counts() == (0, 0, 200), "all are dead-lettered")
    assert sorted(letter["data"] for letter in _letters(queue)) == list(range(200))


def test_live_jobs_are_not_held_up_by_dead_ones(queue: Queue) -> None:
    """Contract §10.6 [10.6-05]"""
    queue.add(*(f"bad {n}" for n in range(50)))
    _fail_all(queue)
    queue.add("good")
    assert datas_of(queue.soon("w", 100)) == ["good"]
    eventually(lambda: queue.counts() == (0, 1, 50), "the others are dead-lettered")


def test_the_dead_letter_topic_may_be_a_queue(queue: Queue) -> None:
    """Contract §10.6 [10.6-05, 10.6-06]: in such a topic a dead letter is a job like any other."""
    dead = Queue.made(queue.api, _dlq(queue))
    queue.add("bad", tag="t")
    _bury_all(queue, 1)
    [job] = dead.take("undertaker")
    assert (job["data"], job["deliveries"], job["$tag"]) == ("bad", 1, "t")
    assert job["meta"]["$dead_letter_from"] == queue.name
    assert dead.ack("undertaker", seqs_of([job]))["acked"] == 1
    assert (queue.counts(), dead.counts()) == ((0, 0, 1), (0, 0, 0))


def test_where_creation_is_off_a_dead_job_waits_for_its_topic(api: Api, topic: str) -> None:
    """Contract §10.6 [10.6-08, 10.6-10]: no job is lost meanwhile, and no worker gets it."""
    dlq = f"{topic}.dlq"
    queue = Queue.made(api, topic, max_deliveries=2, dead_letter=dlq, auto_create=False)
    queue.add("bad")
    _fail_all(queue)
    assert queue.take("w") == []
    assert queue.take("w") == []
    refused(api.state(dlq), 404, "topic_not_found")
    assert queue.state()["count"] == 1
    good(api.put(dlq))

    def is_buried() -> bool:
        assert queue.take("w") == []
        return queue.counts()[2] == 1

    eventually(is_buried, "it is dead-lettered once it can be")
    assert [letter["data"] for letter in _letters(queue)] == ["bad"]


def test_a_full_dead_letter_topic_keeps_the_job(api: Api, topic: str, names: Names) -> None:
    """Contract §10.6 [10.6-10]"""
    dlq = names("dlq")
    good(api.put(dlq, {"cap_records": 1, "discard": "reject"}))
    api.add(dlq, "in the way")
    queue = Queue.made(api, topic, max_deliveries=2, dead_letter=dlq)
    queue.add("bad")
    _fail_all(queue)
    assert queue.take("w") == []
    assert (queue.state()["count"], queue.counts()[2]) == (1, 0)
    good(api.delete(dlq, before_seq=2))

    def is_buried() -> bool:
        assert queue.take("w") == []
        return queue.counts()[2] == 1

    eventually(is_buried, "it is dead-lettered once there is room")
    assert [letter["data"] for letter in _letters(queue)] == ["bad"]


def test_max_deliveries_may_change_under_way(queue: Queue) -> None:
    """Contract §10.6, §1.1 [10.6-05, 10.7-05]"""
    queue.add("bad")
    _fail_all(queue)
    queue.put(max_deliveries=4, dead_letter=f"{queue.name}.dlq")
    assert queue.take("w")[0]["deliveries"] == 3
    queue.nack("w", [1])
    queue.put(max_deliveries=3, dead_letter=f"{queue.name}.dlq")
    assert queue.take("w") == []
    eventually(lambda: queue.counts()[2] == 1, "it is dead-lettered")
    assert _stamp(_letters(queue)[0], "deliveries") == 3


def test_dead_lettered_starts_again_with_a_new_queue(queue: Queue) -> None:
    """Contract §10.7 [10.7-03]"""
    queue.add(1, 2)
    _bury_all(queue, 2)
    config = queue.state()["config"]
    queue.put(max_deliveries=2, dead_letter=config["dead_letter"], lease_ms=1000)
    assert queue.counts() == (0, 0, 2), "a PUT leaves it alone"
    good(queue.api.drop(queue.name))
    queue.put(max_deliveries=2, dead_letter=config["dead_letter"])
    assert queue.counts() == (0, 0, 0)


def test_an_ephemeral_dead_letter_topic_is_warned_of(own: NewServer, topic: str) -> None:
    """Settled rules of the contract [S-69]"""
    server = own()
    api = server.start()
    good(api.put("gone", {"durability": "ephemeral"}))
    good(api.put("kept", {"durability": "disk"}))
    Queue.made(api, topic, max_deliveries=1, dead_letter="kept")
    assert "ephemeral" not in server.log.read_text()
    Queue.made(api, f"{topic}2", max_deliveries=1, dead_letter="gone")
    eventually(
        lambda: bool(re.search(rf"(?im)^.*warn.*{topic}2.*ephemeral", server.log.read_text())),
        f"a warning in {server.log.read_text()[-500:]}",
    )


# --- redrive --------------------------------------------------------------------------------------
@pytest.fixture
def dead(queue: Queue) -> Queue:
    """The queue after six jobs died: data 0 to 5, tags even and odd."""
    for number in range(6):
        queue.add(number, tag=("even", "odd")[number % 2], meta={"n": number})
    _bury_all(queue, 6)
    return queue


def _letter_seqs(queue: Queue, *datas: int) -> list[int]:
    return [letter["$seq"] for letter in _letters(queue) if letter["data"] in datas]


def test_a_redrive_of_all_brings_the_jobs_back(dead: Queue) -> None:
    """docs/EXTENSIONS.md, redrive [10.6-11]"""
    answer = dead.redrive(all=True)
    assert (answer["topic"], answer["from"]) == (dead.name, _dlq(dead))
    assert (answer["redriven"], answer["skipped"], answer["more"]) == (6, [], False)
    assert dead.counts() == (6, 0, 6)
    assert _letters(dead) == []
    jobs = dead.take("w", 10)
    assert sorted(datas_of(jobs)) == list(range(6))
    assert min(seqs_of(jobs)) > 6, "they are new records"
    for job in jobs:
        assert job["deliveries"] == 1, "counts start again"
        assert job["meta"] == {"n": job["data"]}, "the stamps are off"
        assert job["$tag"] == ("even", "odd")[job["data"] % 2]


def test_a_redriven_job_can_die_again(dead: Queue) -> None:
    """docs/EXTENSIONS.md, redrive [10.6-11, 10.6-09]"""
    dead.redrive(all=True)
    _bury_all(dead, 6)
    assert dead.counts() == (0, 0, 12)
    assert sorted(letter["data"] for letter in _letters(dead)) == list(range(6))
    assert {_stamp(letter, "deliveries") for letter in _letters(dead)} == {2}


def test_a_redrive_by_seqs_takes_those_and_names_the_rest(dead: Queue) -> None:
    """docs/EXTENSIONS.md, redrive [10.6-11]"""
    asked = _letter_seqs(dead, 1, 4)
    answer = dead.redrive(seqs=[*asked, 9999])
    assert (answer["redriven"], answer["skipped"]) == (2, [9999])
    assert sorted(datas_of(dead.take("w", 10))) == [1, 4]
    again = dead.redrive(seqs=asked)
    assert (again["redriven"], again["skipped"]) == (0, sorted(asked))
    assert len(_letters(dead)) == 4


def test_a_redrive_by_tag(dead: Queue) -> None:
    """docs/EXTENSIONS.md, redrive [10.6-11]"""
    assert dead.redrive(tag="odd")["redriven"] == 3
    assert sorted(datas_of(dead.take("w", 10))) == [1, 3, 5]
    assert dead.redrive(match=["tag", "Glob", "ev*"])["redriven"] == 3
    assert _letters(dead) == []


def test_a_redrive_is_bounded_and_goes_on(dead: Queue) -> None:
    """docs/EXTENSIONS.md, redrive [10.6-11]"""
    moved: list[int] = []
    answer = dead.redrive(all=True, max=4)
    assert (answer["redriven"], answer["more"]) == (4, True)
    moved += datas_of(dead.take("w", 10))
    answer = dead.redrive(all=True, max=4, after_seq=answer["next_after_seq"])
    assert (answer["redriven"], answer["more"]) == (2, False)
    moved += datas_of(dead.take("w", 10))
    assert sorted(moved) == list(range(6))


def test_a_redrive_takes_only_letters_of_this_queue(dead: Queue) -> None:
    """docs/EXTENSIONS.md, redrive [10.6-11]"""
    other = Queue.made(
        dead.api, new_name("other"), max_deliveries=2, dead_letter=_dlq(dead), lease_ms=LONG_MS
    )
    other.add("other's")
    _bury_all(other, 1)
    dead.api.add(_dlq(dead), "no letter at all")
    assert dead.redrive(all=True)["redriven"] == 6
    assert sorted(str(letter["data"]) for letter in _letters(dead)) == [
        "no letter at all",
        "other's",
    ]
    assert other.redrive(all=True)["redriven"] == 1
    assert datas_of(other.take("w", 9)) == ["other's"]


def test_a_redrive_names_where_from(dead: Queue) -> None:
    """docs/EXTENSIONS.md, redrive [10.6-11]: `from` works even if the queue no longer names this
    topic.
    """
    dlq = _dlq(dead)
    dead.put()
    assert refused(dead.post("redrive", {"all": True}), 400, "invalid_request")["field"] == "from"
    assert dead.redrive(all=True, **{"from": dlq})["redriven"] == 6
    assert dead.counts()[0] == 6
    answer = dead.post("redrive", {"all": True, "from": new_name("none")})
    refused(answer, 404, "topic_not_found")


def test_a_redrive_leaves_a_leased_letter(queue: Queue) -> None:
    """docs/EXTENSIONS.md, redrive [10.6-11]: the dead-letter topic is a queue of its own."""
    undertakers = Queue.made(queue.api, _dlq(queue), lease_ms=LONG_MS)
    queue.add(1, 2)
    _bury_all(queue, 2)
    [held] = undertakers.take("u")
    assert queue.redrive(all=True)["redriven"] == 1
    [job] = queue.take("w", 9)
    assert {held["data"], job["data"]} == {1, 2}
    assert undertakers.ack("u", seqs_of([held]))["acked"] == 1


def test_redrives_at_once_bring_each_letter_back_once(queue: Queue) -> None:
    """docs/EXTENSIONS.md, redrive [10.6-11]"""
    queue.add(*range(100))
    _bury_all(queue, 100)
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: queue.redrive(all=True), range(6)))
    assert sum(answer["redriven"] for answer in answers) == 100
    assert sorted(datas_of(queue.take("w", 1000))) == list(range(100))
    assert _letters(queue) == []


def test_a_redrive_into_a_full_queue_moves_nothing(api: Api, topic: str) -> None:
    """docs/EXTENSIONS.md, redrive [10.6-11]: the dead letters stay where they are."""
    dlq = f"{topic}.dlq"
    config: Json = {"max_deliveries": 2, "dead_letter": dlq, "discard": "reject", "cap_records": 3}
    queue = Queue.made(api, topic, **config)
    queue.add(1, 2, 3)
    _bury_all(queue, 3)
    queue.add("a", "b", "c")
    refused(queue.post("redrive", {"all": True}), 422, "topic_full")
    assert (queue.counts()[0], len(_letters(queue))) == (3, 3)
    assert queue.ack("w", seqs_of(queue.take("w", 3)))["acked"] == 3
    assert queue.redrive(all=True)["redriven"] == 3
    assert sorted(datas_of(queue.take("w", 9))) == [1, 2, 3]
