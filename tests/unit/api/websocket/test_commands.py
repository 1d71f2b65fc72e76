"""WebSocket messages: every field, every refusal, and payload bytes that stay unchanged."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topics_server.api.watch.requests import Start
from topics_server.api.websocket.commands import (
    OPS,
    Command,
    CommandLimits,
    Ping,
    Publish,
    RefusedCommandError,
    Subscribe,
    Unsubscribe,
    decode_command,
)
from topics_server.engine.subscribe.subscription import SubscriptionOptions
from topics_server.values.appends import decode_append
from topics_server.values.errors import Code
from topics_server.values.json_cache import DATA, META, TAGS
from topics_server.values.model import Durability, TopicConfig

NOT_U64 = ("-1", "1.0", "1e3", '"1"', "true", str(2**64), "[]", "{}", "null")
LIMITS = CommandLimits(max_limit=1000, max_topics=4, max_node_bytes=128, max_batch_records=100)
BAD_NAMES = ("", "-a", "a b", "a/b", "ä", "a\x00", "a" * 256)


def decode(text: str) -> Command:
    return decode_command(text, LIMITS)


def said(**fields: Any) -> Command:
    return decode(json.dumps(fields))


def refused(text: str) -> RefusedCommandError:
    with pytest.raises(RefusedCommandError) as caught:
        decode(text)
    return caught.value


def field_of(error: RefusedCommandError) -> object:
    assert error.refusal.code is Code.INVALID_REQUEST
    return error.refusal.detail.get("field")


# --- messages that are no commands --------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "x", "{", "[", '"ping"', "5", "null", "[]", "{} {}", '{"op":"ping"', "\ufeff{}"),
        *('{"op":"ping",}', '{"op":"ping"}}', '{"op":"ping","x":01}', '{"op":"pi\x00ng"}'),
        *('{"op":"ping","request_id":"\\ud800"}', "\ud800", '{"op":"ping","x":"\udfff"}'),
    ],
)
def test_text_that_is_no_object_is_refused(text: str) -> None:
    assert refused(text).refusal.code is Code.INVALID_REQUEST


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"op":"brew","request_id":"r"}', "'brew'"),
        ('{"op":"","request_id":"r"}', "''"),
        ('{"op":"Ping","request_id":"r"}', "'Ping'"),
        ('{"request_id":"r"}', "op"),
        ('{"op":5,"request_id":"r"}', "op"),
        ('{"op":null,"request_id":"r"}', "op"),
        ('{"op":["ping"],"request_id":"r"}', "op"),
    ],
)
def test_an_unknown_op_is_refused_with_its_request_id(text: str, told: str) -> None:
    error = refused(text)
    assert field_of(error) == "op"
    assert told in error.refusal.message
    assert error.request_id == "r"


def test_a_long_unknown_op_is_not_told_whole() -> None:
    error = refused(json.dumps({"op": "x" * 10_000}))
    assert len(error.refusal.message) < 200


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("sent", ["5", "{}", "[]", "true", '"' + "r" * 257 + '"'])
def test_a_request_id_is_a_string_of_at_most_256_characters(op: str, sent: str) -> None:
    error = refused(f'{{"op":"{op}","request_id":{sent},"topic":"jobs","records":[{{"data":1}}]}}')
    assert field_of(error) == "request_id"
    assert (error.op, error.request_id) == (op, None)


def test_a_request_id_may_be_null_empty_or_anything_else_of_256_characters() -> None:
    assert decode('{"op":"ping"}') == Ping(None)
    assert decode('{"op":"ping","request_id":null}') == Ping(None)
    assert decode('{"op":"ping","request_id":""}') == Ping("")
    assert said(op="ping", request_id="é\n" * 128) == Ping("é\n" * 128)


@pytest.mark.parametrize("depth", [513, 900, 5_000, 200_000])
@pytest.mark.parametrize("op", OPS)
def test_json_that_is_too_deep_is_refused(op: str, depth: int) -> None:
    deep = "[" * depth + "]" * depth
    records = f'[{{"data":{deep}}}]'
    text = f'{{"op":"{op}","request_id":"r","topic":"jobs","records":{records},"x":{deep}}}'
    error = refused(text)
    assert error.refusal.code is Code.INVALID_REQUEST
    assert "nested deeper than 512" in error.refusal.message


def test_unknown_fields_are_ignored() -> None:
    assert said(op="ping", request_id="r", colour=[1, {"a": None}]) == Ping("r")


def test_the_request_id_is_read_past_a_wrong_field() -> None:
    error = refused('{"op":"subscribe","topic":5,"request_id":"later"}')
    assert (field_of(error), error.op, error.request_id) == ("topic", "subscribe", "later")


# --- subscribe ----------------------------------------------------------------------------


def test_a_subscribe_has_the_defaults_of_a_watch() -> None:
    command = said(op="subscribe", topic="jobs")
    assert command == Subscribe(None, {"jobs": Start(0, False)}, SubscriptionOptions(), False)


def test_every_field_of_a_subscribe_is_taken() -> None:
    command = said(
        op="subscribe",
        request_id="s1",
        topic="voice-room:green",
        from_seq=7,
        tail=True,
        node="u017",
        limit=1000,
        max_batch_bytes=8_388_608,
        include_data=False,
        include_tags=True,
        include_meta=False,
        consistency="strong",
        wait=True,
    )
    options = SubscriptionOptions(1000, 8_388_608, frozenset({"u017"}), TAGS, strong=True)
    assert command == Subscribe("s1", {"voice-room:green": Start(7, True)}, options, True)


def test_clamped_fields_are_clamped() -> None:
    command = said(op="subscribe", topic="a", limit=5_000, max_batch_bytes=2**40)
    assert isinstance(command, Subscribe)
    assert (command.options.limit, command.options.max_bytes) == (1000, 8 * 2**20)
    command = said(op="subscribe", topic="a", limit=0, max_batch_bytes=0)
    assert isinstance(command, Subscribe)
    assert (command.options.limit, command.options.max_bytes) == (256, 2**20)


def test_topics_is_a_map_of_starts() -> None:
    command = said(
        op="subscribe", topics={"a": {}, "b": {"from_seq": 2**64 - 1}, "c": {"tail": 1 > 0}}
    )
    assert isinstance(command, Subscribe)
    assert list(command.starts.items()) == [
        ("a", Start()),
        ("b", Start(2**64 - 1)),
        ("c", Start(0, True)),
    ]
    assert command.options.shown == META | DATA


def test_nodes_may_be_several() -> None:
    command = said(op="subscribe", topic="a", node=["x", "y", "x"])
    assert isinstance(command, Subscribe)
    assert command.options.nodes == {"x", "y"}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "topic"),
        ({"topic": None}, "topic"),
        ({"topic": 5}, "topic"),
        ({"topic": "a", "topics": {"b": {}}}, "topics"),
        ({"topics": {}}, "topics"),
        ({"topics": []}, "topics"),
        ({"topics": {"a": 5}}, "topics.a"),
        ({"topics": {"a": {"tail": "yes"}}}, "topics.a.tail"),
        ({"topics": {"a": {"from_seq": 2**64}}}, "topics.a.from_seq"),
        ({"topics": {"a b": {}}}, "topics.a b"),
        ({"topics": {name: {} for name in "abcde"}}, "topics"),
        ({"topic": "a", "tail": 1}, "tail"),
        ({"topic": "a", "node": 5}, "node"),
        ({"topic": "a", "node": ["x", 5]}, "node[1]"),
        ({"topic": "a", "node": [str(number) for number in range(257)]}, "node"),
        ({"topic": "a", "include_data": "no"}, "include_data"),
        ({"topic": "a", "include_tags": None}, "include_tags"),
        ({"topic": "a", "include_meta": 0}, "include_meta"),
        ({"topic": "a", "consistency": "maybe"}, "consistency"),
    ],
)
def test_a_wrong_subscribe_is_refused_with_its_field(fields: dict[str, Any], field: str) -> None:
    error = refused(json.dumps({"op": "subscribe", "request_id": "s", **fields}))
    assert (field_of(error), error.request_id) == (field, "s")


@pytest.mark.parametrize("field", ["from_seq", "limit", "max_batch_bytes"])
@pytest.mark.parametrize("value", NOT_U64)
def test_numbers_are_whole_and_in_range(field: str, value: str) -> None:
    error = refused(f'{{"op":"subscribe","topic":"a","{field}":{value}}}')
    assert field_of(error) == field


@pytest.mark.parametrize("name", BAD_NAMES)
@pytest.mark.parametrize("op", ["subscribe", "unsubscribe", "publish"])
def test_a_bad_topic_name_is_refused(op: str, name: str) -> None:
    error = refused(json.dumps({"op": op, "topic": name, "records": [{"data": 1}]}))
    assert field_of(error) == "topic"


# --- unsubscribe, ping --------------------------------------------------------------------


def test_an_unsubscribe_has_one_topic_or_a_list() -> None:
    assert said(op="unsubscribe", request_id="u1", topic="a") == Unsubscribe("u1", ["a"], False)
    command = said(op="unsubscribe", topics=["b", "a", "b"])
    assert command == Unsubscribe(None, ["b", "a"], True)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "topic"),
        ({"topic": []}, "topic"),
        ({"topics": []}, "topics"),
        ({"topics": {"a": {}}}, "topics"),
        ({"topics": ["a", 5]}, "topics[1]"),
        ({"topics": ["a", "b c"]}, "topics[1]"),
        ({"topic": "a", "topics": ["b"]}, "topics"),
    ],
)
def test_a_wrong_unsubscribe_is_refused_with_its_field(fields: dict[str, Any], field: str) -> None:
    error = refused(json.dumps({"op": "unsubscribe", **fields}))
    assert field_of(error) == field


# --- publish ------------------------------------------------------------------------------


def test_a_publish_is_the_append_that_http_would_have_been_sent() -> None:
    text = (
        '{ "op": "publish", "config": {"durable" :true}, "topic":"jobs", "node" : "n\\u00e9",\n'
        '"records" : [ {"data" :  {"a":1, "a": 1e400 } , "meta":{ "k" : 1}}, {"data":null} ]  ,'
        '"request_id":"p1","create":true,"idempotency_key":"k\\n","disable_backpressure":false,'
        '"return_seqs":false,"other":[1,2]}'
    )
    command = decode(text)
    assert isinstance(command, Publish)
    assert command.body == (
        b'{"records":[ {"data" :  {"a":1, "a": 1e400 } , "meta":{ "k" : 1}}, {"data":null} ],'
        b'"node":"n\\u00e9","idempotency_key":"k\\n","create":true,"config":{"durable" :true},'
        b'"disable_backpressure":false}'
    )
    decoded = command.decoded
    assert list(map(bytes, decoded.datas)) == [b'{"a":1, "a": 1e400 }', b"null"]
    assert decoded.metas == [b'{ "k" : 1}', b""]
    assert decoded.nodes == ["né", "né"]
    assert (decoded.idempotency_key, decoded.create) == ("k\n", True)
    assert command.config == TopicConfig(durability=Durability.FSYNC)
    assert (command.request_id, command.topic, command.return_seqs) == ("p1", "jobs", False)


def test_a_publish_tells_its_seqs_unless_told_not_to() -> None:
    command = said(op="publish", topic="jobs", records=[{"data": 1}])
    assert isinstance(command, Publish)
    assert command.return_seqs
    assert command.config is None
    assert command.body == b'{"records":[{"data": 1}]}'


def test_nulls_of_a_publish_are_as_good_as_absent_where_http_says_so() -> None:
    command = said(
        op="publish", topic="a", records=[{"data": 1}], node=None, config=None, create=None
    )
    assert isinstance(command, Publish)
    assert command.config is None
    assert command.decoded.create is None


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"records": None}, "records"),
        ({"records": {}}, "records"),
        ({"records": [5]}, "records[0]"),
        ({"records": [{}]}, "records[0].data"),
        ({"records": [{"data": 1, "tag": 5}]}, "records[0].tag"),
        ({"records": [{"data": 1}, {"data": 1, "meta": []}]}, "records[1].meta"),
        ({"records": [{"data": 1}], "node": 5}, "node"),
        ({"records": [{"data": 1}], "idempotency_key": 5}, "idempotency_key"),
        ({"records": [{"data": 1}], "create": "yes"}, "create"),
        ({"records": [{"data": 1}], "config": 5}, "config"),
        ({"records": [{"data": 1}], "config": {"ttl_ms": -1}}, "config.ttl_ms"),
        ({"records": [{"data": 1}], "config": {"dead_letter": "jobs"}}, "config.dead_letter"),
        ({"records": [{"data": 1}], "disable_backpressure": 0}, "disable_backpressure"),
        ({"records": [{"data": 1}], "return_seqs": None}, "return_seqs"),
    ],
)
def test_a_wrong_publish_is_refused_with_its_field(fields: dict[str, Any], field: str) -> None:
    error = refused(json.dumps({"op": "publish", "request_id": "p", "topic": "jobs", **fields}))
    assert (field_of(error), error.op, error.request_id) == (field, "publish", "p")


def test_a_publish_needs_topic_and_records() -> None:
    assert field_of(refused('{"op":"publish","topic":"a"}')) == "records"
    assert field_of(refused('{"op":"publish","records":[{"data":1}]}')) == "topic"


def test_lone_surrogates_in_data_are_refused() -> None:
    error = refused('{"op":"publish","topic":"a","records":[{"data":"\\ud800"}]}')
    assert error.refusal.code is Code.INVALID_REQUEST


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(st.lists(json_values, min_size=1), st.sampled_from([None, 1, 3]), st.booleans())
def test_records_go_through_byte_for_byte(
    datas: list[Any], indent: int | None, ascii_only: bool
) -> None:
    raw = [json.dumps(data, indent=indent, ensure_ascii=ascii_only) for data in datas]
    records = ",\n ".join(f'{{"data" : {value} }}' for value in raw)
    command = decode(f'{{"topic":"a","records":[{records}],"op":"publish"}}')
    assert isinstance(command, Publish)
    sent = [value.encode() for value in raw]
    assert list(map(bytes, command.decoded.datas)) == sent
    assert list(map(bytes, decode_append(command.body).datas)) == sent


def test_random_text_is_a_command_or_refused() -> None:
    """For any input the result is a value or one kind of error."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    sound = [
        '{"op":"subscribe","topics":{"a":{"from_seq":3},"b":{"tail":true}},"node":["x"]}',
        '{"op":"publish","topic":"a","records":[{"data":{"k":[1,2,{"z":null}]},"tag":"t"}]}',
        '{"op":"unsubscribe","request_id":"u","topics":["a","b"]}',
        '{"op":"ping","request_id":"\\u00e9"}',
    ]
    letters = '{}[]":,\\0123456789.eE-+ntf \n\x00é\U0001f600ud8'
    kinds: set[type[Command]] = set()
    codes: list[Code] = []
    for _ in range(4_000):
        text = list(chance.choice(sound))
        for _ in range(chance.randrange(4)):
            place = chance.randrange(len(text))
            text[place : place + chance.randrange(3)] = chance.choices(
                letters, k=chance.randrange(3)
            )
        try:
            kinds.add(type(decode("".join(text))))
        except RefusedCommandError as error:
            codes.append(error.refusal.code)
    assert kinds == {Subscribe, Unsubscribe, Publish, Ping}
    assert set(codes) == {Code.INVALID_REQUEST}
