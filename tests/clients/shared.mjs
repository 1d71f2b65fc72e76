// Follows a topic that comes later, as a tab does that has no locks, and prints what came: `shared.mjs URL`.
import { Topics } from "../../clients/js/topics.js";

const topics = new Topics(process.argv[2]);
const stop = new AbortController();
const seen = [];
setTimeout(() => topics.append("later", { data: 0 }), 200);
try {
  for await (const item of topics.live("later", { shared: true, wait: true, signal: stop.signal })) {
    seen.push(item.kind === "record" ? item.seq : item.kind);
    if (item.kind === "caught-up" && item.head < 3) await topics.append("later", { data: 1 });
    if (item.seq === 3) stop.abort();
  }
} catch (error) {
  if (!stop.signal.aborted) throw error;
}
console.log(JSON.stringify(seen));
