// One official IdempotentProducer that writes until it is told to end, on standard input:
// "stop": send what is left and report; "close": that, and close the stream with a last message.
//   node producer.mjs URL NAME CONTENT-TYPE IN-FLIGHT MOST
// A message is {"w":NAME,"n":NUMBER,"pad":...}; of bytes, such a line. The client sends nothing again
// by itself, as its documentation says: the fetch it is given does, with the same headers.
import { createInterface } from "node:readline"
import { setTimeout as sleep } from "node:timers/promises"
import { DurableStream, IdempotentProducer } from "@durable-streams/client"
import { limited } from "./limited.mjs"

const [url, name, contentType, inFlight, most] = process.argv.slice(2)
const told = { name, appended: 0, again: 0, errors: [], unanswered: [] }
const ask = limited(10_000, told.unanswered)
const end = contentType === "application/json" ? "" : "\n"

async function patient(...asked) {
  for (;;) {
    try {
      const answer = await ask(...asked)
      if (answer.status < 500 && answer.status !== 429) return answer
      await answer.arrayBuffer()
    } catch {
      // The server is away.
    }
    told.again += 1
    await sleep(20 + Math.random() * 100)
  }
}

const stream = new DurableStream({ url, contentType, warnOnHttp: false })
const producer = new IdempotentProducer(stream, name, {
  maxInFlight: Number(inFlight),
  lingerMs: 2,
  maxBatchBytes: 4096,
  fetch: patient,
  onError: (error) => told.errors.push(String(error)),
})

let order = ""
createInterface({ input: process.stdin })
  .on("line", (line) => (order = line))
  .on("close", () => (order ||= "stop"))

while (!order && told.appended < Number(most) && !told.errors.length) {
  for (let turn = 0; turn < 10; turn++) {
    const pad = "abcdefghijklmnopqrstuvwxyz".repeat(told.appended % 9)
    producer.append(JSON.stringify({ w: name, n: told.appended, pad }) + end)
    told.appended += 1
  }
  do await sleep(2 + Math.random() * 8)
  while (producer.inFlightCount > Number(inFlight))
}
while (!order) await sleep(20)
await producer.flush()
if (order === "close") told.tail = (await producer.close(JSON.stringify({ w: "end", n: 0 }) + end)).finalOffset
process.stdout.write(JSON.stringify(told) + "\n")
process.exit(0)
