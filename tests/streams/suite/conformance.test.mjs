// The official suite against the server at SUITE_URL. Two ways to kill that server meanwhile, by a
// request to SUITE_CONTROL that is answered when it is back:
//   SUITE_KILLS=between    before every top-level group
//   SUITE_KILLS=inside:N   inside every Nth case, once, between two of its requests
import { beforeEach } from "vitest"
import { runConformanceTests } from "@durable-streams/server-conformance-tests"

const control = process.env.SUITE_CONTROL
const [kills, every] = (process.env.SUITE_KILLS ?? "none").split(":")
const send = globalThis.fetch
// Cases that measure time, or that send several requests at once.
const HASTY = /ttl|expir|concurrent|cursor|wait|timeout|live|long-poll|sse|stress/i

async function killed(why) {
  const answer = await send(control, { method: "POST", body: why })
  if (!answer.ok) throw new Error(`the server did not come back: ${await answer.text()}`)
}

function lineage(task) {
  const names = [task.name]
  for (let suite = task.suite; suite; suite = suite.suite) names.unshift(suite.name)
  return names
}

if (kills === "between") {
  let group
  let back = Promise.resolve()
  beforeEach(({ task }) => {
    const name = lineage(task)[0]
    if (name !== group) {
      // Cases of one group may run at once: all of them wait for the one kill.
      back = group === undefined ? back : killed(name)
      group = name
    }
    return back
  }, 60_000)
}

if (kills === "inside") {
  let cases = 0
  let left = -1 // requests until the kill; below 0: none is due
  let open = 0
  beforeEach(({ task }) => {
    const name = lineage(task).join(" ")
    left = HASTY.test(name) || cases++ % Number(every) ? -1 : 1 + (cases % 3)
  })
  globalThis.fetch = async (...asked) => {
    if (/[?&]live=/.test(String(asked[0]?.url ?? asked[0]))) left = -1
    if (left === 0 && open === 0) {
      left = -1
      await killed("inside")
    } else if (left > 0) left -= 1
    open += 1
    try {
      return await send(...asked)
    } finally {
      open -= 1
    }
  }
}

runConformanceTests({ baseUrl: process.env.SUITE_URL })
