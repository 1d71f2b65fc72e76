// Records of a topic: the browser, the live tail, append and delete.
import { get, post, segment, send, topicPath } from "./api.js";
import { ask, badge, bytes, checkName, count, empty, field, h, moment, nameField, preview, replace, text, toast, tree } from "./dom.js";

// The most rows of the live tail, and the most characters of their data.
const ROWS_MAX = 500;
const TAIL_SIZE_MAX = 20_000_000;
const RAW_SHOWN = 200_000;

export function recordRow(name, record, onDelete) {
  const detail = h("div", { class: "record-detail" });
  const details = h("details", { class: "record", "data-seq": record.$seq, ontoggle: () => { if (details.open && !detail.hasChildNodes()) fill(); } },
    h("summary", {},
      h("span", { class: "seq" }, count(record.$seq)), h("span", { class: "when" }, moment(record.$ts)),
      record.$tag !== undefined && h("span", { class: "chip", title: "tag" }, text(record.$tag)),
      record.$node !== undefined && h("span", { class: "chip plain", title: "node" }, text(record.$node)),
      h("span", { class: "peek", dir: "auto" }, preview(record.data ?? record))), detail);
  const fill = () => {
    const raw = h("div", {});
    const rest = Object.fromEntries(Object.entries(record).filter(([member]) => !["data", "meta"].includes(member)));
    replace(detail,
      h("div", { class: "detail-block" }, h("h4", {}, "data"), tree(record.data)),
      record.meta !== undefined && h("div", { class: "detail-block" }, h("h4", {}, "meta"), tree(record.meta)),
      h("div", { class: "detail-block" }, h("h4", {}, "record"), tree(rest)),
      h("div", { class: "bar" },
        h("button", { onclick: () => exact(name, record.$seq, raw) }, "Exact bytes"),
        record.$tag !== undefined && onDelete && h("button", { class: "danger", onclick: () => onDelete(record.$tag) }, "Delete this tag …")), raw);
  };
  return details;
}

async function exact(name, seq, box) {
  try {
    const response = await send(`${topicPath(name)}/records/${seq}`, { headers: { prefer: "return=minimal" } });
    const content = await response.text();
    replace(box, h("p", { class: "muted" }, `${bytes(new Blob([content]).size)} as the server sends them`, content.length > RAW_SHOWN && `; the first ${count(RAW_SHOWN)} characters are shown`),
      h("pre", { class: "raw", tabindex: 0, dir: "ltr" }, content.slice(0, RAW_SHOWN)));
  } catch (error) { toast(error.message, true); }
}

const tombstoneRow = (tombstone) => h("div", { class: "tombstone", role: "note" }, badge("gap", "warn"),
  ` ${count(tombstone.gap_from)} to ${count(tombstone.gap_to)} are gone: `, h("strong", {}, tombstone.reason),
  tombstone.missed_estimate !== undefined && ` (about ${count(tombstone.missed_estimate)} records)`);

function filters(values) {
  const query = new URLSearchParams();
  for (const name of ["tag", "tag_prefix", "node", "filter"]) if (values[name]) query.set(name, values[name]);
  return query;
}

function filterInputs(values, onChange) {
  const input = (name, label, hint) => h("input", { type: "search", placeholder: label, title: hint, "aria-label": label, "data-filter": name, value: values[name] ?? "",
    onchange: (event) => { values[name] = event.target.value.trim(); onChange(); } });
  return [input("tag", "tag", "Records with exactly this tag"), input("tag_prefix", "tag begins with", ""), input("node", "node", "Records of this writer"),
    input("filter", "filter (JSON)", 'For instance ["Not", ["tag", "Glob", "debug:*"]]')];
}

export function browsePanel(name, context, openDelete) {
  const values = {};
  const trail = []; // the start of each earlier page
  let begin = { before_seq: "" };
  const list = h("div", { class: "records" });
  const foot = h("div", { class: "bar" });
  const load = async (signal) => {
    const query = filters(values);
    query.set("limit", "50");
    const isAscending = begin.from_seq !== undefined || Boolean(begin.since);
    if (!isAscending) query.set("order", "desc");
    for (const [member, value] of Object.entries(begin)) if (value !== "" && value !== undefined) query.set(member, value);
    const page = await get(`${topicPath(name)}/records?${query}`, signal);
    const rows = page.records.map((record) => recordRow(name, record, openDelete));
    const gap = page.tombstone && tombstoneRow(page.tombstone);
    if (gap) { if (isAscending) rows.unshift(gap); else rows.push(gap); }
    replace(list, rows.length ? rows : empty("No records here", page.complete === false ? "This page searched a part of the topic; go on to the next one." : "Change the filter or the start, or append a record."));
    const next = isAscending ? { from_seq: page.next_from_seq } : { before_seq: page.next_before_seq };
    const isMore = !page.complete && Object.values(next)[0] !== undefined && Object.values(next)[0] !== null;
    replace(foot,
      h("button", { disabled: !trail.length, onclick: () => { if (trail.length) { begin = trail.pop(); context.refresh(); } } }, "← Back"),
      h("button", { disabled: !isMore, onclick: () => { if (begin !== next) { trail.push(begin); begin = next; context.refresh(); } } }, isAscending ? "Newer →" : "Older →"),
      h("span", { class: "muted" }, `${count(page.records.length)} records · head ${count(page.head_seq)} · from ${count(page.earliest_seq)}`));
  };
  const restart = () => { trail.length = 0; context.refresh(); };
  const start = h("input", { type: "text", placeholder: "seq, 10m, or time", "aria-label": "Start at a seq, a duration before now, or a time",
    title: "1200 · 10m · 2026-11-05T10:00:00Z", onchange: () => {
      const value = start.value.trim();
      begin = value === "" ? { before_seq: "" } : /^\d+$/.test(value) ? { from_seq: Math.max(0, Number(value) - 1) } : { since: value };
      restart();
    } });
  const newest = h("button", { onclick: () => { start.value = ""; begin = { before_seq: "" }; restart(); } }, "Newest");
  return { load, body: [h("div", { class: "bar wrap" }, start, filterInputs(values, restart), newest), list, foot] };
}

// Follows the topic by long-polls from its own position, so that a pause misses no record.
export function tailPanel(name, context) {
  const values = {};
  const list = h("div", { class: "records", role: "log", "aria-live": "off" });
  const sizes = new WeakMap(); // row -> characters of its record
  const state = h("span", { class: "muted", id: "tail-state" }, "connecting …");
  let position = null, isPaused = false, isLost = false, held = 0, size = 0;
  const clear = () => { size = 0; list.replaceChildren(); };
  const turn = async (signal) => {
    if (isPaused) { await new Promise((done) => setTimeout(done, 200)); return false; }
    const query = filters(values);
    query.set("limit", "200");
    if (position === null) query.set("last", "20");
    else { query.set("from_seq", position); query.set("wait_ms", isLost ? "0" : "15000"); }
    const page = await get(`${topicPath(name)}/records?${query}`, signal);
    isLost = false;
    if (isPaused) return true; // read again from the same position
    if (page.tombstone && position !== null) list.prepend(tombstoneRow(page.tombstone));
    position = page.next_from_seq ?? page.head_seq;
    for (const record of page.records) {
      const row = recordRow(name, record);
      sizes.set(row, JSON.stringify(record).length);
      size += sizes.get(row);
      held += 1;
      list.prepend(row);
    }
    while (list.childElementCount > ROWS_MAX || (size > TAIL_SIZE_MAX && list.childElementCount > 1)) {
      size -= sizes.get(list.lastElementChild) ?? 0;
      list.lastElementChild.remove();
    }
    replace(state, h("span", { class: "pulse" }), ` live at ${count(position)} · ${count(held)} received`);
    return true;
  };
  const pause = h("button", { "aria-pressed": "false", "data-pause": true, onclick: () => {
    isPaused = !isPaused;
    pause.setAttribute("aria-pressed", isPaused);
    pause.textContent = isPaused ? "Resume" : "Pause";
    if (isPaused) replace(state, `paused at ${count(position)}; nothing is missed`); else context.restartLoop();
    if (isPaused) context.restartLoop();
  } }, "Pause");
  const again = () => { position = null; held = 0; clear(); context.restartLoop(); };
  return { loop: turn, onLost: (message) => { isLost = true; replace(state, badge("away", "bad"), ` ${message}; trying again`); },
    body: [h("div", { class: "bar wrap" }, pause, h("button", { onclick: clear }, "Clear"), filterInputs(values, again), state), list] };
}

export async function appendDialog(name, isQueue) {
  const parse = (form, label) => { try { JSON.parse(form.get(label)); } catch (error) { throw new Error(`${label} is not JSON: ${error.message}`); } };
  const check = (form) => { parse(form, "data"); if (form.get("meta")) parse(form, "meta"); };
  const form = await ask({ title: `Append to ${name}`, action: "Append", check, body: [
    field("Data (JSON)", h("textarea", { name: "data", rows: 8, required: true, autofocus: true, spellcheck: "false" }, '{"hello": "world"}')),
    field("Tag", h("input", { name: "tag" })), field("Meta (JSON)", h("input", { name: "meta", spellcheck: "false" })),
    isQueue && field("Delay (ms)", h("input", { name: "delay_ms", inputmode: "numeric" })) ] });
  if (!form) return false;
  // Send the typed text itself, so that numbers stay exact.
  const members = [`"data":${form.get("data")}`];
  if (form.get("tag")) members.push(`"tag":${JSON.stringify(form.get("tag"))}`);
  if (form.get("meta")) members.push(`"meta":${form.get("meta")}`);
  if (form.get("delay_ms")) members.push(`"delay_ms":${Number(form.get("delay_ms"))}`);
  const answer = await post(topicPath(name), `{"node":"console","records":[{${members.join(",")}}]}`);
  toast(`Stored as ${answer.first_seq}.`);
  return true;
}

export async function deleteDialog(name, tag = "") {
  const check = (form) => {
    checkName(name)(form);
    if (!form.get("tag") && !form.get("before")) throw new Error("Name a tag or a seq.");
  };
  const form = await ask({ title: `Delete records of ${name}`, action: "Delete", isDangerous: true, check, body: [
    h("p", {}, "Deleted records cannot be brought back. With a tag and a seq, only records that meet both are deleted."),
    field("Tag", h("input", { name: "tag", value: tag, autofocus: true })),
    field("The tag of a record", h("select", { name: "how" }, h("option", { value: "is" }, "is exactly this"), h("option", { value: "begins" }, "begins with this"))),
    field("Before seq", h("input", { name: "before", inputmode: "numeric", pattern: "[0-9]*" })), nameField(name) ] });
  if (!form) return false;
  const body = {};
  const match = form.get("tag");
  if (match) body.match = form.get("how") === "begins" ? ["tag", "Glob", `${match}*`] : match;
  if (form.get("before")) body.before_seq = Number(form.get("before"));
  const answer = await post(`${topicPath(name)}/delete`, body);
  toast(`Deleted ${count(answer.deleted)} records.`);
  return true;
}

export async function dropDialog(name) {
  const form = await ask({ title: `Drop ${name}`, action: "Drop the topic", isDangerous: true, check: checkName(name),
    body: [h("p", {}, "The topic goes with all its records, views and routers."), nameField(name)] });
  if (!form) return false;
  await send(topicPath(name), { method: "DELETE" });
  toast(`Dropped ${name}.`);
  return true;
}

export const topicLink = (name) => h("a", { href: `#/topic/${segment(name)}` }, text(name));
