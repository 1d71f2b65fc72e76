// Types of topics.js.

export type Json = null | boolean | number | string | Json[] | { [name: string]: Json };

/** The server answered with an error: the `status` of HTTP, the `code` and the `detail` of its envelope. */
export class Refused extends Error {
  readonly status: number;
  readonly code: string;
  readonly detail: { [name: string]: Json };
  /** The pause that the server asked for; 0 if it asked for none. */
  readonly retryAfterMs: number;
  constructor(status: number, code: string, message: string, detail?: { [name: string]: Json }, retryAfterMs?: number);
}

/** No answer came, or it broke off. The server may have seen the request. */
export class Unreachable extends Error {
  constructor(message: string, cause?: unknown);
}

interface Positioned {
  readonly topic: string;
  /** Where a reader goes on that has handled this item; a text to keep as it is. */
  readonly cursor: string;
}

export interface RecordItem extends Positioned {
  readonly kind: "record";
  readonly seq: number;
  /** When the record was committed, in milliseconds since 1970. */
  readonly ts: number;
  readonly tag?: string;
  readonly node?: string;
  /** Absent if `includeData` is false. */
  readonly data?: any;
  readonly meta?: { [name: string]: any };
  /** `"base64"`: `data` has bytes of a stream; `contentType` is their type. */
  readonly encoding?: string;
  readonly contentType?: string;
  /** The `traceparent` of the record's append. */
  readonly trace?: string;
}

/** Records `from` to `to` are gone. For `recreated` the topic begins anew, and `to` may be less than `from`. */
export interface GapItem extends Positioned {
  readonly kind: "gap";
  readonly from: number;
  readonly to: number;
  /** `cap`, `ttl`, `mixed`, `recreated`, `restart`, `damaged`, `source_trim`, `from_seq_too_old`, or a later one. */
  readonly reason: string;
  /** About how many records. */
  readonly missed?: number;
}

/** Everything up to `head` was delivered; what follows is new. */
export interface CaughtUpItem extends Positioned {
  readonly kind: "caught-up";
  readonly head: number;
}

/** The topic was deleted. */
export interface DeletedItem extends Positioned {
  readonly kind: "deleted";
  readonly head: number;
}

export type ReadItem = RecordItem | GapItem;
export type LiveItem = RecordItem | GapItem | CaughtUpItem | DeletedItem;

/** Keeps a cursor over restarts of the program. */
export interface CursorStore {
  load(): Promise<string | undefined>;
  save(cursor: string): Promise<void>;
}

/** Keeps a cursor in the browser: `localStorage`, or a storage with the same methods. */
export function webStore(name: string, storage?: { getItem(name: string): string | null; setItem(name: string, value: string): void }): CursorStore;

/** Keeps a cursor in a file (Node). */
export function fileStore(path: string): CursorStore;

export interface TopicsOptions {
  /** Sent as `Authorization: Bearer KEY`. */
  key?: string;
  /** How long all pauses of a call may take together; 30 s. */
  patienceMs?: number;
  /** How long one try of a call may take; 30 s. */
  timeoutMs?: number;
  fetch?: typeof fetch;
  /** For tests: waits between two tries. */
  pause?: (ms: number, signal?: AbortSignal) => Promise<void>;
  /** For tests: a number from 0 to 1. */
  random?: () => number;
}

export interface RetryOptions {
  signal?: AbortSignal;
  patienceMs?: number;
  /** Called before each pause. */
  onRetry?: (error: Refused | Unreachable, waitMs: number) => void;
}

export interface NewRecord {
  data: Json;
  tag?: string;
  node?: string;
  meta?: { [name: string]: Json };
  /** On a queue: workers get the job only so much later, or at that time. */
  delay_ms?: number;
  deliver_at_ms?: number;
}

export interface AppendOptions extends RetryOptions {
  /** Two appends with the same key store one batch, within the topic's `idempotency_window_ms`; by default a random one. */
  idempotencyKey?: string;
  /** Store only if this holds (docs/CONDITIONS.md); otherwise the append is `Refused` with `condition_failed`. */
  if?: { head_seq?: number; none_match?: Json; after?: number; exists?: boolean; epoch?: number };
  node?: string;
  /** False: the topic must exist. */
  create?: boolean;
  /** The configuration of the topic if this append creates it. */
  config?: { [name: string]: Json };
}

export interface Appended {
  topic: string;
  first_seq: number;
  last_seq: number;
  seqs: number[];
  head_seq: number;
  count: number;
  created: boolean;
  deduped: boolean;
}

interface FollowOptions extends RetryOptions {
  /** Read records behind this seq; 0, the beginning, if there is no cursor. */
  from?: number;
  /** The `cursor` of an item. */
  cursor?: string;
  /** Loads the cursor at the beginning and saves it while items are handled. */
  store?: CursorStore;
  /** How often `store` saves at most; 1000. 0 saves behind every item. */
  saveEveryMs?: number;
  /** Records a page or frame holds at most. */
  limit?: number;
  /** Leave out the records of this node, or of these. */
  node?: string | string[];
  includeMeta?: boolean;
  includeTags?: boolean;
}

export interface ReadOptions extends FollowOptions {
  /** A filter of docs/READS.md, such as `["tag", "Glob", "order:*"]`. */
  filter?: Json;
}

export interface LiveOptions extends FollowOptions {
  /** Begin at the head. */
  tail?: boolean;
  /** Begin with the last so many records of each topic. */
  last?: number;
  /** Begin with the records of this time: milliseconds since 1970, RFC 3339, or a duration before now (`"10m"`). */
  since?: number | string;
  /** A filter of docs/READS.md, such as `["tag", "Glob", "order:*"]`. */
  filter?: Json;
  /** Wait for a topic that does not exist yet. */
  wait?: boolean;
  /** `strong`: records only once they are synced. */
  consistency?: "eventual" | "strong";
  /** The tabs of a browser share one open connection for the topic. */
  shared?: boolean;
}

export class Topics {
  constructor(url: string | URL, options?: TopicsOptions);
  /** Append one record or a list of them, all or none. A repeat after a lost answer stores nothing twice. */
  append(topic: string, records: NewRecord | NewRecord[], options?: AppendOptions): Promise<Appended>;
  /** The items of a topic from a position to the head that it has when the reading begins. */
  read(topic: string, options?: ReadOptions): AsyncGenerator<ReadItem, void, void>;
  /** The items of topics from a position on, and then as they come; ends when every topic is deleted, else never. */
  live(topics: string | Iterable<string>, options?: LiveOptions): AsyncGenerator<LiveItem, void, void>;
  /** Send a request to any route and return its JSON. A repeat must be harmless: passing errors are tried again. */
  call(route: string, options?: RetryOptions & { method?: string; body?: unknown }): Promise<any>;
}
