// The frame of the console: navigation, the key, themes, keyboard, and the refresh of each panel.
import { hasKey, segment, setKey, whenKeyNeeded } from "./api.js";
import { consumersPanel } from "./consumers.js";
import { add, ask, badge, bytes, count, field, h, replace, text, toast } from "./dom.js";
import { overviewPanel, routersPanel } from "./operate.js";
import { queuePanel } from "./queues.js";
import { appendDialog, browsePanel, deleteDialog, dropDialog, tailPanel } from "./records.js";
import { stateOf, topicsPanel } from "./topics.js";
import { streamsPanel, viewsPanel } from "./views.js";

const PLACES = [["overview", "Overview", "1"], ["topics", "Topics", "2"], ["routers", "Routers", "3"], ["streams", "Streams", "4"]];
const PANELS = { overview: overviewPanel, topics: topicsPanel, routers: routersPanel, streams: streamsPanel };

const main = h("main", { id: "main", tabindex: -1 });
const connection = h("span", { id: "connection", role: "status" });
const links = PLACES.map(([name, label, digit]) => h("a", { href: `#/${name}`, "data-place": name, title: `Key ${digit}` }, label));
const keyButton = h("button", { onclick: () => askForKey() }, "Key");
const themeButton = h("button", { onclick: () => {
  const isDark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = isDark ? "light" : "dark";
} }, "Theme");
add(document.getElementById("app"), [h("header", {}, h("a", { class: "brand", href: "#/overview" }, h("img", { src: "console/static/icon.svg", alt: "", width: 26, height: 26 }), "topics"),
  h("nav", { "aria-label": "Console" }, links), h("div", { class: "tools" }, connection, h("a", { href: "v0/docs" }, "API"), keyButton, themeButton, h("button", { "aria-label": "Keyboard shortcuts", onclick: () => showKeys() }, "?"))), main]);

// -- the key ---------------------------------------------------------------------------------------

let isAsking = false, isDeclined = false;
async function askForKey(message) {
  if (isAsking) return;
  isAsking = true;
  const check = (form) => { if (/[^\x21-\x7e]/.test(form.get("key").trim())) throw new Error("A key has no spaces and only ASCII characters."); };
  const form = await ask({ title: "Key of this server", action: "Use it", check, body: [h("p", {}, message ?? "Type a key of this server. It stays in the memory of this page: a reload forgets it."),
    field("Key", h("input", { name: "key", type: "password", autocomplete: "off", autofocus: true })) ] });
  isAsking = false;
  isDeclined = !form;
  if (!form) return;
  setKey(form.get("key"));
  keyButton.textContent = hasKey() ? "Key ✓" : "Key";
  show();
}
whenKeyNeeded(() => isDeclined || askForKey(hasKey() ? "This server does not know that key. Type another one." : "This server requires a key. It stays in the memory of this page: a reload forgets it."));

// -- panels ----------------------------------------------------------------------------------------

let running = null; // the shown panel; its signal ends all its requests

function tell(error) {
  if (error?.name === "AbortError") return;
  toast(error?.message ?? String(error), true);
}

// Runs a panel: calls its `load` now and at intervals, or its `loop` while it is shown.
function run(makePanel) {
  running?.abort();
  const own = new AbortController();
  running = own;
  let turn = new AbortController();
  let timer = 0, isLoading = false, isStale = false, isSkipped = false;
  own.signal.addEventListener("abort", () => { turn.abort(); clearTimeout(timer); });
  const context = {
    guard: (work) => async () => { try { await work(); } catch (error) { tell(error); } },
    refresh: () => { if (isLoading) isStale = true; else load(); },
    restartLoop: () => { turn.abort(); turn = new AbortController(); },
  };
  const panel = makePanel(context);
  const online = () => replace(connection, badge("connected", "good"));
  const away = (error) => replace(connection, badge(error.status ? `${error.status} ${error.code}` : "away", "bad"));
  const load = async () => {
    clearTimeout(timer);
    if (!panel.load || own.signal.aborted) return;
    // While a dialog is open or the page is hidden, only the fetching of new values stops.
    isSkipped = document.hidden;
    if (!isSkipped) {
      isLoading = true;
      try { await panel.load(own.signal); if (!own.signal.aborted) online(); } catch (error) {
        if (own.signal.aborted) return;
        away(error);
        if (!panel.every && error.status !== 401) tell(error);
      }
      isLoading = false;
    }
    if (own.signal.aborted) return;
    if (isStale) { isStale = false; load(); } else if (panel.every) timer = setTimeout(load, panel.every);
  };
  const loop = async () => {
    while (!own.signal.aborted) {
      const { signal } = turn;
      try { if (await panel.loop(signal)) online(); } catch (error) {
        if (own.signal.aborted) return;
        if (signal.aborted) continue;
        away(error);
        panel.onLost?.(error.message);
        await new Promise((done) => setTimeout(done, 800 + Math.random() * 800));
      }
    }
  };
  document.addEventListener("visibilitychange", () => { if (isSkipped && !document.hidden) load(); }, { signal: own.signal });
  if (panel.loop) loop(); else load();
  return panel;
}

const TABS = [["records", "Records"], ["live", "Live"], ["queue", "Queue"], ["consumers", "Consumers"], ["views", "Views"], ["settings", "Settings"]];

// `told`: the error that the page already shows. A topic that does not exist may be created.
async function showTopic(name, tab, told) {
  running?.abort();
  const own = new AbortController();
  running = own;
  if (!told) replace(main, h("p", { class: "muted" }, "Loading …"));
  let state;
  try { state = await stateOf(name, own.signal); } catch (error) {
    if (own.signal.aborted) return;
    replace(connection, badge(error.status ? `${error.status} ${error.code}` : "away", "bad"));
    if (error.status === 404 || !(error.status >= 400 && error.status < 500)) {
      const again = setTimeout(() => showTopic(name, tab, error.message), 2000);
      own.signal.addEventListener("abort", () => clearTimeout(again));
    }
    if (told !== error.message) replace(main, h("h1", {}, text(name)), h("div", { class: "empty" }, h("strong", {}, error.message), h("p", {}, h("a", { href: "#/topics" }, "All topics"))));
    return;
  }
  const isQueue = state.type === "queue";
  const shown = tab || (isQueue ? "queue" : "records");
  const guard = (work) => async () => { try { if (await work()) show(); } catch (error) { tell(error); } };
  const openDelete = (tag) => guard(() => deleteDialog(name, tag))();
  const panels = {
    records: (context) => browsePanel(name, context, openDelete), live: (context) => tailPanel(name, context), queue: (context) => queuePanel(name, context),
    consumers: (context) => consumersPanel(name, context), views: (context) => viewsPanel(name, context), settings: () => settingsPanel(name, state, guard) };
  const panel = run(Object.hasOwn(panels, shown) ? panels[shown] : panels.records);
  replace(main, h("p", { class: "crumbs" }, h("a", { href: "#/topics" }, "Topics"), " / "), h("div", { class: "bar wrap" }, h("h1", {}, text(name)), badge(state.type), badge(state.config.durability),
    h("span", { class: "muted" }, `${count(state.count)} records · ${bytes(state.bytes)}`), h("span", { class: "grow" }),
    h("button", { class: "primary", onclick: guard(() => appendDialog(name, isQueue)) }, "Append"), h("button", { onclick: () => openDelete("") }, "Delete …")),
    h("nav", { class: "tabs", "aria-label": "Parts of the topic" }, TABS.filter(([id]) => id !== "queue" || isQueue).map(([id, label]) => h("a", { href: `#/topic/${segment(name)}/${id}`, "aria-current": id === shown ? "page" : null }, label))), panel.body);
}

function settingsPanel(name, state, guard) {
  const rows = Object.entries({ ...state.config, epoch: state.epoch, earliest_seq: state.earliest_seq, head_seq: state.head_seq, disk_bytes: state.disk_bytes, damaged_records: state.damaged_records });
  return { body: [h("dl", { class: "settings" }, rows.map(([member, value]) => [h("dt", {}, member), h("dd", {}, value === null ? "–" : text(String(value)))])),
    h("p", { class: "muted" }, "Change a setting with: ", h("code", {}, `topics set ${name} --ttl 7d`)), h("button", { class: "danger", onclick: guard(async () => { if (await dropDialog(name)) location.hash = "#/topics"; return false; }) }, "Drop the topic …")] };
}

function show() {
  const [place = "overview", name, tab] = location.hash.replace(/^#\/?/, "").split("/").map((part) => { try { return decodeURIComponent(part); } catch { return part; } });
  const isTopic = place === "topic" && name;
  const shown = isTopic ? "topics" : Object.hasOwn(PANELS, place) ? place : "overview";
  for (const link of links) if (link.dataset.place === shown) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  document.title = `${isTopic ? name : PLACES.find(([id]) => id === shown)[1]} · topics`;
  if (isTopic) { showTopic(name, tab); return; }
  const panel = run(PANELS[shown]);
  replace(main, h("h1", {}, panel.title), panel.body);
}

addEventListener("hashchange", () => { show(); main.focus({ preventScroll: true }); scrollTo(0, 0); });
show();

// -- keyboard --------------------------------------------------------------------------------------

const KEYS = [["1 – 4", "Overview, topics, routers, streams"], ["/", "Search or filter"], ["j, k", "Next and previous record"], ["Enter", "Open the record"], ["p", "Pause or resume the live tail"], ["t", "Theme"], ["?", "This list"]];
const showKeys = () => ask({ title: "Keyboard", action: "Close", body: h("dl", { class: "settings" }, KEYS.map(([key, what]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, what)])) });

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (event.target.closest?.("input, textarea, select")) { if (event.key === "Escape") event.target.blur(); return; }
  const place = PLACES.find(([, , digit]) => digit === event.key);
  if (place) location.hash = `#/${place[0]}`;
  else if (event.key === "/") document.querySelector("[data-search], [data-filter]")?.focus();
  else if (event.key === "p") document.querySelector("[data-pause]")?.click();
  else if (event.key === "t") themeButton.click();
  else if (event.key === "?") showKeys();
  else if (event.key === "j" || event.key === "k") {
    const rows = [...document.querySelectorAll(".record > summary")];
    const at = rows.indexOf(document.activeElement);
    rows[Math.max(0, Math.min(rows.length - 1, at + (event.key === "j" ? 1 : -1)))]?.focus();
  } else return;
  event.preventDefault();
});
