// The consumers of one topic: the position, the lag and the actions of each.
import { pages, post, put, segment, send, topicPath } from "./api.js";
import { ask, checkName, count, empty, field, h, moment, nameField, replace, span, stat, table, text, toast } from "./dom.js";

const SHOWN = 200;

// A typed seq. It is sent as a number, so it must not exceed 2^53, where JavaScript begins to round.
function seqOf(form) {
  const typed = form.get("seq").trim();
  if (!/^\d+$/.test(typed) || !Number.isSafeInteger(Number(typed))) throw new Error("A seq is a number from 0 to 2^53.");
  return Number(typed);
}

export function consumersPanel(name, context) {
  const path = (consumer, rest = "") => `${topicPath(name)}/consumers/${segment(consumer)}${rest}`;
  const figures = h("div", { class: "stats" });
  const list = h("div", {});
  const act = (work) => context.guard(async () => { if ((await work()) !== false) context.refresh(); });
  const seqField = (label, value, hint) => field(label, h("input", { name: "seq", value: String(value), required: true, autofocus: true, inputmode: "numeric", autocomplete: "off" }), hint);

  const commit = (consumer) => act(async () => {
    const check = (form) => { if (seqOf(form) < consumer.seq) throw new Error(`The consumer is at ${count(consumer.seq)}. Use Rewind to set it back.`); };
    const form = await ask({ title: `Commit ${consumer.consumer}`, action: "Commit", isDangerous: true, check, body: [
      h("p", {}, `The consumer is at ${count(consumer.seq)}. Its reader does not get the records that a commit passes.`), seqField("Every record is finished up to seq", consumer.head_seq) ] });
    if (!form) return false;
    const answer = await post(path(consumer.consumer, "/commit"), { seq: seqOf(form) });
    toast(answer.moved ? `${consumer.consumer} is at ${count(answer.seq)}.` : `Nothing moved: ${consumer.consumer} is at ${count(answer.seq)} already.`, !answer.moved);
  });
  const rewind = (consumer) => act(async () => {
    const check = (form) => { if (seqOf(form) > consumer.seq) throw new Error(`The consumer is at ${count(consumer.seq)}. Use Commit to move it on.`); };
    const form = await ask({ title: `Rewind ${consumer.consumer}`, action: "Rewind", isDangerous: true, check, body: [
      h("p", {}, `The consumer is at ${count(consumer.seq)}. Its reader gets the records behind the new seq again. Stop the reader first: its next commit would move the consumer on.`),
      seqField("Back to seq", 0, "0 is the beginning") ] });
    if (!form) return false;
    const answer = await post(path(consumer.consumer, "/commit"), { seq: seqOf(form), rewind: true });
    toast(`${consumer.consumer} is at ${count(answer.seq)}.`);
  });
  const forget = (consumer) => act(async () => {
    const form = await ask({ title: `Delete ${consumer.consumer}`, action: "Delete", isDangerous: true, check: checkName(consumer.consumer), body: [
      h("p", {}, `The position ${count(consumer.seq)} is forgotten. The records of the topic stay.`), nameField(consumer.consumer) ] });
    if (!form) return false;
    await send(path(consumer.consumer), { method: "DELETE" });
    toast(`Deleted ${consumer.consumer}.`);
  });
  const make = act(async () => {
    const check = (form) => { if (form.get("from") === "seq") seqOf(form); };
    const form = await ask({ title: "New consumer", action: "Create", check, body: [
      field("Name", h("input", { name: "name", required: true, autofocus: true, maxlength: 255, autocomplete: "off" }), "A-Z a-z 0-9 . _ : -"),
      field("It begins at", h("select", { name: "from" }, h("option", { value: "earliest" }, "the first record"), h("option", { value: "head" }, "the head: only later records"), h("option", { value: "seq" }, "a seq"))),
      field("Seq", h("input", { name: "seq", value: "0", inputmode: "numeric", autocomplete: "off" }), "The reader gets the records behind it.") ] });
    if (!form) return false;
    const answer = await put(path(form.get("name").trim()), { from: form.get("from") === "seq" ? seqOf(form) : form.get("from") });
    toast(answer.created ? `Created ${answer.consumer}.` : `${answer.consumer} existed already; it stays at ${count(answer.seq)}.`, !answer.created);
  });

  const row = (consumer) => {
    const { consumer: called, lag } = consumer;
    const action = (label, work, kind) => h("button", { class: kind, onclick: work(consumer), "aria-label": `${label} ${called}` }, label);
    return [text(called), count(consumer.seq), h("span", { class: lag ? "" : "muted" }, count(lag)), lag ? span(consumer.lag_ms) : "caught up", moment(consumer.last_seen_ts), moment(consumer.committed_ts),
      h("span", { class: "row-actions" }, action("Commit", commit), action("Rewind", rewind), action("Delete", forget, "danger"))];
  };
  const load = async (signal) => {
    const { items, isMore } = await pages(`${topicPath(name)}/consumers`, "consumers", SHOWN, signal);
    const behind = items.filter(({ lag }) => lag > 0);
    const slowest = behind.reduce((most, each) => (each.lag > (most?.lag ?? 0) ? each : most), null);
    replace(figures, items.length > 0 && [stat("Consumers", isMore ? `more than ${count(SHOWN)}` : count(items.length)), stat("Behind", count(behind.length), "have records to read"),
      stat("Largest lag", count(slowest?.lag), slowest ? text(slowest.consumer, "span") : "records"), stat("Longest behind", behind.length ? span(Math.max(...behind.map(({ lag_ms: ms }) => ms))) : "–", "age of a record that waits")]);
    replace(list, items.length ? table("Consumers", ["Consumer", "#Position", "#Lag (records)", "#Lag (time)", "Last seen", "Last commit", "Actions"], items.map(row))
      : empty("This topic has no consumers", "A consumer keeps the position of a reader in the topic. A reader makes one, or you do it here."),
    isMore && h("p", { class: "muted" }, `The first ${count(SHOWN)} consumers are shown; `, h("code", {}, `topics consumer ls ${name}`), " lists all."));
  };
  return { every: 2000, load, body: [figures, h("div", { class: "bar" }, h("button", { class: "primary", onclick: make }, "New consumer")), list] };
}
