// The client against a faked server: what it sends, when it tries again, and how it reads frames.
import assert from "node:assert/strict";
import { test } from "node:test";
import { Refused, Topics, Unreachable } from "../../clients/js/topics.js";

const json = (value, status = 200, headers = {}) => new Response(JSON.stringify(value), { status, headers: { "content-type": "application/json", ...headers } });
const refused = (status, code = "some_code", detail, headers) => json({ error: { code, message: "no", detail } }, status, headers);
const frame = (event, value, id) => `${id === undefined ? "" : `id: ${id}\n`}event: ${event}\ndata: ${JSON.stringify(value)}\n\n`;
const records = (topic, from, ...seqs) => ({ topic, records: seqs.map(($seq) => ({ $seq, $ts: 1, data: $seq })), from_seq: from, to_seq: seqs.at(-1), head_seq: 99 });
const stream = (...chunks) => new Response(new ReadableStream({
  start(controller) {
    for (const chunk of chunks) controller.enqueue(typeof chunk === "string" ? new TextEncoder().encode(chunk) : chunk);
    controller.close();
  },
}), { headers: { "content-type": "text/event-stream" } });
// The states of topics, which are asked for once before a stream.
const states = (...names) => names.map((topic) => json({ topic, epoch: 1 }));
const idAlone = (id) => `id: ${id}\n\n`;

// A client whose server gives these answers in order, and what it asked and how long it paused.
function faked(answers, options = {}) {
  const asked = [], pauses = [];
  const fetch = async (url, request) => {
    asked.push({ url, ...request, body: request.body && JSON.parse(request.body) });
    assert.ok(answers.length, `nothing answers ${url}`);
    const answer = answers.shift();
    if (answer instanceof Error) throw answer;
    return typeof answer === "function" ? answer(url) : answer;
  };
  const pause = async (ms, signal) => { pauses.push(ms); signal?.throwIfAborted(); };
  return { topics: new Topics("http://faked/prefix/", { fetch, pause, random: () => 0.5, ...options }), asked, pauses };
}

async function collected(items, most = Infinity) {
  const found = [];
  for await (const item of items) {
    found.push(item);
    if (found.length >= most) break;
  }
  return found;
}

test("an append is tried again with the same key, and the key of the caller wins", async () => {
  const { topics, asked } = faked([new TypeError("reset"), refused(503), json({ seqs: [1] }), json({ seqs: [2] })], { key: " secret " });
  assert.deepEqual(await topics.append("a b", { data: 1 }), { seqs: [1] });
  assert.equal(new Set(asked.map((request) => request.body.idempotency_key)).size, 1);
  assert.match(asked[0].body.idempotency_key, /^[0-9a-f]{32}$/);
  assert.equal(asked[0].url, "http://faked/prefix/v0/topics/a%20b");
  assert.equal(asked[0].headers.authorization, "Bearer secret");
  await topics.append("t", [{ data: 2 }], { idempotencyKey: "mine" });
  assert.equal(asked.at(-1).body.idempotency_key, "mine");
  assert.deepEqual(asked.at(-1).body.records, [{ data: 2 }]);
});

test("pauses grow, have chance in them, and never end before the server says", async () => {
  const { topics, pauses } = faked([refused(429, "throttled", undefined, { "retry-after": "2" }), refused(503, "not_ready", { retry_after_ms: 1500 }),
    refused(500, "internal"), json({})]);
  await topics.call("/v0/topics");
  assert.deepEqual(pauses, [2000 + 75, 1500 + 150, 300]);
  const dated = faked([refused(503, "not_ready", undefined, { "retry-after": new Date(Date.now() + 20_000).toUTCString() }), json({})]);
  await dated.topics.call("/v0/topics");
  assert.ok(dated.pauses[0] > 15_000 && dated.pauses[0] < 21_000, dated.pauses);
});

test("only no answer, 408, 429 and the statuses of servers and proxies that restart are passing", async () => {
  for (const status of [408, 429, 500, 502, 503, 504]) {
    const { topics, asked } = faked([new Response("<html>", { status }), json({})]);
    await topics.call("/v0/topics");
    assert.equal(asked.length, 2);
  }
  for (const status of [400, 401, 403, 404, 409, 410, 413, 422, 501, 505]) {
    const { topics, asked } = faked([refused(status, "code", { field: "x" })]);
    await assert.rejects(topics.call("/v0/topics"), (error) => error instanceof Refused && error.status === status && error.code === "code" && error.detail.field === "x");
    assert.equal(asked.length, 1);
  }
  const foreign = faked([new Response("<html>", { status: 404 })]);
  await assert.rejects(foreign.topics.call("/v0/topics"), { code: "http_404" });
  const page = faked([new Response("<html>")]);
  await assert.rejects(page.topics.call("/v0/topics"), { code: "bad_answer" });
});

test("a call ends with its last error when its patience is over", async () => {
  const told = [];
  const { topics, pauses } = faked(Array.from({ length: 100 }, () => new TypeError("down")), { patienceMs: 1_000 });
  await assert.rejects(topics.call("/v0/topics", { onRetry: (error, ms) => told.push([error.name, ms]) }), Unreachable);
  assert.deepEqual(pauses, [75, 150, 300]);
  assert.deepEqual(told, pauses.map((ms) => ["Unreachable", ms]));
  const asked = faked([refused(503, "not_ready", { retry_after_ms: 60_000 })]);
  await assert.rejects(asked.topics.call("/v0/topics"), { status: 503 });
});

test("a pause that a server asks for is an hour at most: a timer takes no more than 31 bits", async () => {
  const hour = 3_600_000;
  for (const wait of ["9".repeat(30), "3000000", new Date(Date.now() + 400 * 24 * hour).toUTCString()]) {
    const { topics, pauses } = faked([refused(503, "not_ready", undefined, { "retry-after": wait }), json({})], { patienceMs: Infinity });
    await topics.call("/v0/topics");
    assert.deepEqual(pauses, [hour + 75]);
  }
  for (const wait of ["", "soon", "-5", "0x10", "1e9"]) {
    const { topics, pauses } = faked([refused(503, "not_ready", undefined, { "retry-after": wait }), json({})]);
    await topics.call("/v0/topics");
    assert.deepEqual(pauses, [75], wait);
  }
  const { topics, pauses } = faked([refused(503, "not_ready", { retry_after_ms: 1e300 }), refused(503, "not_ready", { retry_after_ms: -1 }), json({})], { patienceMs: Infinity });
  await topics.call("/v0/topics");
  assert.deepEqual(pauses, [hour + 75, 150]);
});

test("wrong addresses, keys and names are told at once, and no error shows a key", async () => {
  for (const url of ["localhost:4000", "", "ftp://host", "http://", "//host"]) assert.throws(() => new Topics(url), /is not the URL of a server/, url);
  for (const url of ["http://me:hush@host", "https://hush@host/prefix"]) assert.throws(() => new Topics(url), (error) => error instanceof TypeError && !error.message.includes("hush"));
  for (const key of ["hush\nhush", "hush hush", "hüsh", "hush\0"]) assert.throws(() => new Topics("http://host", { key }), (error) => /^character [25] of the key/.test(error.message) && !error.message.includes("sh h"));
  const { topics, asked } = faked([]);
  for (const name of [".", "..", ""]) {
    await assert.rejects(topics.append(name, { data: 1 }), TypeError);
    await assert.rejects(collected(topics.read(name)), TypeError);
    await assert.rejects(collected(topics.live(name)), TypeError);
  }
  assert.equal(asked.length, 0);
});

test("a call without an answer ends in time", async () => {
  const fetch = (_url, { signal }) => new Promise((_, reject) => signal.addEventListener("abort", () => reject(signal.reason)));
  const topics = new Topics("http://faked", { fetch, timeoutMs: 5, patienceMs: 0 });
  await assert.rejects(topics.call("/v0/topics"), /no answer in time/);
  const stop = new AbortController();
  const waiting = topics.call("/v0/topics", { signal: stop.signal });
  stop.abort(new Error("enough"));
  await assert.rejects(waiting, /enough/);
});

test("a server that ends every stream behind its first frame is asked less and less often", async () => {
  const answers = [...states("t"), ...Array.from({ length: 12 }, () => () => stream("retry: 2000\n\n", frame("caught-up", { topic: "t", head_seq: 0 }, "a")))];
  const { topics, asked, pauses } = faked([...answers, refused(401, "unauthorized")]);
  await assert.rejects(collected(topics.live("t")), { code: "unauthorized" });
  assert.deepEqual(pauses, [375, 750, 1500, 3000, 6000, ...Array(7).fill(11_250)]);
  assert.equal(asked.filter((request) => !request.url.includes("/live")).length, 1);
  assert.equal(asked[1].url, "http://faked/prefix/v0/topics/t/live?heartbeat_ms=15000");
  assert.equal(asked[1].headers["last-event-id"], undefined);
  assert.equal(asked[2].headers["last-event-id"], "a");
  assert.equal(new Set(asked.slice(1).map((request) => request.url)).size, 1);
});

test("records begin the pauses anew", async () => {
  const piece = (seq) => () => stream(frame("record", records("t", seq - 1, seq), `id${seq}`));
  const { topics, asked, pauses } = faked([...states("t"), new TypeError("down"), new TypeError("down"), piece(1), piece(2), piece(3), refused(403, "forbidden")]);
  const items = [];
  await assert.rejects((async () => { for await (const item of topics.live("t")) items.push(item); })(), { code: "forbidden" });
  assert.deepEqual(items.map((item) => item.seq), [1, 2, 3]);
  assert.deepEqual(pauses, [375, 750, 375, 375, 375]);
  assert.equal(asked.at(-1).headers["last-event-id"], "id3");
});

test("a live gives up when its patience is over without an item", async () => {
  const { topics } = faked([...states("t"), ...Array.from({ length: 50 }, () => () => stream(frame("caught-up", { topic: "t", head_seq: 0 }, "a")))]);
  await assert.rejects(collected(topics.live("t", { patienceMs: 5_000 })), Unreachable);
});

test("frames are read from any pieces: cut characters, long lines, comments, several data lines", async () => {
  const text = `: hb 1\n\nid: x\nevent: record\ndata: {"topic":"t","records":[{"$seq":1,"$ts":1,\ndata: "data":"é😀${"y".repeat(5000)}"}],"from_seq":0,"to_seq":1,"head_seq":1}\n\n`;
  for (const size of [1, 3, 1024, 100_000]) for (const breaks of ["\n", "\r\n"]) {
    const bytes = new TextEncoder().encode(text.replaceAll("\n", breaks));
    const chunks = [];
    for (let at = 0; at < bytes.length; at += size) chunks.push(bytes.slice(at, at + size));
    const { topics } = faked([...states("t"), stream(...chunks)]);
    const [item] = await collected(topics.live("t"), 1);
    assert.equal(item.data, `é😀${"y".repeat(5000)}`);
    assert.equal(item.cursor, JSON.stringify({ id: "x" }));
  }
});

test("an id alone is a position, and a stream goes on behind the last one", async () => {
  const { topics, asked } = faked([...states("t"), stream("retry: 2000\n\n", idAlone("start")), stream(idAlone("skipped")), stream(frame("record", records("t", 0, 1, 2), "two")), refused(403)]);
  const items = [];
  await assert.rejects((async () => { for await (const item of topics.live("t")) items.push(item); })(), { status: 403 });
  assert.deepEqual(asked.slice(1).map((request) => request.headers["last-event-id"]), [undefined, "start", "skipped", "two"]);
  assert.deepEqual(items.map((item) => JSON.parse(item.cursor)), [{ id: "skipped", handled: { t: 1 } }, { id: "two" }]);
  const again = faked([stream(frame("record", records("t", 0, 1, 2), "two"))]);
  assert.deepEqual((await collected(again.topics.live("t", { cursor: items[0].cursor }), 1)).map((item) => item.seq), [2]);
  assert.equal(again.asked[0].headers["last-event-id"], "skipped");
});

test("a topic that does not exist is refused, or waited for", async () => {
  const { topics } = faked([refused(404, "topic_not_found")]);
  await assert.rejects(collected(topics.live("t")), { code: "topic_not_found" });
  const waiting = faked([stream(frame("record", records("t", 0, 1), "x"))]);
  assert.equal((await collected(waiting.topics.live("t", { wait: true }), 1))[0].seq, 1);
  const anew = faked([refused(404, "topic_not_found"), stream(frame("record", records("t", 0, 1), "x"))]);
  const cursor = JSON.stringify({ topic: "t", seq: 7, epoch: 1 });
  assert.deepEqual((await collected(anew.topics.live("t", { cursor, wait: true }), 2)).map((item) => item.reason ?? item.seq), ["recreated", 1]);
});

test("the address of a stream has its start, its filter and its members", async () => {
  const path = async (topics, options) => {
    const { topics: client, asked } = faked([refused(403)]);
    await assert.rejects(collected(client.live(topics, { wait: true, ...options })), { status: 403 });
    const { pathname, searchParams } = new URL(asked[0].url);
    return [pathname.replace("/prefix", ""), Object.fromEntries(searchParams)];
  };
  const heartbeat_ms = "15000";
  assert.deepEqual(await path("a b", { from: 7 }), ["/v0/topics/a%20b/live", { from_seq: "7", heartbeat_ms }]);
  assert.deepEqual(await path(["a", "b"], { since: "10m", limit: 5, includeMeta: false }), ["/v0/live", { topics: "a,b", since: "10m", limit: "5", include_meta: "false", heartbeat_ms }]);
  assert.deepEqual(await path("t", { last: 3, filter: "paid" }), ["/v0/topics/t/live", { last: "3", filter: '"paid"', heartbeat_ms }]);
  assert.deepEqual(await path("t", { tail: true, node: "me" }), ["/v0/topics/t/live", { tail: "true", filter: '["Not",["node","In",["me"]]]', heartbeat_ms }]);
  assert.deepEqual(await path("t", { filter: "paid", node: ["a", "b"] }), ["/v0/topics/t/live", { filter: '["And","paid",["Not",["node","In",["a","b"]]]]', heartbeat_ms }]);
  assert.deepEqual(await path("t", { cursor: JSON.stringify({ from: { t: 4 } }) }), ["/v0/topics/t/live", { from_seq: "4", heartbeat_ms }]);
});

test("a cursor inside a frame goes on behind its record, beside other topics too", async () => {
  const both = () => stream(frame("record", records("b", 0, 1), "b1"), frame("record", records("a", 0, 1, 2, 3), "a3"), frame("record", records("b", 1, 2), "b2"));
  const first = faked([...states("a", "b"), both()]);
  const items = await collected(first.topics.live(["a", "b"]), 3);
  assert.deepEqual(items.map((item) => `${item.topic}${item.seq}`), ["b1", "a1", "a2"]);
  // The server sends the frame behind `b1` again, and that of the other topic may come first.
  const again = faked([stream(frame("record", records("b", 1, 2), "x"), frame("record", records("a", 0, 1, 2, 3), "y"))]);
  const rest = await collected(again.topics.live(["a", "b"], { cursor: items[2].cursor }), 2);
  assert.equal(again.asked[0].headers["last-event-id"], "b1");
  assert.equal(again.asked[0].url, "http://faked/prefix/v0/live?topics=a%2Cb&heartbeat_ms=15000");
  assert.deepEqual(rest.map((item) => `${item.topic}${item.seq}`), ["b2", "a3"]);
  assert.deepEqual(JSON.parse(rest[0].cursor), { id: "x", handled: { a: 2 } });
  assert.deepEqual(JSON.parse(rest[1].cursor), { id: "y" });
});

test("gaps are items; one that only covers what was handled is none", async () => {
  const gap = { topic: "t", gap_from: 2, gap_to: 5, reason: "cap", missed_estimate: 4 };
  const told = faked([...states("t"), stream(frame("tombstone", gap, "g"))]);
  const [item] = await collected(told.topics.live("t"), 1);
  assert.deepEqual({ ...item }, { kind: "gap", topic: "t", from: 2, to: 5, reason: "cap", missed: 4 });
  const cursor = JSON.stringify({ id: "a", handled: { t: 5 } });
  const known = faked([stream(frame("tombstone", gap, "g"), frame("record", records("t", 5, 6), "h"))]);
  assert.deepEqual((await collected(known.topics.live("t", { cursor }), 1)).map((item) => item.seq), [6]);
  const partly = faked([stream(frame("tombstone", { ...gap, gap_to: 9 }, "g"))]);
  const [rest] = await collected(partly.topics.live("t", { cursor }), 1);
  assert.deepEqual([rest.from, rest.to], [6, 9]);
  const anew = faked([stream(frame("tombstone", { topic: "t", gap_from: 1, gap_to: 0, reason: "recreated" }, "g"), frame("record", records("t", 0, 1), "h"))]);
  assert.deepEqual((await collected(anew.topics.live("t", { cursor }), 2)).map((item) => item.reason ?? item.seq), ["recreated", 1]);
});

test("a live ends when all its topics are deleted", async () => {
  const gone = (topic, id) => frame("topic-deleted", { topic, head_seq: 1, reason: "deleted" }, id);
  const { topics } = faked([...states("a", "b"), stream(gone("a", "1"), gone("b", "2"))]);
  assert.deepEqual((await collected(topics.live(["a", "b"]))).map((item) => item.kind), ["deleted", "deleted"]);
});

test("a read of another incarnation begins anew behind a gap", async () => {
  const page = (epoch, ...seqs) => json({ epoch, tombstone: null, records: seqs.map(($seq) => ({ $seq, $ts: 1, data: null })), next_from_seq: seqs.at(-1), head_seq: seqs.at(-1), caught_up: true });
  const { topics, asked } = faked([page(2, 8, 9), page(2, 1, 2)]);
  const items = await collected(topics.read("t", { cursor: JSON.stringify({ topic: "t", seq: 7, epoch: 1 }) }));
  assert.deepEqual(items.map((item) => item.reason ?? item.seq), ["recreated", 1, 2]);
  assert.deepEqual(asked.map((request) => request.body.from_seq), [7, 0]);
  assert.equal(items[2].cursor, JSON.stringify({ topic: "t", seq: 2, epoch: 2 }));
  const live = faked([json({ epoch: 2 }), stream(frame("record", records("t", 0, 1), "x"))]);
  const followed = await collected(live.topics.live("t", { cursor: JSON.stringify({ topic: "t", seq: 7, epoch: 1 }) }), 2);
  assert.deepEqual(followed.map((item) => item.reason ?? item.seq), ["recreated", 1]);
  assert.match(live.asked[1].url, /live\?from_seq=0&/);
  assert.equal(followed[0].cursor, JSON.stringify({ topic: "t", seq: 0, epoch: 2 }));
});

test("a read ends at the head that it began with", async () => {
  const page = (seq) => json({ epoch: 1, tombstone: null, records: [{ $seq: seq, $ts: 1, data: null }], next_from_seq: seq, head_seq: seq + 1, caught_up: false });
  const { topics } = faked([page(1), page(2)]);
  assert.deepEqual((await collected(topics.read("t"))).map((item) => item.seq), [1, 2]);
});

test("a store is saved behind handled items only, and the last one at the end", async () => {
  const page = () => json({ epoch: 1, tombstone: null, records: [1, 2, 3].map(($seq) => ({ $seq, $ts: 1, data: null })), next_from_seq: 3, head_seq: 3, caught_up: true });
  const kept = [];
  const store = { load: async () => kept.at(-1), save: async (cursor) => { kept.push(cursor); } };
  await collected(faked([page()]).topics.read("t", { store }), 2);
  assert.deepEqual(kept.map((cursor) => JSON.parse(cursor).seq), [1]);
  const again = faked([page()]);
  await collected(again.topics.read("t", { store, saveEveryMs: 0 }));
  assert.equal(again.asked[0].body.from_seq, 1);
  assert.deepEqual(kept.map((cursor) => JSON.parse(cursor).seq), [1, 1, 2, 3]);
  const full = { load: async () => undefined, save: async () => { throw new Error("the disk is full"); } };
  await assert.rejects(collected(faked([page()]).topics.read("t", { store: full, saveEveryMs: 0 })), /the disk is full/);
});

test("wrong options and cursors are refused before anything is sent", async () => {
  const { topics, asked } = faked([]);
  assert.throws(() => topics.read("t", { form: 3 }), /no option "form"/);
  assert.throws(() => topics.live(["a", "b"], { shared: true }), TypeError);
  assert.throws(() => topics.live(["a", "b"], { from: 1 }), TypeError);
  assert.throws(() => topics.live("t", { from: 1, last: 2 }), /two starts/);
  assert.throws(() => topics.live("t", { shared: true, last: 2 }), TypeError);
  for (const cursor of [{ topic: "other", seq: 1 }, { topic: "a", seq: 1 }, { from: { a: 1, b: 2 } }]) {
    await assert.rejects(collected(topics.live(["a", "b"], { cursor: JSON.stringify(cursor) })), TypeError);
  }
  await assert.rejects(collected(topics.read("t", { cursor: "garbage" })), TypeError);
  await assert.rejects(collected(topics.read("t", { cursor: JSON.stringify({ topic: "other", seq: 1 }) })), TypeError);
  assert.equal(asked.length, 0);
});
