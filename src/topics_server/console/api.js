// Calls of this server. The key is stored only in this module's memory, so a reload forgets it.

let key = "";
const onKeyNeeded = [];
// The page is at PREFIX/console, the routes at PREFIX/v0.
export const root = new URL(".", location.href.replace(/[?#].*$/, "")).href;
export const setKey = (value) => { key = value.trim(); };
export const hasKey = () => key !== "";
export const whenKeyNeeded = (callback) => onKeyNeeded.push(callback);
export const segment = encodeURIComponent;

export class ApiError extends Error {
  constructor(status, error) {
    super(error?.message ?? `the server answered ${status}`);
    this.status = status;
    this.code = error?.code ?? "";
    this.detail = error?.detail ?? {};
  }
}

export async function send(path, { method = "GET", body, headers = {}, signal } = {}) {
  const sent = { ...headers };
  if (key) sent.authorization = `Bearer ${key}`;
  if (body !== undefined && !sent["content-type"]) sent["content-type"] = "application/json";
  const response = await fetch(root + path, { method, headers: sent, signal, cache: "no-store", credentials: "same-origin", redirect: "error",
    body: body === undefined || typeof body === "string" ? body : JSON.stringify(body) });
  if (response.ok) return response;
  let error = null;
  try { error = (await response.json()).error; } catch { /* a proxy's own page */ }
  if (response.status === 401) for (const callback of onKeyNeeded) callback();
  throw new ApiError(response.status, error);
}

export const get = async (path, signal) => (await send(path, { signal })).json();
export const post = async (path, body, signal) => (await send(path, { method: "POST", body, signal })).json();
export const put = async (path, body) => (await send(path, { method: "PUT", body })).json();
export const topicPath = (name) => `v0/topics/${segment(name)}`;

// The items of all pages of a list, up to `most`. `isMore`: the list has more items.
export async function pages(path, member, most, signal) {
  const items = [];
  let cursor = "";
  do {
    const mark = path.includes("?") ? "&" : "?";
    const page = await get(`${path}${mark}page_size=${Math.min(1000, most)}${cursor && `&cursor=${segment(cursor)}`}`, signal);
    items.push(...page[member]);
    cursor = page.next_cursor ?? "";
  } while (cursor && items.length < most);
  return { items: items.slice(0, most), isMore: Boolean(cursor) };
}
