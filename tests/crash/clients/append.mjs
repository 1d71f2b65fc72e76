// Appends numbered records one after the other until a line comes on standard input: `append.mjs URL TOPIC`.
// Prints the numbers that were acknowledged.
import { Topics } from "../../../clients/js/topics.js";

const [url, topic] = process.argv.slice(2);
const pause = (ms, signal) => new Promise((resolve) => setTimeout(resolve, Math.min(ms, 100), signal));
const topics = new Topics(url, { pause, patienceMs: 300_000, timeoutMs: 10_000 });
let isOver = false;
process.stdin.once("data", () => { isOver = true; process.stdin.destroy(); });
for (let number = 1; !isOver; number += 1) {
  await topics.append(topic, { data: number });
  console.log(number);
}
await topics.append(topic, { data: null, tag: "last" });
