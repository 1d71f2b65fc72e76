// Views of a topic with a query box, and the content of a stream.
import { get, pages, post, segment, send, topicPath } from "./api.js";
import { badge, bytes, count, empty, field, h, plain, replace, table, text } from "./dom.js";

const TEXT_SHOWN = 200_000;
const STREAMS_SHOWN = 50;
const streamStates = new Map(); // topic and epoch -> the stream's state, cached because a stream never changes its path

export function viewsPanel(name, context) {
  const list = h("div", {});
  const result = h("div", { "aria-live": "polite" });
  const chosen = h("select", { "aria-label": "View" });
  const sql = h("textarea", { rows: 4, spellcheck: "false", "aria-label": "SQL or the name of a query", placeholder: "SELECT … from the view's tables, or the name of a query" });
  const run = context.guard(async () => {
    const asked = sql.value.trim();
    const answer = await post(`${topicPath(name)}/views/${segment(chosen.value)}/query`, /\s/.test(asked) ? { sql: asked } : { query: asked || "all" });
    replace(result, h("p", { class: "muted" }, `${count(answer.row_count)} rows as of record ${count(answer.processed_sequence)}`, answer.truncated && "; there are more"),
      answer.rows.length ? table("Rows", answer.columns, answer.rows.slice(0, 1000).map((row) => row.map((cell) => cell === null ? h("span", { class: "j-null" }, "null") : text(typeof cell === "object" ? JSON.stringify(cell) : plain(cell).slice(0, 2000)))), { areForeign: true }) : empty("No rows"));
  });
  sql.addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); run(); } });
  const box = h("div", { hidden: true }, h("div", { class: "bar wrap" }, field("View", chosen), h("button", { class: "primary", onclick: run }, "Run"), h("small", { class: "muted" }, "Ctrl + Enter")), sql, result);
  const load = async (signal) => {
    const { views } = await get(`${topicPath(name)}/views`, signal);
    box.hidden = !views.length;
    const before = chosen.value;
    if ([...chosen.options].map((option) => option.value).join("\n") !== views.map((view) => view.view).join("\n")) {
      replace(chosen, views.map((view) => h("option", { value: view.view }, view.view)));
      if (before) chosen.value = before;
    }
    replace(list, views.length ? table("Views", ["View", "Status", "#Processed", "#Lag", "#Size", "Last error"], views.map(({ view, stats }) => [text(view), badge(stats.status, stats.status === "ready" ? "good" : "warn"), count(stats.processed_sequence), count(stats.lag), bytes(stats.bytes),
      text(stats.last_error === null ? "" : typeof stats.last_error === "string" ? stats.last_error : JSON.stringify(stats.last_error))]))
      : empty("This topic has no views", "A view keeps the result of SQL over every record. For a start: ", h("code", {}, `curl -X PUT …/v0/topics/${name}/views/by-tag --json '{"shortcut": {"count_by_tag": true}}'`)));
  };
  return { every: 3000, load, body: [list, box] };
}

export function streamsPanel(context) {
  const result = h("div", { "aria-live": "polite" });
  const path = h("input", { type: "text", placeholder: "chat/42", "aria-label": "Path of a stream", required: true });
  const list = h("div", {});
  const known = async (topic, signal) => {
    const key = `${topic.topic} ${topic.epoch}`;
    if (!streamStates.has(key)) {
      if (streamStates.size > 1000) streamStates.clear();
      try { streamStates.set(key, (await get(topicPath(topic.topic), signal)).stream); } catch (error) { if (error.status !== 404) throw error; }
    }
    return { topic, stream: streamStates.get(key) };
  };
  const load = async (signal) => {
    const { items, isMore } = await pages("v0/topics?prefix=ds%3A", "topics", STREAMS_SHOWN, signal);
    const found = (await Promise.all(items.map((topic) => known(topic, signal)))).filter(({ stream }) => stream);
    replace(list, found.length ? table("Streams", ["Path", "Content type", "#Records", "#Size"], found.map(({ topic, stream }) => [
      h("button", { class: "link", onclick: () => { path.value = stream.path; read(); } }, text(stream.path)), text(stream.content_type), count(topic.count), bytes(topic.bytes)]))
      : empty("No stream has a path of its own", "A stream whose path is the name of a topic is listed with the topics."), isMore && h("p", { class: "muted" }, `The first ${STREAMS_SHOWN} streams are shown.`));
  };
  const read = context.guard(async () => {
    const where = path.value.trim().split("/").map(segment).join("/");
    const response = await send(`v1/stream/${where}?offset=-1`);
    const size = Number(response.headers.get("content-length"));
    const content = await response.text();
    replace(result, h("div", { class: "stats" }, ["content-type", "stream-next-offset", "stream-up-to-date", "stream-closed"].map((name) => response.headers.get(name) && h("div", { class: "stat" }, h("span", { class: "stat-label" }, name), h("span", { class: "mono" }, response.headers.get(name))))),
      h("p", { class: "muted" }, `The first page${size ? `, ${bytes(size)}` : ""}, as text; nothing in it is run.`, content.length > TEXT_SHOWN && ` The first ${count(TEXT_SHOWN)} characters are shown.`),
      h("pre", { class: "raw", tabindex: 0, dir: "auto" }, content.slice(0, TEXT_SHOWN)));
  });
  const form = h("form", { class: "bar", onsubmit: (event) => { event.preventDefault(); read(); } }, path, h("button", { class: "primary", type: "submit" }, "Read"));
  return { title: "Streams", every: 5000, load, body: [h("p", { class: "muted" }, "Streams are the topics below /v1/stream. Type or choose the path of one to read it."), form, list, result] };
}
