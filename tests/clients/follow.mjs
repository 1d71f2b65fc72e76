// Follows a topic and prints one line for each item: `follow.mjs URL TOPIC CURSOR-FILE`.
import { fileStore, Topics } from "../../clients/js/topics.js";

const [url, topic, file] = process.argv.slice(2);
// The pauses of a test are short; what they would be is tested with a faked server.
const pause = (ms, signal) => new Promise((resolve) => setTimeout(resolve, Math.min(ms, 100), signal));
const topics = new Topics(url, { pause });
for await (const item of topics.live(topic, { store: fileStore(file), saveEveryMs: 0 })) {
  if (item.kind !== "caught-up") console.log(JSON.stringify(item));
  if (item.tag === "last") break;
}
