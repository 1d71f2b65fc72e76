// The list of topics with live counters, and the form to create a topic.
import { get, pages, put, segment, topicPath } from "./api.js";
import { ask, bytes, count, empty, field, h, replace, sparkline, table, text, toast } from "./dom.js";

const SHOWN = 200;
const rates = new Map(); // name -> { head, at, values }

function rateOf(topic, now) {
  let entry = rates.get(topic.topic);
  if (!entry || topic.head_seq < entry.head) {
    if (rates.size > 5000) rates.clear();
    entry = { head: topic.head_seq, at: now, values: [] };
    rates.set(topic.topic, entry);
    return entry.values;
  }
  const seconds = (now - entry.at) / 1000;
  if (seconds > 0.5) {
    entry.values.push((topic.head_seq - entry.head) / seconds);
    if (entry.values.length > 40) entry.values.shift();
    entry.head = topic.head_seq;
    entry.at = now;
  }
  return entry.values;
}

export const perSecond = (value) => (value >= 100 ? count(Math.round(value)) : value.toFixed(value && value < 10 ? 1 : 0));

export function topicsPanel(context) {
  let prefix = "";
  const list = h("div", {}, h("p", { class: "muted" }, "Loading …"));
  const search = h("input", { type: "search", placeholder: "Names that begin with …", "aria-label": "Names that begin with", "data-search": true,
    oninput: () => { prefix = search.value.trim(); context.refresh(); } });
  const load = async (signal) => {
    const asked = prefix;
    const { items, isMore } = await pages(`v0/topics${asked ? `?prefix=${segment(asked)}` : ""}`, "topics", SHOWN, signal);
    if (asked !== prefix) return;
    const now = performance.now();
    if (!items.length) {
      replace(list, empty(asked ? "No topic begins so" : "No topics yet", asked ? "Try a shorter beginning." : "Make one here, or append with curl or a client."));
      return;
    }
    replace(list, table("Topics", ["Topic", "#Records", "#Head", "#Size", "#Per second", "Last minute"], items.map((topic) => {
      const values = rateOf(topic, now);
      const rate = values.at(-1) ?? 0;
      return [h("a", { href: `#/topic/${segment(topic.topic)}` }, text(topic.topic)), count(topic.count), count(topic.head_seq), bytes(topic.bytes),
        h("span", { class: rate ? "live-number" : "muted" }, perSecond(rate)), sparkline(values, { label: `${perSecond(rate)} records a second` })];
    })), isMore && h("p", { class: "muted" }, `The first ${SHOWN} topics are shown. Type the beginning of a name to see others.`));
  };
  const make = async () => {
    const form = await ask({ title: "New topic", action: "Create", body: [
      field("Name", h("input", { name: "name", required: true, autofocus: true, maxlength: 255 }), "A-Z a-z 0-9 . _ : -"),
      field("Type", h("select", { name: "type" }, h("option", { value: "log" }, "log"), h("option", { value: "queue" }, "queue"))),
      field("Durability", h("select", { name: "durability" }, ["disk", "fsync", "memory", "ephemeral"].map((name) => h("option", {}, name))), "fsync answers when the disk has the record") ] });
    if (!form) return;
    await put(topicPath(form.get("name")), { type: form.get("type"), durability: form.get("durability") });
    toast(`Created ${form.get("name")}.`);
    location.hash = `#/topic/${segment(form.get("name"))}`;
  };
  return { title: "Topics", every: 2000, load,
    body: [h("div", { class: "bar" }, search, h("button", { class: "primary", onclick: context.guard(make) }, "New topic")), list] };
}

export const stateOf = (name, signal) => get(topicPath(name), signal);
