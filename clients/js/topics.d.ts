// Types of topics.js.

export type Json = null | boolean | number | string | Json[] | { [name: string]: Json };

/** The server answered with an error: HTTP `status`, and the `code` and `detail` of its envelope. */
export class Refused extends Error {
  readonly status: number;
  readonly code: string;
  readonly detail: { [name: string]: Json };
  /** The pause that the server asked for; 0 if it asked for none. */
  readonly retryAfterMs: number;
  constructor(status: number, code: string, message: string, detail?: { [name: string]: Json }, retryAfterMs?: number);
}

/** No answer came, or the answer broke off. The server may have received the request. */
export class Unreachable extends Error {
  constructor(message: string, cause?: unknown);
}

interface Positioned {
  readonly topic: string;
  /** The position from which a reader continues behind this item: an opaque text to store. */
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
  /** `"base64"`: `data` holds bytes of a stream, of the type `contentType`. */
  readonly encoding?: string;
  readonly contentType?: string;
  /** The `traceparent` of the record's append. */
  readonly trace?: string;
}

/** Records `from` to `to` are lost. After `recreated` the topic begins anew, and `to` may be less than `from`. */
export interface GapItem extends Positioned {
  readonly kind: "gap";
  readonly from: number;
  readonly to: number;
  /** `cap`, `ttl`, `mixed`, `recreated`, `restart`, `damaged`, `source_trim`, `from_seq_too_old`, or a reason of a later server. */
  readonly reason: string;
  /** About how many records are lost. */
  readonly missed?: number;
}

/** Everything up to `head` was delivered; the items that follow are new. */
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

/** Stores a cursor over restarts of the program. */
export interface CursorStore {
  load(): Promise<string | undefined>;
  save(cursor: string): Promise<void>;
}

/** Stores a cursor in the browser: in `localStorage`, or in a storage with the same methods. */
export function webStore(name: string, storage?: { getItem(name: string): string | null; setItem(name: string, value: string): void }): CursorStore;

/** Stores a cursor in a file (Node). */
export function fileStore(path: string): CursorStore;

export interface TopicsOptions {
  /** Sent as `Authorization: Bearer KEY`. */
  key?: string;
  /** The longest sum of all pauses of a call; default: 30 s. */
  patienceMs?: number;
  /** The longest time of one try of a call; default: 30 s. */
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
  /** On a queue: workers get the job only after this delay, or at this time. */
  delay_ms?: number;
  deliver_at_ms?: number;
}

export interface AppendOptions extends RetryOptions {
  /** Two appends with the same key store one batch, within the topic's `idempotency_window_ms`. Default: a random key. */
  idempotencyKey?: string;
  /** Store only if this condition holds (docs/CONDITIONS.md); otherwise the append is `Refused` with `condition_failed`. */
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
  /** Read records behind this seq. Default without a cursor: 0, the beginning. */
  from?: number;
  /** The `cursor` of an item. */
  cursor?: string;
  /** Loads the cursor at the start, and saves it while items are handled. */
  store?: CursorStore;
  /** The shortest time between two saves of `store`; default: 1000. 0 saves after every item. */
  saveEveryMs?: number;
  /** The most records of a page or frame. */
  limit?: number;
  /** Leave out the records of this node, or of these nodes. */
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
  /** Begin with this number of last records of each topic. */
  last?: number;
  /** Begin at this time: milliseconds since 1970, RFC 3339, or a duration before now (`"10m"`). */
  since?: number | string;
  /** A filter of docs/READS.md, such as `["tag", "Glob", "order:*"]`. */
  filter?: Json;
  /** Wait for a topic that does not exist yet. */
  wait?: boolean;
  /** `strong`: deliver records only once they are synced. */
  consistency?: "eventual" | "strong";
  /** All tabs of a browser share one open connection for the topic. */
  shared?: boolean;
}

export class Topics {
  constructor(url: string | URL, options?: TopicsOptions);
  /** Append a record or a list of records, all or none. A repeat after a lost answer stores nothing twice. */
  append(topic: string, records: NewRecord | NewRecord[], options?: AppendOptions): Promise<Appended>;
  /** The items of a topic from a position up to its head at the start of the read. */
  read(topic: string, options?: ReadOptions): AsyncGenerator<ReadItem, void, void>;
  /** The items of topics from a position on, then new ones as they arrive. Ends only when every topic is deleted. */
  live(topics: string | Iterable<string>, options?: LiveOptions): AsyncGenerator<LiveItem, void, void>;
  /** Send a request to any route and return its JSON. Temporary errors are retried, so a repeat must be harmless. */
  call(route: string, options?: RetryOptions & { method?: string; body?: unknown }): Promise<any>;
}
