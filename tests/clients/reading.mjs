// Appends and reads with real cursors, and prints what came: `reading.mjs URL`.
import { Refused, Topics } from "../../clients/js/topics.js";

const topics = new Topics(process.argv[2]);
const told = [];
const records = (count) => Array.from({ length: count }, (_, n) => ({ data: n, tag: n % 2 ? "odd" : "even", meta: { n } }));
await topics.append("a", records(700));
const key = { idempotencyKey: "k" };
told.push((await topics.append("a", { data: "x" }, key)).deduped, (await topics.append("a", { data: "x" }, key)).deduped);

let middle, count = 0, odd = 0;
for await (const item of topics.read("a", { limit: 100 })) {
  count += 1;
  if (item.seq === 333) middle = item;
}
told.push(count, middle.data, middle.meta, middle.tag);
const { cursor } = middle;
const both = () => [topics.read("a", { cursor }), topics.live("a", { cursor })];
for (const items of both()) for await (const item of items) { told.push(item.seq); break; }
for await (const item of topics.read("a", { filter: "odd", includeMeta: false })) odd += item.meta === undefined && item.tag === "odd";
told.push(odd);

const free = { if: { none_match: "seat" } };
await topics.append("seats", { data: "ann", tag: "seat" }, free);
try {
  await topics.append("seats", { data: "bob", tag: "seat" }, free);
} catch (error) {
  told.push(error.code, error.detail.seq);
}

await topics.call("/v0/topics/a", { method: "DELETE" });
await topics.append("a", records(800));
for (const items of both()) {
  const first = [];
  for await (const item of items) {
    first.push(item.reason ?? item.seq);
    if (first.length === 2) break;
  }
  told.push(first);
}
try {
  for await (const item of topics.read("absent")) told.push(item);
} catch (error) {
  told.push(error instanceof Refused, error.code);
}
console.log(JSON.stringify(told));
