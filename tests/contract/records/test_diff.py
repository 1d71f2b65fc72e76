"""§3: reading the difference from a cursor: limits, filters, long-polls, budgets, progress."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.contract.conftest import NewServer, new_name
from tests.contract.driver import Api, Json, good, refused, seqs_of


class _LongestWait(threading.Thread):
    """A read that asks to wait for a minute, beside the tests of this file."""

    def __init__(self, api: Api) -> None:
        super().__init__()
        self._api = api
        self.page: Json = {}
        self.seconds = 0.0

    def run(self) -> None:
        """Send the read, and measure how long its answer takes."""
        client = Api(self._api.url, is_described=self._api.is_described)
        topic = new_name("t")
        good(client.put(topic))
        started = time.monotonic()
        self.page = client.read(topic, wait_ms=60_000)
        self.seconds = time.monotonic() - started
        client.close()


@pytest.fixture(scope="module", autouse=True)
def longest_wait(request: pytest.FixtureRequest, api: Api) -> Iterator[_LongestWait]:
    """It begins with the first test of this file, if its own test is to run."""
    found = _LongestWait(api)
    names = {item.name for item in request.session.items if item.path == request.path}
    if test_a_wait_ends_after_30_s_at_most.__name__ in names:
        found.start()
        yield found
        found.join()
    else:
        yield found


def _later(delay_s: float, call: Callable[[], object]) -> threading.Timer:
    timer = threading.Timer(delay_s, call)
    timer.start()
    return timer


def test_records_above_the_cursor_come_in_order(api: Api, topic: str) -> None:
    """Contract §3 [3-01, 3-02]"""
    api.add(topic, *range(10))
    assert seqs_of(api.read(topic, from_seq=0)) == list(range(1, 11))
    assert seqs_of(api.read(topic, from_seq=4)) == list(range(5, 11))
    assert seqs_of(api.read(topic, from_seq=9)) == [10]
    assert seqs_of(api.read(topic, from_seq=10)) == []


def test_an_empty_object_reads_from_the_start(api: Api, topic: str) -> None:
    """Contract §3 [3-02, 3-18]"""
    api.add(topic, *range(3))
    assert seqs_of(api.read(topic)) == [1, 2, 3]


def test_the_answer_is_complete(api: Api, topic: str) -> None:
    """Contract §3 [3-11, 3-12, 3-13, 0.7-02]"""
    api.add(topic, *range(10))
    page = api.read(topic, from_seq=2, limit=3)
    assert set(page) == {
        "topic",
        "records",
        "next_from_seq",
        "head_seq",
        "earliest_seq",
        "caught_up",
        "tombstone",
        "lag",
        "epoch",
        "performance",
    }
    assert page["topic"] == topic
    assert (page["next_from_seq"], page["head_seq"], page["earliest_seq"]) == (5, 10, 1)
    assert (page["caught_up"], page["tombstone"], page["lag"]) == (False, None, 5)
    last = api.read(topic, from_seq=5)
    assert (last["next_from_seq"], last["caught_up"], last["lag"]) == (10, True, 0)


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({}, 256),
        ({"limit": 0}, 256),
        ({"limit": 1}, 1),
        ({"limit": 300}, 300),
        ({"limit": 1000}, 1000),
        ({"limit": 1001}, 1000),
        ({"limit": 2**32 - 1}, 1000),
    ],
)
def test_limit_defaults_and_is_clamped(api: Api, topic: str, fields: Json, count: int) -> None:
    """Contract §3 [3-03, 3-16]"""
    api.add(topic, *range(1200))
    page = api.read(topic, **fields)
    assert seqs_of(page) == list(range(1, count + 1))
    assert page["next_from_seq"] == count
    assert page["caught_up"] is False


def test_the_largest_limit_is_a_setting(own: NewServer, topic: str) -> None:
    """Settled rules of the contract [S-13, 3-03]"""
    api = own(TOPICS_MAX_LIMIT="7").start()
    api.add(topic, *range(20))
    assert len(api.read(topic, limit=1000)["records"]) == 7
    assert len(api.read(topic)["records"]) == 7
    assert len(api.read_all(topic)) == 20


def test_tags_are_shown_only_on_request(api: Api, topic: str) -> None:
    """Contract §3 [3-05]"""
    api.add(topic, 1, tag="t")
    assert "$tag" not in api.read(topic)["records"][0]
    assert "$tag" not in api.read(topic, include_tags=False)["records"][0]
    assert api.read(topic, include_tags=True)["records"][0]["$tag"] == "t"


def test_meta_is_shown_unless_refused(api: Api, topic: str) -> None:
    """Contract §3 [3-06]"""
    api.add(topic, 1, meta={"a": 1})
    assert api.read(topic)["records"][0]["meta"] == {"a": 1}
    assert api.read(topic, include_meta=True)["records"][0]["meta"] == {"a": 1}
    record = api.read(topic, include_meta=False)["records"][0]
    assert "meta" not in record
    assert record["data"] == 1


@pytest.mark.parametrize("include_tags", [False, True])
@pytest.mark.parametrize("include_meta", [False, True])
def test_the_shown_fields_do_not_depend_on_the_page(
    api: Api, topic: str, include_tags: bool, include_meta: bool
) -> None:
    """§3: any cursor and limit select from the same list of records. [3-05, 3-06, 3.2-04,
    3.1-01]
    """
    for start in range(0, 600, 60):
        api.append(
            topic,
            [
                {"data": n, "tag": f"t{n}"} if n % 2 else {"data": n, "meta": {"n": n}}
                for n in range(start, start + 60)
            ],
        )
    options: Json = {"include_tags": include_tags, "include_meta": include_meta}
    whole = api.read(topic, limit=1000, **options)["records"]
    assert len(whole) == 600
    for from_seq, limit in ((0, 1), (0, 255), (100, 256), (255, 2), (256, 300), (511, 89)):
        page = api.read(topic, from_seq=from_seq, limit=limit, **options)
        assert page["records"] == whole[from_seq : from_seq + limit]


@pytest.mark.parametrize("include_tags", [False, True])
@pytest.mark.parametrize("include_meta", [False, True])
def test_sealed_records_are_those_of_the_tail_in_every_read(
    api: Api, topic: str, include_tags: bool, include_meta: bool
) -> None:
    """Contract §3; also if the read may wait, and if it is a consumer's."""
    for start in range(0, 600, 60):
        api.append(
            topic,
            [
                {"data": n, "tag": f"t{n}"} if n % 2 else {"data": {"n": n}, "meta": {"n": n}}
                for n in range(start, start + 60)
            ],
            node="ün",
        )
    options: Json = {"include_tags": include_tags, "include_meta": include_meta}
    before = api.read(topic, limit=1000, **options)["records"]
    good(api.http.post("/v0/admin/seal", json={"topics": [topic]}))
    good(api.http.put(f"/v0/topics/{topic}/consumers/c", json={"from": "earliest"}))
    asks: tuple[Json, ...] = ({}, {"wait_ms": 20_000}, {"consumer": "c"})
    for asked in asks:
        assert api.read(topic, limit=1000, **options, **asked)["records"] == before
        page = api.read(topic, from_seq=300, limit=7, **options, **asked)
        assert page["records"] == before[300:307]
        assert (page["next_from_seq"], page["caught_up"]) == (307, False)


def test_without_wait_an_empty_read_answers_at_once(api: Api, topic: str) -> None:
    """Contract §3 [3-07]"""
    api.put(topic)
    started = time.monotonic()
    assert api.read(topic, wait_ms=0)["records"] == []
    assert time.monotonic() - started < 5


def test_a_waiting_read_returns_when_a_record_comes(api: Api, topic: str) -> None:
    """Contract §3 [3-08]"""
    api.put(topic)
    timer = _later(0.3, lambda: api.add(topic, "woken"))
    started = time.monotonic()
    page = api.read(topic, wait_ms=20_000)
    took = time.monotonic() - started
    timer.join()
    assert [r["data"] for r in page["records"]] == ["woken"]
    assert page["caught_up"] is True
    assert 0.25 <= took < 10


def test_a_waiting_read_with_something_there_does_not_wait(api: Api, topic: str) -> None:
    """Contract §3 [3-08]"""
    api.add(topic, 1)
    started = time.monotonic()
    assert len(api.read(topic, wait_ms=20_000)["records"]) == 1
    assert time.monotonic() - started < 10


def test_many_waiting_reads_all_wake(api: Api, topic: str) -> None:
    """Contract §3 [3-08]"""
    api.put(topic)
    pages: list[Json] = []

    def wait() -> None:
        client = Api(api.url)
        pages.append(client.read(topic, wait_ms=20_000))
        client.close()

    threads = [threading.Thread(target=wait) for _ in range(8)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    api.add(topic, "for all")
    for thread in threads:
        thread.join(20)
    assert [[r["data"] for r in page["records"]] for page in pages] == [["for all"]] * 8


def test_a_waiting_read_ends_empty_when_the_time_is_up(api: Api, topic: str) -> None:
    """Contract §3 [3-09]"""
    api.add(topic, 1)
    started = time.monotonic()
    page = api.read(topic, from_seq=1, wait_ms=400)
    assert time.monotonic() - started >= 0.39
    assert page["records"] == []
    assert (page["next_from_seq"], page["caught_up"]) == (1, True)


@pytest.mark.parametrize("wait_ms", [30_001, 2**32 - 1])
def test_a_longer_wait_is_clamped_not_refused(api: Api, topic: str, wait_ms: int) -> None:
    """§3: a read with a long wait is accepted, and a new record ends the wait. [3-10, 3-16]"""
    api.put(topic)
    timer = _later(0.2, lambda: api.add(topic, 1))
    assert len(api.read(topic, wait_ms=wait_ms)["records"]) == 1
    timer.join()


def test_a_waiting_read_goes_on_over_records_it_may_not_see(api: Api, topic: str) -> None:
    """Contract §3 [3-19]"""
    api.put(topic)
    timers = [
        _later(0.2, lambda: api.add(topic, "mine", node="me")),
        _later(0.6, lambda: api.add(topic, "yours", node="you")),
    ]
    page = api.read(topic, node="me", wait_ms=20_000)
    for timer in timers:
        timer.join()
    assert [r["data"] for r in page["records"]] == ["yours"]
    assert page["next_from_seq"] == 2


def test_a_wait_that_saw_only_hidden_records_moves_its_cursor(api: Api, topic: str) -> None:
    """Contract §3, §3.2 [3-19, 3.2-02]"""
    api.put(topic)
    timer = _later(0.2, lambda: api.add(topic, 1, 2, node="me"))
    page = api.read(topic, node="me", wait_ms=800)
    timer.join()
    assert page["records"] == []
    assert page["next_from_seq"] == 2


def test_a_waiting_read_of_a_topic_that_is_deleted_ends(api: Api, topic: str) -> None:
    """§3: the read gets 404 when the topic is deleted. [3-15]"""
    api.put(topic)
    timer = _later(0.3, lambda: api.drop(topic))
    answer = api.diff(topic, wait_ms=5_000)
    timer.join()
    refused(answer, 404, "topic_not_found")


def test_a_client_that_disconnects_while_waiting_harms_no_other(api: Api, topic: str) -> None:
    """Contract §3 [3-08]"""
    api.put(topic)
    for _ in range(5):
        with pytest.raises(httpx.ReadTimeout):
            api.http.post(f"/v0/topics/{topic}/diff", json={"wait_ms": 20_000}, timeout=0.1)
    assert api.add(topic, 1)["head_seq"] == 1
    assert len(api.read(topic, wait_ms=1000)["records"]) == 1


def test_expired_deleted_and_own_records_are_skipped(api: Api, topic: str) -> None:
    """Contract §3 [3-14, 3.2-01, 3.2-02]"""
    api.append(
        topic,
        [{"data": n, "node": "me" if n % 3 == 0 else "you", "tag": f"t{n}"} for n in range(1, 10)],
    )
    api.delete(topic, match="t4")
    page = api.read(topic, node="me")
    assert seqs_of(page) == [1, 2, 5, 7, 8]
    assert page["next_from_seq"] == 9
    assert page["caught_up"] is True


def test_reading_an_absent_topic_creates_nothing(api: Api, topic: str) -> None:
    """Contract §3 [3-15]"""
    refused(api.diff(topic), 404, "topic_not_found")
    refused(api.diff(topic, wait_ms=2000), 404, "topic_not_found")
    refused(api.state(topic), 404, "topic_not_found")


WRONG: dict[str, tuple[object, ...]] = {
    "from_seq": (-1, 1.0, "1", True, 2**64, [], {}),
    "limit": (-1, 1.0, "1", True, []),
    "wait_ms": (-1, 1.0, "1", True, []),
    "node": (1, True, {}, [1], ["a", None]),
    "include_tags": (1, "true", [], 0),
    "include_meta": (1, "true", [], 0),
    "max_batch_bytes": (-1, 1.0, "1", True, []),
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in WRONG.items() for value in values]
)
def test_a_wrong_type_is_refused_by_its_field(
    api: Api, topic: str, field: str, value: object
) -> None:
    """Contract §3, settled rules [3-16, S-21, S-24]"""
    api.put(topic)
    where: str = refused(api.diff(topic, **{field: value}), 400, "invalid_request")["field"]
    assert where == field or where.startswith(f"{field}[")


def test_a_read_raises_the_priority(api: Api, topic: str) -> None:
    """Contract §3 [3-17]"""
    api.put(topic)
    assert api.get_state(topic)["effective_priority"] == 0
    api.read(topic)
    assert api.get_state(topic)["effective_priority"] > 400


def test_reading_changes_nothing_and_can_be_repeated(api: Api, topic: str) -> None:
    """Contract §3, §3.1 [3-21, 3.1-01, 3.1-02]"""
    api.add(topic, *range(20))
    first = api.read(topic, from_seq=5, limit=10)
    api.read(topic, from_seq=20)
    second = api.read(topic, from_seq=5, limit=10)
    for page in (first, second):
        page.pop("performance")
    assert first == second
    assert api.get_state(topic)["count"] == 20
    assert len(api.read_all(topic)) == 20


def test_filtered_records_are_not_examined_again(api: Api, topic: str) -> None:
    """Contract §3.2 [3.2-01, 3.2-02, 3.2-03]"""
    api.append(topic, [{"data": n, "node": "me"} for n in range(500)])
    api.append(topic, [{"data": "other"}])
    page = api.read(topic, node="me", limit=1)
    assert [r["data"] for r in page["records"]] == ["other"]
    assert page["next_from_seq"] == 501
    again = api.read(topic, node="me", from_seq=501)
    assert again["performance"]["records_scanned"] == 0


def test_an_empty_page_is_not_the_end_unless_caught_up(api: Api, topic: str) -> None:
    """Contract §3.2 [3.2-02, 3.2-03]"""
    api.append(topic, [{"data": n, "node": "me"} for n in range(10)])
    page = api.read(topic, node="me")
    assert page["records"] == []
    assert page["next_from_seq"] == 10
    assert page["caught_up"] is True


@pytest.mark.parametrize("limit", [1, 2, 7, 255, 256, 257, 1000])
def test_following_the_cursor_visits_every_live_record_once(
    api: Api, topic: str, limit: int
) -> None:
    """Contract §3.2 [3.2-04]"""
    api.append(
        topic,
        [{"data": n, "node": f"n{n % 4}", "tag": f"t{n % 10}"} for n in range(1, 601)],
    )
    api.delete(topic, match="t3")
    api.delete(topic, before_seq=50)
    expected = [n for n in range(50, 601) if n % 10 != 3 and n % 4 != 1]
    read = [r["data"] for r in api.read_all(topic, node="n1", limit=limit)]
    assert read == expected


def test_a_page_stops_at_one_mib_by_default(api: Api, topic: str) -> None:
    """Contract §11 [11-09]"""
    for _ in range(30):
        api.add(topic, "x" * 100_000)
    page = api.read(topic, limit=1000)
    assert 5 <= len(page["records"]) <= 11
    assert page["caught_up"] is False
    assert page["next_from_seq"] == len(page["records"])
    assert len(api.read_all(topic)) == 30


@pytest.mark.parametrize(
    ("budget", "least", "most"),
    [(1, 1, 1), (150_000, 1, 2), (450_000, 3, 5), (0, 5, 11), (None, 5, 11)],
)
def test_the_budget_can_be_set(
    api: Api, topic: str, budget: int | None, least: int, most: int
) -> None:
    """Contract §11 [11-10, 11-09]"""
    for _ in range(20):
        api.add(topic, "x" * 100_000)
    fields = {} if budget is None else {"max_batch_bytes": budget}
    page = api.read(topic, limit=1000, **fields)
    assert least <= len(page["records"]) <= most
    assert page["next_from_seq"] == len(page["records"])
    assert len(api.read_all(topic, **fields)) == 20


def test_the_budget_is_clamped_to_8_mib(api: Api, topic: str) -> None:
    """Contract §11 [11-10]"""
    for _ in range(12):
        api.add(topic, *["x" * 1_000_000])
    page = api.read(topic, max_batch_bytes=2**40)
    assert 7 <= len(page["records"]) <= 9
    assert page["caught_up"] is False


def test_one_record_is_always_delivered(api: Api, topic: str) -> None:
    """Contract §11 [11-09]"""
    big = "x" * 1_040_000
    api.add(topic, big, big, big)
    page = api.read(topic, max_batch_bytes=10)
    assert seqs_of(page) == [1]
    assert len(api.read_all(topic)) == 3


def _fill_with_own(api: Api, topic: str, count: int) -> None:
    for _ in range(count // 10_000):
        records = [{"data": 0, "node": "me"}] * 10_000
        answer = api.http.post(f"/v0/topics/{topic}?return_seqs=false", json={"records": records})
        assert good(answer)["count"] == 10_000


def test_one_read_examines_a_bounded_number_of_records(api: Api, topic: str) -> None:
    """Settled rules of the contract [S-62, 3.2-03]"""
    _fill_with_own(api, topic, 70_000)
    page = api.read(topic, node="me")
    assert page["records"] == []
    assert page["caught_up"] is False
    assert page["next_from_seq"] == 65_536
    assert page["performance"]["records_scanned"] == 65_536
    rest = api.read(topic, node="me", from_seq=page["next_from_seq"])
    assert (rest["next_from_seq"], rest["caught_up"]) == (70_000, True)


def test_a_long_poll_goes_on_past_the_scan_bound(api: Api, topic: str) -> None:
    """Settled rules of the contract [S-63]"""
    _fill_with_own(api, topic, 70_000)
    timer = _later(0.5, lambda: api.add(topic, "yours", node="you"))
    page = api.read(topic, node="me", wait_ms=20_000)
    timer.join()
    assert [r["data"] for r in page["records"]] == ["yours"]
    assert page["next_from_seq"] == 70_001


@pytest.mark.parametrize("from_seq", [2**53, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_cursor_far_beyond_the_head_is_answered(api: Api, topic: str, from_seq: int) -> None:
    """Any u64 is a cursor; above the head it reads as a recreated topic. [S-24, S-39]"""
    api.add(topic, 1)
    page = api.read(topic, from_seq=from_seq)
    assert page["tombstone"]["reason"] == "recreated"
    assert [r["data"] for r in page["records"]] == [1]


@pytest.mark.slow
def test_a_wait_ends_after_30_s_at_most(longest_wait: _LongestWait) -> None:
    """Contract §3 [3-10]"""
    longest_wait.join()
    assert longest_wait.page["records"] == []
    assert 29 <= longest_wait.seconds < 45
