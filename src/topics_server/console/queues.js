// The board of one queue: ready, leased, delayed and dead jobs, and actions on them.
import { get, pages, post, topicPath } from "./api.js";
import { ask, checkName, count, empty, field, h, moment, nameField, preview, replace, span, stat, table, text, toast } from "./dom.js";
import { topicLink } from "./records.js";

const LETTERS = 50;
// The most pages that are searched for dead letters of this queue: other queues may share the topic.
const LETTER_PAGES = 10;

export function queuePanel(name, context) {
  const figures = h("div", { class: "stats" });
  const flight = h("section", { "aria-label": "In flight" });
  const dead = h("section", { "aria-label": "Dead letters" });
  let config = {};
  const trail = []; // the start of each earlier page of dead letters
  const act = (work) => context.guard(async () => { if ((await work()) !== false) context.refresh(); });
  const held = (verb, lease, more) => post(`${topicPath(name)}/${verb}`, { node: lease.node, seqs: [lease.seq], lease_ids: [lease.lease_id], ...more });
  const confirmed = async (title, message) => Boolean(await ask({ title, body: h("p", {}, message), action: title, isDangerous: true }));

  const retry = (lease) => act(async () => {
    const form = await ask({ title: `Give job ${lease.seq} back`, action: "Retry", body: [
      h("p", {}, "Its worker loses the lease; another worker can claim the job."), field("Reason", h("input", { name: "error", value: "given back from the console", maxlength: 500 })),
      field("Delay (ms)", h("input", { name: "delay", value: "0", inputmode: "numeric" })) ] });
    if (!form) return false;
    report("given back", await held("nack", lease, { error: form.get("error"), delay_ms: Number(form.get("delay")) || 0 }), "nacked");
  });
  const ack = (lease) => act(async () => {
    if (!(await confirmed(`Complete job ${lease.seq}`, `The job is removed as if ${lease.node} had finished it.`))) return false;
    report("completed", await held("ack", lease), "acked");
  });
  const report = (verb, answer, member) => toast(answer[member] ? `1 job ${verb}.` : `The job was skipped: ${Object.values(answer.reasons ?? {})[0] ?? "it has gone on"}.`, !answer[member]);
  const redrive = (body) => act(async () => {
    if (body.all && !(await confirmed("Redrive all", "Every dead letter of this queue becomes a job again."))) return false;
    let total = 0, answer;
    let after = {};
    do {
      answer = await post(`${topicPath(name)}/redrive`, { ...body, ...after });
      total += answer.redriven;
      after = { after_seq: answer.next_after_seq };
    } while (answer.more && body.all);
    toast(`${count(total)} jobs moved back.`);
  });
  const purge = act(async () => {
    const state = await get(topicPath(name));
    const form = await ask({ title: `Purge ${name}`, action: "Purge", isDangerous: true, check: checkName(name), body: [
      h("p", {}, `All ${count(state.count)} jobs that exist now are deleted: ready, delayed and leased ones.`), nameField(name) ] });
    if (!form) return false;
    const answer = await post(`${topicPath(name)}/delete`, { before_seq: state.head_seq + 1 });
    toast(`${count(answer.deleted)} jobs deleted.`);
  });

  const load = async (signal) => {
    const [state, leases] = await Promise.all([get(topicPath(name), signal), pages(`${topicPath(name)}/leases`, "leases", 100, signal)]);
    config = state.config;
    const queue = state.queue ?? {};
    replace(figures, stat("Ready", count(queue.ready), "can be claimed"), stat("In flight", count(queue.in_flight), "held by workers"),
      stat("Delayed", count(queue.delayed), "due later"), stat("Dead letters", count(queue.dead_lettered), "since the queue was made"));
    const now = Date.now();
    replace(flight, h("h3", {}, "In flight"), leases.items.length
      ? table("Jobs in flight", ["#Job", "Holder", "Deadline", "#Deliveries", "Actions"], leases.items.map((lease) => [count(lease.seq), text(lease.node),
        h("span", { title: new Date(lease.deadline).toISOString() }, lease.deadline > now ? `in ${span(lease.deadline - now)}` : "passed"), count(lease.deliveries),
        h("span", { class: "row-actions" }, h("button", { onclick: retry(lease), "aria-label": `Retry job ${lease.seq}` }, "Retry"), h("button", { onclick: ack(lease), "aria-label": `Complete job ${lease.seq}` }, "Ack"))]))
      : empty("No worker holds a job"), leases.isMore && h("p", { class: "muted" }, "The first 100 leases are shown."));
    await letters(queue, signal);
  };
  const letters = async (queue, signal) => {
    const source = config.dead_letter;
    if (!source) { replace(dead, h("h3", {}, "Dead letters"), empty("This queue has no dead-letter topic", "Set max_deliveries and dead_letter in its configuration.")); return; }
    let page = { records: [], complete: true }, mine = [];
    let begin = trail.at(-1);
    try {
      for (let turn = 0; turn < LETTER_PAGES; turn += 1) {
        page = await get(`${topicPath(source)}/records?order=desc&limit=${LETTERS}${begin === undefined ? "" : `&before_seq=${begin}`}`, signal);
        mine = page.records.filter((record) => record.meta?.$dead_letter_from === name);
        if (mine.length || page.complete) break;
        begin = page.next_before_seq;
      }
    } catch (error) { if (error.status !== 404) throw error; }
    const older = page.complete ? undefined : page.next_before_seq;
    const isPart = older !== undefined || trail.length > 0;
    const turn = (change) => () => { change(); context.refresh(); };
    replace(dead, h("div", { class: "bar" }, h("h3", {}, "Dead letters in ", topicLink(source)), (mine.length > 0 || (isPart && queue.dead_lettered > 0)) && h("button", { onclick: redrive({ all: true }) }, "Redrive all …"),
      isPart && h("button", { disabled: !trail.length, onclick: turn(() => trail.pop()) }, "← Newer"), isPart && h("button", { disabled: older === undefined, onclick: turn(() => { if (older !== undefined) trail.push(older); }) }, "Older →")),
      mine.length ? table("Dead letters", ["#Seq", "Died", "Last error", "Data", "Actions"], mine.map((record) => [count(record.$seq), moment(record.$ts), text(record.meta.$dead_letter_error ?? "no reason was given"),
        h("span", { class: "peek", dir: "auto" }, preview(record.data, 80)), h("button", { onclick: redrive({ seqs: [record.$seq] }), "aria-label": `Redrive ${record.$seq}` }, "Redrive")]))
        : empty(isPart ? "None on this page" : "No dead letters", isPart && "Other queues share this topic. Redrive all reaches every letter of this queue."));
  };
  return { every: 1500, load, body: [figures, h("div", { class: "bar" }, h("button", { class: "danger", onclick: purge }, "Purge …")), flight, dead] };
}
