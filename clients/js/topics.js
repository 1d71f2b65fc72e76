// A client of topics-server for browsers and Node 20 or newer: one file, no dependency.
//
// `append` stores records exactly once, even if it sends them again. `read` and `live` are async iterators that
// continue from their own position after a failure; a gap is an item like a record. See README.md and topics.d.ts.

/** The server answered with an error: HTTP `status`, and the `code` and `detail` of its envelope. */
export class Refused extends Error {
  constructor(status, code, message, detail = {}, retryAfterMs = 0) {
    super(`${code}: ${message}`);
    this.name = "Refused";
    this.status = status;
    this.code = code;
    this.detail = detail;
    this.retryAfterMs = retryAfterMs;
  }
}

/** No answer came, or the answer broke off. The server may have received the request. */
export class Unreachable extends Error {
  constructor(message, cause) {
    super(message, { cause });
    this.name = "Unreachable";
  }
}

// Statuses of temporary errors; 502 and 504 come from a proxy whose server restarts.
const PASSING = new Set([408, 429, 500, 502, 503, 504]);
const passes = (error) => error instanceof Unreachable || (error instanceof Refused && PASSING.has(error.status));

const HEARTBEAT_MS = 15_000;
// If a stream sends no byte for this long, it is dead: two heartbeats and a margin.
const QUIET_MS = 2 * HEARTBEAT_MS + 5_000;
const SAVE_EVERY_MS = 1_000;
// How often a tab reads on its own, without a notice from another tab.
const LOOK_EVERY_MS = 30_000;
// The longest pause after which a request is sent again, because timers take at most 31 bits.
const RETRY_AFTER_MS_MAX = 3_600_000;

// -- items ------------------------------------------------------------------------------------------

// `cursor` encodes `position`: the place from which a reader continues behind this item.
class Item {
  #position;
  constructor(kind, topic, position) {
    this.kind = kind;
    this.topic = topic;
    this.#position = position;
  }
  get cursor() { return JSON.stringify(this.#position); }
}

function recordItem(topic, record, position) {
  const item = new Item("record", topic, position);
  item.seq = record.$seq;
  item.ts = record.$ts;
  if (record.$tag !== undefined) item.tag = record.$tag;
  if (record.$node !== undefined) item.node = record.$node;
  if ("data" in record) item.data = record.data;
  if (record.meta !== undefined) item.meta = record.meta;
  if (record.$encoding !== undefined) item.encoding = record.$encoding;
  if (record.$content_type !== undefined) item.contentType = record.$content_type;
  if (record.$trace !== undefined) item.trace = record.$trace;
  return item;
}

function gapItem(topic, tombstone, position) {
  const item = new Item("gap", topic, position);
  item.from = tombstone.gap_from;
  item.to = tombstone.gap_to;
  item.reason = tombstone.reason;
  if (tombstone.missed_estimate !== undefined) item.missed = tombstone.missed_estimate;
  return item;
}

function headItem(kind, topic, head, position) {
  const item = new Item(kind, topic, position);
  item.head = head;
  return item;
}

const RECREATED = { gap_from: 1, gap_to: 0, reason: "recreated" };

// -- pauses -----------------------------------------------------------------------------------------

class Backoff {
  #tries = 0;
  #baseMs; #capMs; #random;
  constructor(baseMs, capMs, random) {
    this.#baseMs = baseMs;
    this.#capMs = capMs;
    this.#random = random;
  }
  reset() { this.#tries = 0; }
  // At least half of the limit, plus the pause that the server asked for. The random part spreads clients that failed
  // together.
  nextMs(error) {
    const longest = Math.min(this.#capMs, this.#baseMs * 2 ** Math.min(this.#tries++, 30));
    return Math.ceil((error?.retryAfterMs ?? 0) + longest / 2 + (this.#random() * longest) / 2);
  }
}

function pauseFor(ms, signal) {
  return new Promise((resolve, reject) => {
    if (signal?.aborted) return reject(signal.reason);
    const timer = setTimeout(() => { signal?.removeEventListener("abort", onAbort); resolve(); }, ms);
    const onAbort = () => { clearTimeout(timer); reject(signal.reason); };
    signal?.addEventListener("abort", onAbort, { once: true });
  });
}

// A controller that the caller's signal also aborts, until `unlink` is called.
function linked(signal) {
  const controller = new AbortController();
  const onAbort = () => controller.abort(signal.reason);
  if (signal?.aborted) onAbort();
  else signal?.addEventListener("abort", onAbort, { once: true });
  return { controller, unlink: () => signal?.removeEventListener("abort", onAbort) };
}

// -- cursors that outlive the program -----------------------------------------------------------------

/** Stores a cursor in the browser: in `localStorage`, or in a storage with the same methods. */
export function webStore(name, storage = globalThis.localStorage) {
  return { load: async () => storage.getItem(name) ?? undefined, save: async (cursor) => storage.setItem(name, cursor) };
}

/** Stores a cursor in a file (Node): written to a second file, synced and renamed. */
export function fileStore(path) {
  return {
    async load() {
      const { readFile } = await import("node:fs/promises");
      try {
        return await readFile(path, "utf8");
      } catch (error) {
        if (error.code === "ENOENT") return undefined;
        throw error;
      }
    },
    async save(cursor) {
      const { open, rename } = await import("node:fs/promises");
      const file = await open(`${path}.new`, "w");
      try {
        await file.writeFile(cursor);
        await file.sync();
      } finally {
        await file.close();
      }
      await rename(`${path}.new`, path);
    },
  };
}

// Saves the cursor of the newest handled item, at most once in `everyMs`; saves never overlap.
class Saver {
  #store; #everyMs; #item; #timer; #saving; #error;
  constructor(store, everyMs) {
    this.#store = store;
    this.#everyMs = everyMs;
  }
  async handled(item) {
    this.#item = item;
    if (this.#error) throw this.#error;
    if (this.#everyMs === 0) await this.flush();
    else this.#timer ??= setTimeout(() => { this.flush().catch((error) => { this.#error = error; }); }, this.#everyMs);
  }
  async flush() {
    clearTimeout(this.#timer);
    this.#timer = undefined;
    await this.#saving?.catch(() => {});
    const item = this.#item;
    this.#item = undefined;
    if (!item) return;
    this.#saving = this.#store.save(item.cursor);
    await this.#saving;
  }
}

// An item counts as handled when the loop requests the next item.
async function* saved(items, store, everyMs) {
  if (!store) return yield* items;
  const saver = new Saver(store, everyMs);
  try {
    for await (const item of items) {
      yield item;
      await saver.handled(item);
    }
  } finally {
    await saver.flush();
  }
}

// -- server-sent events -------------------------------------------------------------------------------

// Parses pieces of text into frames. Each piece is scanned once, even if a line is very long.
class FrameReader {
  #pieces = [];
  #frame = { event: "", id: undefined, data: [] };
  *read(text) {
    let start = 0;
    for (let end = text.indexOf("\n"); end >= 0; end = text.indexOf("\n", start)) {
      this.#pieces.push(text.slice(start, end));
      start = end + 1;
      const line = this.#pieces.length === 1 ? this.#pieces[0] : this.#pieces.join("");
      this.#pieces = [];
      const frame = this.#line(line.endsWith("\r") ? line.slice(0, -1) : line);
      if (frame) yield frame;
    }
    if (start < text.length) this.#pieces.push(text.slice(start));
  }
  #line(line) {
    if (line === "") {
      const frame = this.#frame;
      this.#frame = { event: "", id: undefined, data: [] };
      const data = frame.data.length ? frame.data.join("\n") : undefined;
      return data !== undefined || frame.id !== undefined ? { ...frame, data } : undefined; // a frame with only an id is a position
    }
    const colon = line.indexOf(":");
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + (line[colon + 1] === " " ? 2 : 1));
    if (name === "data") this.#frame.data.push(value);
    else if (name === "event" || name === "id") this.#frame[name] = value;
    return undefined; // a heartbeat is a comment, which has an empty name
  }
}

// -- the client ---------------------------------------------------------------------------------------

function randomName() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

function parsedCursor(text) {
  if (text === undefined || text === null) return undefined;
  let position;
  try { position = JSON.parse(text); } catch { /* refused below */ }
  if ([position?.id, position?.from, position?.seq].every((value) => value === undefined)) throw new TypeError("this is no cursor of an item");
  return position;
}

function retryAfterMs(response, detail) {
  const value = response.headers.get("retry-after");
  const ms = Number.isFinite(detail?.retry_after_ms) ? detail.retry_after_ms
    : value === null ? 0
    : /^\d+$/.test(value) ? Number(value) * 1000
    : Date.parse(value) - Date.now();
  return Number.isNaN(ms) ? 0 : Math.min(Math.max(0, ms), RETRY_AFTER_MS_MAX);
}

async function refusal(response) {
  let error;
  try { error = (await response.json()).error; } catch { /* a proxy's own page */ }
  const { code = `http_${response.status}`, message = "the answer is not from a topics server", detail } = error ?? {};
  return new Refused(response.status, code, message, detail, retryAfterMs(response, detail));
}

// `fetch` resolves a URL before it is sent, so `.` and `..` would lead to another resource.
function path(topic) {
  if (topic === "." || topic === ".." || topic === "") throw new TypeError(`${JSON.stringify(topic)} is not the name of a topic`);
  return `/v0/topics/${encodeURIComponent(topic)}`;
}

// Refuse wrong addresses and keys at once: a request would fail for ever, and its error would show the key.
function checkedUrl(url) {
  const text = String(url).replace(/\/+$/, "");
  let parsed;
  try { parsed = new URL(text, globalThis.location?.href); } catch { /* refused below */ }
  if (parsed?.username || parsed?.password) throw new TypeError("the URL must not contain credentials; give the key as an option");
  if (!["http:", "https:"].includes(parsed?.protocol)) throw new TypeError(`${JSON.stringify(text)} is not the URL of a server; one looks like http://127.0.0.1:4000`);
  return text;
}

function checkedKey(key) {
  const text = key?.trim() || undefined;
  const wrong = text === undefined ? -1 : text.search(/[^!-~]/);
  if (wrong >= 0) throw new TypeError(`character ${wrong + 1} of the key is not a visible ASCII character`);
  return text;
}

function checkKeys(options, known, what) {
  for (const name of Object.keys(options)) {
    if (!known.includes(name)) throw new TypeError(`${what} has no option ${JSON.stringify(name)}; it has: ${known.join(", ")}`);
  }
}

const COMMON = ["cursor", "from", "includeMeta", "includeTags", "limit", "node", "onRetry", "patienceMs", "saveEveryMs", "signal", "store"];

export class Topics {
  #url; #key; #patienceMs; #timeoutMs; #fetch; #pause; #random;

  /** `url` is the server's address, with the path prefix of a proxy if there is one. */
  constructor(url, options = {}) {
    checkKeys(options, ["fetch", "key", "patienceMs", "pause", "random", "timeoutMs"], "Topics");
    this.#url = checkedUrl(url);
    this.#key = checkedKey(options.key);
    this.#patienceMs = options.patienceMs ?? 30_000;
    this.#timeoutMs = options.timeoutMs ?? 30_000;
    this.#fetch = options.fetch ?? ((...words) => globalThis.fetch(...words));
    this.#pause = options.pause ?? pauseFor;
    this.#random = options.random ?? Math.random;
  }

  /** Append a record or a list of records. A repeat after a lost answer stores nothing twice. */
  async append(topic, records, options = {}) {
    checkKeys(options, ["config", "create", "idempotencyKey", "if", "node", "onRetry", "patienceMs", "signal"], "append");
    const { config, create, if: condition, node, idempotencyKey = randomName(), ...rest } = options;
    const list = Array.isArray(records) ? records : [records];
    const body = { records: list, idempotency_key: idempotencyKey, if: condition, config, create, node };
    return this.call(path(topic), { ...rest, method: "POST", body });
  }

  /** Send a request to any route and return its JSON; temporary errors are retried for `patienceMs`. */
  async call(route, options = {}) {
    const { method = "GET", body, signal, onRetry, patienceMs = this.#patienceMs } = options;
    const backoff = new Backoff(100, 5_000, this.#random);
    const text = body === undefined ? undefined : JSON.stringify(body);
    for (let leftMs = patienceMs; ;) {
      try {
        return await this.#once(route, method, text, signal);
      } catch (error) {
        if (signal?.aborted) throw signal.reason;
        const waitMs = backoff.nextMs(error);
        if (!passes(error) || waitMs > leftMs) throw error;
        leftMs -= waitMs;
        onRetry?.(error, waitMs);
        await this.#pause(waitMs, signal);
      }
    }
  }

  async #once(route, method, text, signal, waitMs = 0) {
    const { controller, unlink } = linked(signal);
    const timer = setTimeout(() => controller.abort(), this.#timeoutMs + waitMs);
    try {
      const headers = text === undefined ? {} : { "content-type": "application/json" };
      const response = await this.#send(route, { method, body: text, headers, signal: controller.signal });
      return await response.json();
    } catch (error) {
      if (error instanceof Refused) throw error;
      if (error instanceof SyntaxError) throw new Refused(200, "bad_answer", `${method} ${route}: the answer is not JSON`);
      throw new Unreachable(`${method} ${route}: ${controller.signal.aborted ? "no answer in time" : error.message}`, error);
    } finally {
      clearTimeout(timer);
      unlink();
    }
  }

  async #send(route, { headers, ...request }) {
    const sent = this.#key ? { ...headers, authorization: `Bearer ${this.#key}` } : headers;
    const response = await this.#fetch(this.#url + route, { ...request, headers: sent, cache: "no-store", redirect: "error" });
    if (!response.ok) throw await refusal(response);
    return response;
  }

  /** The items of a topic from a position up to its head at the start of the read. */
  read(topic, options = {}) {
    checkKeys(options, [...COMMON, "filter"], "read");
    return saved(this.#read(topic, options), options.store, options.saveEveryMs ?? SAVE_EVERY_MS);
  }

  async *#read(topic, options) {
    const position = await readPosition(topic, options);
    let end;
    for (;;) {
      const page = await this.#page(topic, position, options);
      yield* page.items;
      end = page.isRecreated ? page.head : end ?? page.head;
      if (page.isCaughtUp || position.seq >= end) return;
    }
  }

  // Reads one page behind `position` and moves it. If the topic was created again, the page begins with a gap.
  async #page(topic, position, options) {
    const { filter, includeMeta, includeTags = true, limit, node, signal, onRetry, patienceMs } = options;
    const ask = (seq) => this.call(`${path(topic)}/diff`, { method: "POST", signal, onRetry, patienceMs,
      body: { from_seq: seq, limit, node, filter, include_meta: includeMeta, include_tags: includeTags } });
    let page = await ask(position.seq);
    const items = [];
    let isRecreated = page.tombstone?.reason === "recreated";
    if (!isRecreated && position.epoch !== undefined && page.epoch !== position.epoch) {
      isRecreated = true;
      page = await ask(0);
      items.push(gapItem(topic, RECREATED, { topic, seq: 0, epoch: page.epoch }));
    }
    const { epoch } = page;
    if (page.tombstone) items.push(gapItem(topic, page.tombstone, { topic, seq: isRecreated ? 0 : page.tombstone.gap_to, epoch }));
    for (const record of page.records) items.push(recordItem(topic, record, { topic, seq: record.$seq, epoch }));
    position.seq = page.next_from_seq;
    position.epoch = epoch;
    return { items, isRecreated, isCaughtUp: page.caught_up, head: page.head_seq };
  }

  /** The items of topics from a position on, then new ones as they arrive. Ends only when every topic is deleted. */
  live(topics, options = {}) {
    checkKeys(options, [...COMMON, "consistency", "filter", "last", "shared", "since", "tail", "wait"], "live");
    const names = typeof topics === "string" ? [topics] : [...topics];
    if (options.shared && names.length !== 1) throw new TypeError("a shared live follows one topic");
    if (names.length !== 1 && options.from !== undefined) throw new TypeError("from is for one topic");
    const starts = ["from", "last", "since", "tail"].filter((name) => options[name]);
    if (starts.length > 1) throw new TypeError(`${starts[0]} and ${starts[1]} are two starts; give one`);
    if (options.shared && starts.some((name) => name !== "from")) throw new TypeError("a shared live begins at from");
    const items = options.shared ? this.#shared(names[0], options) : this.#stream(names, options);
    return saved(items, options.store, options.saveEveryMs ?? SAVE_EVERY_MS);
  }

  async *#stream(names, options) {
    const { signal, onRetry, patienceMs = Infinity } = options;
    const place = parsedCursor(options.cursor ?? await options.store?.load()) ?? {};
    const backoff = new Backoff(500, 15_000, this.#random);
    const left = new Set(names);
    let route, leftMs = patienceMs;
    for (;;) {
      let failure, openedAt;
      const { controller, unlink } = linked(signal);
      try {
        if (!route) {
          const start = await this.#start(names, options, place);
          if (start.gap) yield start.gap;
          ({ route } = start);
        }
        openedAt = performance.now();
        for await (const frame of this.#frames(route, place.id, controller, options)) {
          // Every new stream sends a caught-up frame, so only other items show that the stream works.
          for (const item of itemsOf(frame, place)) {
            if (item.kind !== "caught-up") { backoff.reset(); leftMs = patienceMs; }
            yield item;
            if (item.kind === "deleted") left.delete(item.topic);
          }
          if (left.size === 0 && !options.wait) return;
          if (frame.event === "error") failure = streamError(frame) ?? failure;
          if (failure) break;
        }
        failure ??= new Unreachable("the stream ended");
      } catch (error) {
        if (signal?.aborted) throw signal.reason;
        failure = error;
      } finally {
        controller.abort();
        unlink();
      }
      if (!passes(failure)) throw failure;
      if (openedAt !== undefined && performance.now() - openedAt > HEARTBEAT_MS) { backoff.reset(); leftMs = patienceMs; }
      const waitMs = backoff.nextMs(failure);
      if (waitMs > leftMs) throw failure;
      leftMs -= waitMs;
      onRetry?.(failure, waitMs);
      await this.#pause(waitMs, signal);
    }
  }

  // The stream's address, which stays the same: the id of the last frame is the position. Without `wait` the topics
  // must exist. A cursor of `read` names an incarnation of its topic, but the address does not, so compare it here.
  async #start(names, options, place) {
    const { signal, wait, tail, last, since } = options;
    if (place.topic !== undefined && (names.length > 1 || place.topic !== names[0])) throw new TypeError(`this is a cursor of a read of ${place.topic}`);
    if (names.length > 1 && Object.values(place.from ?? {}).some(Boolean)) throw new TypeError("this is a cursor of an older client; begin anew");
    const absent = (error) => { if (wait && error.code === "topic_not_found") return {}; throw error; };
    const state = (name) => this.#once(`${path(name)}?touch=false`, "GET", undefined, signal).catch(absent);
    const isRead = place.epoch !== undefined;
    const states = place.id === undefined && (isRead || !wait) ? await Promise.all(names.map(state)) : [];
    let gap, from = place.seq ?? place.from?.[names[0]] ?? options.from;
    if (isRead && states[0].epoch !== place.epoch) {
      from = 0;
      gap = gapItem(names[0], RECREATED, { topic: names[0], seq: 0, epoch: states[0].epoch });
    }
    for (const member of ["topic", "seq", "epoch", "from"]) delete place[member];
    const begin = from !== undefined && names.length === 1 ? { from_seq: from } : { tail: tail || undefined, last, since };
    return { gap, route: liveRoute(names, begin, options) };
  }

  async *#frames(route, lastId, controller, { isOpen }) {
    const headers = { accept: "text/event-stream", ...(lastId !== undefined && { "last-event-id": lastId }) };
    const dead = () => controller.abort(new Unreachable(`nothing came for ${QUIET_MS / 1000} s`));
    const within = async (promise) => {
      const timer = setTimeout(dead, QUIET_MS);
      try {
        return await promise;
      } catch (error) {
        if (error instanceof Refused || error instanceof Unreachable) throw error;
        throw new Unreachable(`the stream broke: ${error.message}`, error);
      } finally {
        clearTimeout(timer);
      }
    };
    const response = await within(this.#send(route, { headers, signal: controller.signal }));
    isOpen?.();
    const body = response.body.getReader();
    const decoder = new TextDecoder();
    const frames = new FrameReader();
    for (;;) {
      const { value, done } = await within(body.read());
      if (done) return;
      for (const frame of frames.read(decoder.decode(value, { stream: true }))) yield frame.data === undefined ? frame : { ...frame, value: JSON.parse(frame.data) };
    }
  }

  // -- one stream for all tabs of a browser ------------------------------------------------------------
  //
  // The tab that holds the lock opens the stream, which carries no data. On each event it notifies all tabs, and
  // every tab reads from its own position. A lost notice delays records but loses none, so a tab may open late,
  // freeze or take the lock at any time.

  async *#shared(topic, options) {
    const position = await readPosition(topic, options);
    const { controller, unlink } = linked(options.signal);
    const bell = { isRung: false, ring: () => { bell.isRung = true; bell.wake?.(); } };
    const name = `topics ${this.#url} ${topic}`;
    const channel = typeof BroadcastChannel === "undefined" ? undefined : new BroadcastChannel(name);
    if (channel) channel.onmessage = bell.ring;
    const ring = () => { bell.ring(); channel?.postMessage("new"); };
    const lead = () => this.#lead(topic, ring, controller.signal);
    const locks = globalThis.navigator?.locks;
    const leading = (channel && locks ? locks.request(name, { signal: controller.signal }, lead) : lead()).catch(() => {});
    try {
      for (let isTold = false; ;) {
        bell.isRung = false;
        let page;
        try {
          page = await this.#page(topic, position, { patienceMs: Infinity, ...options });
        } catch (error) {
          if (!options.wait || error.code !== "topic_not_found") throw error;
          if (!bell.isRung) await bellRings(bell, LOOK_EVERY_MS, controller.signal);
          continue;
        }
        if (page.items.length) isTold = false;
        yield* page.items;
        if (!page.isCaughtUp) continue;
        if (!isTold) yield headItem("caught-up", topic, page.head, { topic, ...position });
        isTold = true;
        if (!bell.isRung) await bellRings(bell, LOOK_EVERY_MS * (0.75 + this.#random() / 2), controller.signal);
      }
    } finally {
      controller.abort();
      unlink();
      channel?.close();
      await leading;
    }
  }

  async #lead(topic, ring, signal) {
    const backoff = new Backoff(1_000, LOOK_EVERY_MS, this.#random);
    while (!signal.aborted) {
      try {
        const options = { signal, tail: true, wait: true, includeData: false, isOpen: ring };
        for await (const item of this.#stream([topic], options)) if (item.kind !== "caught-up") ring();
      } catch (error) {
        if (signal.aborted) return;
        await this.#pause(backoff.nextMs(error), signal); // the tab's own reads report the error
      }
    }
  }
}

// The filter that also excludes the records of `node`.
function filterOf({ filter, node }) {
  const others = node === undefined ? undefined : ["Not", ["node", "In", [node].flat()]];
  return filter !== undefined && others ? ["And", filter, others] : filter ?? others;
}

function liveRoute(names, begin, options) {
  const filter = filterOf(options);
  const query = { topics: names.length > 1 ? names.join(",") : undefined, ...begin, filter: filter && JSON.stringify(filter), limit: options.limit, consistency: options.consistency, include_meta: options.includeMeta,
    include_tags: options.includeTags, include_data: options.includeData, heartbeat_ms: HEARTBEAT_MS };
  const words = Object.entries(query).filter(([, value]) => value !== undefined);
  return `${query.topics ? "/v0/live" : `${path(names[0])}/live`}?${new URLSearchParams(words)}`;
}

async function readPosition(topic, { cursor, store, from = 0 }) {
  const place = parsedCursor(cursor ?? await store?.load());
  if (place === undefined) return { seq: from, epoch: undefined };
  if (place.topic !== topic) throw new TypeError(`this is no cursor of a read of ${topic}`);
  return { seq: place.seq, epoch: place.epoch };
}

// The items of a frame. `place` is the position: the id of the last frame, and the last handled seq of each topic
// whose next frame was handled in part. The server sends an id before anything else.
function* itemsOf({ event, id, value }, place) {
  if (value === undefined) { place.id = id; return; }
  const { topic } = value;
  const handled = place.handled?.[topic] ?? 0;
  const { [topic]: _, ...others } = place.handled ?? {};
  const moveTo = (isHandled) => {
    if (id !== undefined) place.id = id;
    place.handled = isHandled ? others : place.handled;
    if (place.handled && Object.keys(place.handled).length === 0) delete place.handled;
    return { ...place };
  };
  if (event === "record") {
    const before = { ...place };
    const after = moveTo(value.to_seq >= handled);
    const records = value.records.filter((record) => record.$seq > handled);
    for (const [index, record] of records.entries()) {
      const isLast = index === records.length - 1;
      yield recordItem(topic, record, isLast ? after : { ...before, handled: { ...others, [topic]: record.$seq } });
    }
  } else if (event === "tombstone") {
    // The tombstone may cover records that were handled, which are no loss.
    const isAnew = value.reason === "recreated";
    const isNews = isAnew || value.gap_to > handled;
    const after = moveTo(isNews);
    if (isNews) yield gapItem(topic, isAnew ? value : { ...value, gap_from: Math.max(value.gap_from, handled + 1) }, after);
  } else if (event === "caught-up") {
    yield headItem("caught-up", topic, value.head_seq, moveTo(true));
  } else if (event === "topic-deleted") {
    yield headItem("deleted", topic, value.head_seq, moveTo(true));
  }
}

// A 429 is only advice: the stream stays open.
function streamError(frame) {
  const { code, error, retry_after_ms: waitMs = 0 } = frame.value;
  if (code === 429) return undefined;
  return new Unreachable(`the server ended the stream: ${error} (${code})${waitMs ? `, again in ${waitMs} ms` : ""}`);
}

function bellRings(bell, withinMs, signal) {
  return new Promise((resolve, reject) => {
    if (signal.aborted) return reject(signal.reason);
    const end = (settle, value) => { clearTimeout(timer); signal.removeEventListener("abort", onAbort); bell.wake = undefined; settle(value); };
    const onAbort = () => end(reject, signal.reason);
    const timer = setTimeout(() => end(resolve), withinMs);
    signal.addEventListener("abort", onAbort, { once: true });
    bell.wake = () => end(resolve);
  });
}
