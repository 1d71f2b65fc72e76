// Elements, formats and small widgets. All text is put into text nodes: this module never parses HTML.

export function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  fill(element, attributes, children);
  return element;
}

export function s(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  fill(element, attributes, children);
  return element;
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "disabled") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  add(element, children);
}

export function add(element, children) {
  for (const child of [children].flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : String(child));
  }
}

// Puts new children into an element. If the keyboard's focus was on a child, the new child with the
// same label or address takes it.
export function replace(element, ...children) {
  const focused = document.activeElement;
  const place = focused !== element && element.contains(focused) ? identity(focused) : null;
  element.replaceChildren();
  add(element, children);
  if (place) [...element.querySelectorAll("a, button, [tabindex]")].find((child) => identity(child) === place)?.focus({ preventScroll: true });
}

// After a dialog: focus the element that opened it, or the element that has replaced it meanwhile.
function focusAgain(opener) {
  if (opener.isConnected) return;
  const found = [...document.querySelectorAll("main a, main button")].find((element) => identity(element) === identity(opener));
  (found ?? document.getElementById("main"))?.focus({ preventScroll: true });
}

const identity = (element) => element.getAttribute("aria-label") ?? element.getAttribute("href") ?? element.textContent;

// A name or a text of foreign origin, isolated so that its direction does not change the text around it.
export const text = (value, name = "bdi") => h(name, { dir: "auto" }, value);

const numbers = new Intl.NumberFormat("en");
export const count = (value) => numbers.format(value ?? 0);

// A JSON value as text. JavaScript rounds numbers beyond 2^53, so these get a sign.
export const plain = (value) => (typeof value === "number" && Math.abs(value) > Number.MAX_SAFE_INTEGER ? `≈ ${value}` : String(value));

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let size = value ?? 0, unit = 0;
  while (size >= 1024 && unit < units.length - 1) { size /= 1024; unit += 1; }
  return `${unit && size < 100 ? size.toFixed(1) : Math.round(size)} ${units[unit]}`;
}

export function span(ms) {
  if (ms < 1000) return `${Math.round(ms)} ms`;
  const seconds = Math.round(ms / 1000);
  if (seconds < 60) return `${seconds} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${seconds % 60} s`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor((seconds % 86400) / 3600)} h`;
}

export const micros = (us) => (us < 1000 ? `${Math.round(us)} µs` : `${(us / 1000).toFixed(us < 10000 ? 1 : 0)} ms`);

export function moment(ms) {
  const date = new Date(ms);
  const pad = (value, size = 2) => String(value).padStart(size, "0");
  const day = `${date.getFullYear()}-${pad(date.getMonth() + 1)}-${pad(date.getDate())}`;
  const time = `${pad(date.getHours())}:${pad(date.getMinutes())}:${pad(date.getSeconds())}.${pad(date.getMilliseconds(), 3)}`;
  const today = new Date().toDateString() === date.toDateString();
  return h("time", { datetime: date.toISOString(), title: date.toISOString() }, today ? time : `${day} ${time}`);
}

// A line chart of values. Its label has the last value, for users who cannot see the chart.
export function sparkline(values, { label = "", width = 120, height = 28, fill: isFilled = true } = {}) {
  const shown = values.length > 1 ? values : [values[0] ?? 0, values[0] ?? 0];
  const top = Math.max(...shown, 1e-9);
  const step = width / (shown.length - 1);
  const points = shown.map((v, i) => `${(i * step).toFixed(1)},${(height - 2 - (v / top) * (height - 4)).toFixed(1)}`);
  return s("svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
    isFilled && s("polygon", { points: `0,${height} ${points.join(" ")} ${width},${height}` }),
    s("polyline", { points: points.join(" "), "vector-effect": "non-scaling-stroke" }));
}

// -- JSON ------------------------------------------------------------------------------------------

const TEXT_SHOWN = 300;
const MEMBERS_SHOWN = 100;

// The beginning of a value on one line. Reads only the part of the value that it shows.
export function preview(value, budget = 180) {
  let out = "";
  const walk = (item, depth) => {
    if (out.length >= budget) return;
    if (typeof item === "string") out += JSON.stringify(item.slice(0, budget));
    else if (item === null || typeof item !== "object") out += plain(item);
    else if (depth > 4) out += Array.isArray(item) ? "[…]" : "{…}";
    else {
      const isList = Array.isArray(item);
      out += isList ? "[" : "{";
      let first = true;
      for (const name in item) {
        if (out.length >= budget) break;
        if (!first) out += ", ";
        first = false;
        if (!isList) out += `${name.slice(0, 60)}: `;
        walk(item[name], depth + 1);
      }
      out += isList ? "]" : "}";
    }
  };
  walk(value, 0);
  return out.length > budget ? `${out.slice(0, budget)}…` : out;
}

// A value as a tree. Branches are created when they are opened.
export function tree(value, name, isOpen = true) {
  const label = name === undefined ? null : [h("span", { class: "j-name", dir: "auto" }, name), ": "];
  if (value === null || typeof value !== "object") return h("div", { class: "j-leaf" }, label, leaf(value));
  const names = Object.keys(value);
  const kind = Array.isArray(value) ? `[${count(names.length)}]` : `{${count(names.length)}}`;
  const box = h("div", { class: "j-box" });
  const more = (from) => {
    for (const member of names.slice(from, from + MEMBERS_SHOWN)) box.append(tree(value[member], member, false));
    const next = from + MEMBERS_SHOWN;
    if (next < names.length) {
      const button = h("button", { type: "button", class: "link", onclick: () => { button.remove(); more(next); } }, `${count(names.length - next)} more`);
      box.append(button);
    }
  };
  const details = h("details", { class: "j-node", ontoggle: () => { if (details.open && !box.hasChildNodes()) more(0); } },
    h("summary", {}, label, h("span", { class: "muted" }, kind, " "), !isOpen && h("span", { class: "j-peek", dir: "auto" }, preview(value, 60))), box);
  if (isOpen) { more(0); details.open = true; }
  return details;
}

function leaf(value) {
  if (typeof value !== "string") return h("span", { class: `j-${value === null ? "null" : typeof value}` }, plain(value));
  const element = h("span", { class: "j-string", dir: "auto" }, JSON.stringify(value.slice(0, TEXT_SHOWN)));
  if (value.length <= TEXT_SHOWN) return element;
  const box = h("span", {}, element, " ");
  box.append(h("button", { type: "button", class: "link", onclick: (event) => { element.textContent = JSON.stringify(value); event.target.remove(); } },
    `show all ${count(value.length)} characters`));
  return box;
}

// -- messages and questions ------------------------------------------------------------------------

export function toast(message, isError = false) {
  let box = document.getElementById("toasts");
  if (!box) {
    box = h("div", { id: "toasts", role: "status", "aria-live": "polite" });
    document.body.append(box);
  }
  const item = h("div", { class: isError ? "toast bad" : "toast" }, message);
  box.append(item);
  setTimeout(() => item.remove(), isError ? 8000 : 4000);
}

// A dialog with a form around `body`. `check` gets the form's data. If it throws, the dialog shows the message and
// stays open with the typed data. Resolves to the form's data, or null.
export function ask({ title, body, action = "OK", isDangerous = false, check }) {
  return new Promise((done) => {
    const mistake = h("p", { class: "mistake", role: "alert" });
    const form = h("form", { method: "dialog" },
      h("h2", {}, title), h("div", { class: "dialog-body" }, body), mistake,
      h("div", { class: "actions" },
        h("button", { type: "button", onclick: () => dialog.close() }, "Cancel"),
        h("button", { type: "submit", class: isDangerous ? "danger" : "primary" }, action)));
    const dialog = h("dialog", { "aria-label": title }, form);
    const opener = document.activeElement;
    let answer = null;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const data = new FormData(form);
      try { check?.(data); } catch (error) { replace(mistake, error.message); return; }
      answer = data;
      dialog.close();
    });
    dialog.addEventListener("close", () => { dialog.remove(); focusAgain(opener); done(answer); });
    document.body.append(dialog);
    dialog.showModal();
  });
}

export const field = (label, input, hint) => h("label", { class: "field" }, h("span", {}, label), input, hint && h("small", {}, hint));
export const empty = (title, ...hint) => h("div", { class: "empty" }, h("strong", {}, title), h("p", {}, hint));
export const badge = (label, kind = "") => h("span", { class: `badge ${kind}` }, label);
export const stat = (label, value, note, kind = "") => h("div", { class: `stat ${kind}` }, h("span", { class: "stat-label" }, label), h("span", { class: "stat-value" }, value), note && h("span", { class: "stat-note" }, note));

// Asks before a deletion: the user must type the name.
export const nameField = (name) => field(["Type ", text(name), " to confirm"], h("input", { name: "confirm", required: true, autocomplete: "off" }));
export const checkName = (name) => (form) => { if (form.get("confirm") !== name) throw new Error("The name does not match."); };

// A table with a caption for screen readers. A cell is a node or a text. A column of the console whose head begins
// with # has numbers; heads of foreign origin are shown unchanged.
export function table(caption, heads, rows, { areForeign = false } = {}) {
  const isNumeric = heads.map((head) => !areForeign && head.startsWith("#"));
  const labels = heads.map((head, i) => (isNumeric[i] ? head.slice(1) : head));
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    h("table", {}, h("caption", { class: "hidden" }, caption),
      h("thead", {}, h("tr", {}, labels.map((label, i) => h("th", { scope: "col", class: isNumeric[i] ? "num" : null }, areForeign ? text(label) : label)))),
      h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell, i) => h("td", { class: isNumeric[i] ? "num" : null, "data-head": labels[i] }, cell)))))));
}
