// The official server of Durable Streams, with streams in files. By default it syncs every append.
//   node serve.mjs DIRECTORY PORT PORT-FILE
import { renameSync, writeFileSync } from "node:fs"
import { DurableStreamTestServer } from "@durable-streams/server"

const [dataDir, port, portFile] = process.argv.slice(2)
const server = new DurableStreamTestServer({ dataDir, port: Number(port), host: "127.0.0.1" })
await server.start()
writeFileSync(`${portFile}.new`, port)
renameSync(`${portFile}.new`, portFile)
