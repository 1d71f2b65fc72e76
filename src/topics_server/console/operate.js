// The whole server: health with advice, charts of metrics, and routers as a graph.
import { get, pages, segment, send } from "./api.js";
import { badge, bytes, count, empty, h, micros, replace, s, span, sparkline, stat, table, text } from "./dom.js";
import { topicLink } from "./records.js";
import { perSecond } from "./topics.js";

const SAMPLES = 90;
const samples = []; // { at, metrics } of each scrape since the page was opened

const sum = (value) => (Array.isArray(value) ? value.reduce((total, item) => total + item.value, 0) : value ?? 0);
const only = (value, labels) => (Array.isArray(value) ? value.filter((item) => Object.entries(labels).every(([name, wanted]) => wanted === item.labels[name])) : []);

// The bound below which a share of the observations between two scrapes lies; null without observations.
function quantile(before, after, share, labels) {
  const totals = new Map();
  const count = (buckets, sign) => { for (const item of only(buckets, labels)) totals.set(item.labels.le, (totals.get(item.labels.le) ?? 0) + sign * item.value); };
  count(after, 1);
  count(before, -1);
  const bounds = [...totals].map(([le, total]) => [le === "+Inf" ? Infinity : Number(le), total]).sort((a, b) => a[0] - b[0]);
  const all = bounds.at(-1)?.[1] ?? 0;
  if (all <= 0) return null;
  let finite = 0;
  for (const [bound, total] of bounds) {
    if (bound !== Infinity) finite = bound;
    if (total >= share * all) {
      return bound === Infinity ? finite : bound;
    }
  }
  return finite;
}

export async function sample(signal) {
  const response = await send("v0/metrics", { headers: { accept: "application/json" }, signal });
  const metrics = await response.json();
  samples.push({ at: performance.now(), metrics });
  if (samples.length > SAMPLES) samples.shift();
  return metrics;
}

const series = (of) => samples.slice(1).map((now, i) => of(now.metrics, samples[i].metrics, (now.at - samples[i].at) / 1000)).map((value) => (Number.isFinite(value) ? value : 0));
const rate = (name) => series((now, before, seconds) => Math.max(0, sum(now[name]) - sum(before[name])) / seconds);
const latency = (name, share, labels = {}) => series((now, before) => quantile(before[`${name}_bucket`], now[`${name}_bucket`], share, labels) ?? NaN);
const level = (name) => samples.map(({ metrics }) => sum(metrics[name]));

function chart(title, values, format, note) {
  const last = values.at(-1) ?? 0, top = Math.max(0, ...values);
  return h("figure", { class: "chart" }, h("figcaption", {}, h("span", {}, title), h("strong", {}, values.length ? format(last) : "–")),
    sparkline(values, { width: 300, height: 64, label: `${title}: now ${format(last)}, at most ${format(top)}` }), h("small", { class: "muted" }, note ?? "", note && " · ", `peak ${format(top)}`));
}

const APPEND = { route: "/v0/topics/:topic", method: "POST" };
const ADVICE = [
  [/read.only|sync/i, "A disk refused a sync. Look at the server's log and the disk, then restart the server: it opens again what is safe."],
  [/checkpoint/i, "Snapshots fail, so the journal grows. Look for a full disk and for the first error in the log."],
  [/seal/i, "Records cannot be moved into segments. Look for a full disk and for the first error in the log."],
  [/space|disk|full/i, "Free space or move old segments to a second folder with --cold-dir."],
];

async function probe(path, signal) {
  try { return await get(path, signal); } catch (error) { if (error.name === "AbortError") throw error; return { status: error.code || "away", message: error.message, reasons: error.detail?.reasons }; }
}

export function overviewPanel(context) {
  const health = h("section", { "aria-label": "Health" });
  const figures = h("div", { class: "stats" });
  const charts = h("div", { class: "charts" });
  const load = async (signal) => {
    const [live, ready] = await Promise.all([probe("v0/health", signal), probe("v0/ready", signal)]);
    let metrics = {}, failure = null;
    try { metrics = await sample(signal); } catch (error) { if (error.name === "AbortError") throw error; failure = error; }
    const free = sum(metrics.topics_disk_free_bytes), total = sum(metrics.topics_disk_total_bytes), least = sum(metrics.topics_disk_min_free_bytes);
    const findings = [];
    if (ready.status === "ready" && failure) findings.push([`The metrics cannot be read: ${failure.message}`, "The figures below need a key that may read every topic."]);
    if (ready.status !== "ready") for (const reason of ready.reasons ?? [ready.message ?? ready.status]) findings.push([String(reason), ADVICE.find(([pattern]) => pattern.test(String(reason)))?.[1] ?? "Look at the server's log."]);
    if (free < least * 2) findings.push([`Only ${bytes(free)} of disk are free; appends stop at ${bytes(least)}.`, ADVICE[3][1]]);
    if (sum(metrics.topics_routers_stalled)) findings.push([`${count(sum(metrics.topics_routers_stalled))} routers are stalled.`, "Open Routers: the reason stands beside each of them."]);
    if (sum(metrics.topics_views_failed)) findings.push([`${count(sum(metrics.topics_views_failed))} views have failed.`, "Open the topic's Views: the record and the error stand there. Mend the definition, or skip the record with a rebuild."]);
    if (sum(metrics.topics_records_damaged)) findings.push([`${count(sum(metrics.topics_records_damaged))} records were lost to damage.`, "Run topics verify on the data directory: it names the files and the records. A right copy of a file that is put back heals its records at the next start."]);
    if (sum(metrics.topics_pressure) > 0.8) findings.push(["The server is under pressure.", "Appends may wait or get 429. Give important topics a priority, or send less."]);
    replace(health, h("div", { class: findings.length ? "health warn" : "health good" }, h("strong", {}, findings.length ? `${findings.length === 1 ? "One thing needs" : `${findings.length} things need`} you` : "All is well"),
      h("span", { class: "muted" }, `version ${live.version ?? "?"} · up ${span(live.uptime_ms ?? 0)} · ${ready.status}`),
      findings.length > 0 && h("ul", {}, findings.map(([what, todo]) => h("li", {}, h("b", {}, what), " ", todo)))));
    if (failure) throw failure;
    replace(figures, stat("Topics", count(sum(metrics.topics_topics))), stat("Records", count(sum(metrics.topics_records_live))), stat("Data", bytes(sum(metrics.topics_bytes_live))),
      stat("Jobs in flight", count(sum(metrics.topics_queue_leases_in_flight))), stat("Connections", count(sum(metrics.topics_http_connections))),
      stat("Disk free", bytes(free), total ? `${Math.round((free / total) * 100)} % of ${bytes(total)}` : ""));
    replace(charts,
      chart("Requests a second", rate("topics_http_requests_total"), perSecond),
      chart("Append latency, 99 %", latency("topics_http_request_us", 0.99, APPEND), micros, "upper bound of its bucket"),
      chart("Reads, 99 %", latency("topics_http_request_us", 0.99, { route: "/v0/topics/:topic/diff", method: "POST" }), micros, "POST …/diff"),
      chart("Sync, 99 %", latency("topics_wal_fsync_latency_us", 0.99), micros, "journal"),
      chart("Journal", rate("topics_wal_bytes_written_total"), (value) => `${bytes(value)}/s`, "written"),
      chart("Loop lag", level("topics_loop_lag_ms"), (value) => `${value.toFixed(1)} ms`),
      chart("Watch sessions", level("topics_watch_sessions"), (value) => count(Math.round(value)), `behind: ${count(sum(metrics.topics_watch_behind))}`),
      chart("Memory", level("process_resident_memory_bytes"), bytes));
  };
  return { title: "Overview", every: 2000, load, body: [health, figures, h("h2", {}, "Since this page was opened"), charts] };
}

// -- routers ---------------------------------------------------------------------------------------

const GRAPH_MAX = 60;

// Topics in columns by their distance from a source; a router is an arrow with its lag.
function graph(routers) {
  const column = new Map();
  for (const router of routers) { column.set(router.source, column.get(router.source) ?? 0); column.set(router.dest, column.get(router.dest) ?? 0); }
  for (let round = 0; round < Math.min(column.size, 12); round += 1) for (const router of routers) column.set(router.dest, Math.min(12, Math.max(column.get(router.dest), router.source === router.dest ? 0 : column.get(router.source) + 1)));
  const used = [...new Set(column.values())].sort((a, b) => a - b);
  const rows = used.map(() => 0);
  const place = new Map();
  for (const [name, number] of column) { const at = used.indexOf(number); place.set(name, { x: 20 + at * 270, y: 20 + rows[at] * 70 }); rows[at] += 1; }
  const width = used.length * 270 - 60, height = Math.max(...rows) * 70 + 10;
  const arrows = routers.map((router) => {
    const from = place.get(router.source), to = place.get(router.dest), back = to.x <= from.x;
    const x1 = from.x + 170, y1 = from.y + 20, x2 = back ? to.x + 170 : to.x, y2 = to.y + 20;
    const bend = back ? 70 : (x2 - x1) / 2;
    return [s("path", { class: router.state === "stalled" ? "edge bad" : "edge", d: `M${x1},${y1} C${x1 + bend},${y1} ${x2 + (back ? bend : -bend)},${y2} ${x2},${y2}`, "marker-end": "url(#arrow)" }),
      s("text", { class: "edge-label", x: (x1 + x2) / 2, y: (y1 + y2) / 2 - 6, "text-anchor": "middle" }, router.lag === undefined ? "" : router.lag ? `lag ${count(router.lag)}` : "caught up")];
  });
  const nodes = [...place].map(([name, at]) => s("a", { href: `#/topic/${segment(name)}` }, s("rect", { class: "node", x: at.x, y: at.y, width: 170, height: 40, rx: 8 }), s("title", {}, name),
    s("text", { x: at.x + 85, y: at.y + 25, "text-anchor": "middle" }, name.length > 21 ? `${name.slice(0, 20)}…` : name)));
  const marker = s("marker", { id: "arrow", viewBox: "0 0 10 10", refX: 9, refY: 5, markerWidth: 7, markerHeight: 7, orient: "auto-start-reverse" }, s("path", { d: "M0,0 L10,5 L0,10 z", class: "arrow" }));
  return h("div", { class: "scroll graph", tabindex: 0, role: "region", "aria-label": "Routers as a graph; the table below says the same" }, s("svg", { viewBox: `0 0 ${width} ${height}`, width, height }, s("defs", {}, marker), arrows, nodes));
}

export function routersPanel(context) {
  const box = h("div", {});
  const load = async (signal) => {
    const { items, isMore } = await pages("v0/routers", "routers", GRAPH_MAX, signal);
    const routers = [];
    for (let from = 0; from < items.length; from += 6) routers.push(...await Promise.all(items.slice(from, from + 6).map((router) => get(`v0/routers/${segment(router.router)}`, signal))));
    replace(box, routers.length ? [graph(routers), table("Routers", ["Router", "From", "To", "#Forwarded", "#Lag", "State", "Filter"], routers.map((router) => [text(router.router), topicLink(router.source), topicLink(router.dest), count(router.forwarded_total), count(router.lag),
      h("span", {}, badge(router.state, router.state === "running" ? "good" : "bad"), router.reason && h("small", {}, " ", text(router.reason.message ?? router.reason))), h("code", {}, router.filter ? JSON.stringify(router.filter) : "")])), isMore && h("p", { class: "muted" }, `The first ${GRAPH_MAX} routers are shown.`)]
      : empty("No routers yet", "A router copies records from one topic to another as they arrive: ", h("code", {}, `curl -X PUT …/v0/routers/audit --json '{"source": "orders", "dest": "audit"}'`)));
  };
  return { title: "Routers", every: 3000, load, body: [box] };
}
