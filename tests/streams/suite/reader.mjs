// The official client reads a stream from its beginning until it is closed; what it got goes to a
// file, one message a line (of bytes: as they came). A connection that breaks is begun again behind
// the last batch that was whole; without `live` the client reads one page, and the next is begun
// likewise. A session may end before its last batch was handed over: one that ended well is waited
// for, and what still comes of any other is not taken, because it is read again.
//   node reader.mjs URL false|long-poll|sse json|bytes FILE
import { openSync, writeSync } from "node:fs"
import { setTimeout as sleep } from "node:timers/promises"
import { stream } from "@durable-streams/client"
import { limited } from "./limited.mjs"

const [url, live, mode, path] = process.argv.slice(2)
const file = openSync(path, "w")
const told = { live, again: 0, batches: 0, last: "", unanswered: [] }
// A long-poll with nothing to say is answered after 4 s.
const ask = limited(20_000, told.unanswered)
let offset = "-1"
let isClosed = false
let round = 0

function took(from, batch, bytes) {
  if (from !== round) return
  if (bytes.length) writeSync(file, bytes)
  told.batches += 1
  offset = batch.offset
  isClosed = batch.streamClosed && batch.upToDate
}

while (!isClosed) {
  const mine = (round += 1)
  try {
    const session = await stream({
      url,
      offset,
      live: live === "false" ? false : live,
      json: mode === "json",
      warnOnHttp: false,
      fetch: ask,
      backoffOptions: { initialDelay: 50, maxDelay: 300, multiplier: 1.3, maxRetries: Infinity },
      sseResilience: { maxShortConnections: 1000, backoffMaxDelay: 200, logWarnings: false },
    })
    if (mode === "json")
      session.subscribeJson((batch) =>
        took(mine, batch, Buffer.from(batch.items.map((item) => JSON.stringify(item) + "\n").join("")))
      )
    else session.subscribeBytes((batch) => took(mine, batch, batch.data))
    await session.closed
    for (let turn = 0; turn < 200 && session.offset !== offset; turn++) await sleep(10)
    if (session.streamClosed && session.offset === offset) isClosed = true
  } catch (error) {
    told.last = String(error)
  }
  if (!isClosed) {
    told.again += 1
    await sleep(20 + Math.random() * 50)
  }
}
process.stdout.write(JSON.stringify({ ...told, offset }) + "\n")
process.exit(0)
