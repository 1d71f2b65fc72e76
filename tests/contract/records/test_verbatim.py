"""README "Settled here": verbatim means bytes. Compares the bytes of the response."""

from __future__ import annotations

import json
import re

import pytest

from tests.contract.driver import Api, refused

JSON = ["Content-Type: application/json; charset=utf-8"]

VALUES: dict[str, bytes] = {
    "white space inside": b'{ "a" :\t[ 1 ,\r\n 2 ]  , "b":{ } }',
    "a float that overflows": b"1e400",
    "a float that underflows": b"-1E-400",
    "an integer above 64 bits": b"1180591620717411303424",
    "a long integer": b"9" * 400,
    "minus zero": b"-0",
    "minus zero float": b"-0.0e-0",
    "trailing zeros": b"1.50000000000000000000000000",
    "an exponent with plus": b"1E+2",
    "duplicate keys": b'{"a":1,"a":2,"a":{"b":1,"b":1}}',
    "keys out of order": b'{"z":1,"a":2}',
    "escapes kept as escapes": rb'"\u0041\/\b\f\n\r\t\"\\"',
    "the null character": rb'"\u0000"',
    "a surrogate pair": rb'"\ud83d\ude00"',
    "a surrogate pair in capitals": rb'"\uD83D\uDE00"',
    "an escaped backslash before u": rb'"\\ud800"',
    "utf-8": '"äß水😀\u2028\u2029\ufeff\u007f"'.encode(),
    "a noncharacter": '"\uffff\U0010ffff"'.encode(),
    "brackets in a string": b'"[[[{{{]]]"',
    "an empty key": b'{"":{"":[]}}',
    "html": b'"</script><!-- & -->"',
    "nothing": b"null",
    "an empty string": b'""',
    "a long string": b'"' + b"x" * 100_000 + b'"',
}


def _append(api: Api, topic: str, record: bytes) -> int:
    body = b'{"records":[' + record + b"]}"
    return api.raw("POST", f"/v0/topics/{topic}", body, JSON).status


def _diff(api: Api, topic: str) -> bytes:
    answer = api.raw("POST", f"/v0/topics/{topic}/diff", b"{}", JSON)
    assert answer.status == 200
    return answer.body


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_data_comes_back_byte_for_byte(api: Api, topic: str, value: bytes) -> None:
    """Contract §0.3, settled rules [S-01, S-02, S-03, 0.3-03]"""
    assert _append(api, topic, b'{ "data" :  ' + value + b"  }") == 201
    assert re.search(rb'"data": ?' + re.escape(value) + rb"[,}]", _diff(api, topic))


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_meta_comes_back_byte_for_byte(api: Api, topic: str, value: bytes) -> None:
    """Contract §0.3, settled rules [S-01, S-02, S-03]"""
    if len(value) > 10_000:
        value = value[:5000] + value[-1:]
    meta = b'{ "k" : ' + value + b' , "k":1 }'
    assert _append(api, topic, b'{"meta":' + meta + b',"data":0}') == 201
    assert re.search(rb'"meta": ?' + re.escape(meta) + rb"[,}]", _diff(api, topic))


def test_white_space_around_a_value_is_not_part_of_it(api: Api, topic: str) -> None:
    """Only the value's own bytes are kept, not the white space around it in the request.
    [S-01]
    """
    assert _append(api, topic, b'\n{\t"data"\r:\n "x" \t, "meta" : {} }\n') == 201
    body = _diff(api, topic)
    assert re.search(rb'"data": ?"x"[,}]', body)
    assert re.search(rb'"meta": ?\{\}[,}]', body)


def test_many_records_keep_their_own_bytes(api: Api, topic: str) -> None:
    """Settled rules: the bytes stay in each block of a page, and on several pages. [S-01]"""
    values = [b'{ "n":%d , "pad":"%s"}' % (n, b"p" * (n % 97)) for n in range(1500)]
    records = b",".join(b'{"data":' + value + b"}" for value in values)
    assert api.raw("POST", f"/v0/topics/{topic}", b'{"records":[' + records + b"]}", JSON).status
    seen: list[bytes] = []
    cursor = 0
    while True:
        body = b'{"from_seq":%d,"limit":700}' % cursor
        page = api.raw("POST", f"/v0/topics/{topic}/diff", body, JSON)
        seen += re.findall(rb'"data": ?(\{ "n":\d+ , "pad":"p*"\})', page.body)
        cursor = page.json()["next_from_seq"]
        if page.json()["caught_up"]:
            break
    assert seen == values


@pytest.mark.parametrize("data", [b'{"a":%s}', b"[%s]", b"%s"])
@pytest.mark.parametrize(
    "value",
    [
        rb'"\ud800"',
        rb'"\udc00"',
        rb'"\ud800\ud800"',
        rb'"\ud800x"',
        rb'"\ud800\u0041"',
        rb'"\udc00\ud800"',
        rb'"\uDFFF"',
    ],
)
def test_a_lone_surrogate_is_refused(api: Api, topic: str, data: bytes, value: bytes) -> None:
    """Settled rules of the contract [S-04]"""
    body = b'{"records":[{"data":' + data % value + b"}]}"
    refused(api.raw("POST", f"/v0/topics/{topic}", body, JSON), 400, "invalid_request")
    refused(api.state(topic), 404, "topic_not_found")


@pytest.mark.parametrize(
    "data", [b'"\xff"', b'"\xc0\xaf"', b'"\xed\xa0\x80"', b'"\xf4\x90\x80\x80"', b'"\xe4\xb8"']
)
@pytest.mark.parametrize("place", [b'{"data":%s}', b'{"data":1,"meta":{"k":%s}}'])
def test_invalid_utf8_is_refused(api: Api, topic: str, data: bytes, place: bytes) -> None:
    """Settled rules of the contract [S-05]"""
    body = b'{"records":[' + place % data + b"]}"
    refused(api.raw("POST", f"/v0/topics/{topic}", body, JSON), 400, "invalid_request")
    refused(api.state(topic), 404, "topic_not_found")


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_nesting_of_512_is_taken_and_513_refused(
    api: Api, topic: str, opening: bytes, closing: bytes
) -> None:
    """Settled rules of the contract [S-06]"""
    deepest = opening * 511 + (b"[]" if opening == b"[" else b"{}") + closing * 511
    assert _append(api, topic, b'{"data":' + deepest + b"}") == 201
    assert b'"data":' + deepest in _diff(api, topic).replace(b'"data": ', b'"data":')
    deeper = opening + deepest + closing
    for value in (deeper, opening * 5000 + b"0" + closing * 5000, opening * 200_000):
        body = b'{"records":[{"data":' + value + b"}]}"
        answer = api.raw("POST", f"/v0/topics/{topic}", body, JSON)
        refused(answer, 400, "invalid_request")
    meta = b'{"data":1,"meta":{"m":' + deepest + b"}}"
    body = b'{"records":[' + meta + b"]}"
    refused(api.raw("POST", f"/v0/topics/{topic}", body, JSON), 400, "invalid_request")
    assert api.get_state(topic)["head_seq"] == 1


def test_width_is_not_depth(api: Api, topic: str) -> None:
    """Thousands of brackets side by side, or inside strings, are not nesting. [S-06]"""
    wide = b"[" + b",".join([b"[{}]"] * 5000) + b"]"
    text = b'"' + rb"[{\"" * 2000 + b'"'
    assert _append(api, topic, b'{"data":[' + wide + b"," + text + b"]}") == 201
    assert wide in _diff(api, topic)


@pytest.mark.parametrize("suffix", ["", "/diff", "/delete"])
def test_a_byte_order_mark_is_refused(api: Api, topic: str, suffix: str) -> None:
    """Settled rules of the contract [S-82]"""
    api.add(topic, 1)
    body = b"\xef\xbb\xbf" + json.dumps({"records": [{"data": 1}], "before_seq": 9}).encode()
    answer = api.raw("POST", f"/v0/topics/{topic}{suffix}", body, JSON)
    refused(answer, 400, "invalid_request")
    assert api.get_state(topic)["count"] == 1


def test_tag_and_node_come_back_as_the_same_text(api: Api, topic: str) -> None:
    """Contract §0.4 [0.4-02]"""
    for text in ("a", "ä水😀", 'quote"\\', "tab\t", "\u2028", "</x>", " "):
        api.append(topic, [{"data": 0, "tag": text, "node": text}])
        record = api.read(topic, from_seq=api.get_state(topic)["head_seq"] - 1, include_tags=True)
        assert record["records"][0]["$tag"] == text
        assert record["records"][0]["$node"] == text
