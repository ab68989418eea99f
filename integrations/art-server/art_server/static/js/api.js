// Questions to the server. A key, where it asks for one, is kept for this tab only.

export class Problem extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const KEY = "art-key";
let askForKey = null;
export const onMissingKey = (ask) => {
  askForKey = ask;
};

export async function get(path, parameters = {}, signal = undefined) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    if (value !== null && value !== undefined && value !== "") query.set(name, value);
  }
  const asked = query.toString() ? `${path}?${query}` : path;
  const key = sessionStorage.getItem(KEY);
  let response;
  try {
    response = await fetch(asked, { signal, headers: key ? { Authorization: `Bearer ${key}` } : {} });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, "The server does not answer. Is art view, or art serve, still running?");
  }
  if (response.status === 401 && askForKey) {
    sessionStorage.setItem(KEY, await askForKey());
    return get(path, parameters, signal);
  }
  if (!response.ok) throw new Problem(response.status, await said(response));
  return response.json();
}

async function said(response) {
  try {
    const { detail } = await response.json();
    return typeof detail === "string" ? detail : "This address asks for something that cannot be.";
  } catch {
    return `The server answered ${response.status}.`;
  }
}

export const runPath = (run, rest = "") => `api/runs/${encodeURIComponent(run)}${rest}`;
export const rolloutPath = (run, rollout, rest = "") =>
  runPath(run, `/trajectories/${encodeURIComponent(rollout)}${rest}`);

// All steps after one, however many.
export async function stepsAfter(run, after, signal) {
  const found = [];
  for (;;) {
    const page = await get(runPath(run, "/metrics"), { after, limit: 2000 }, signal);
    found.push(...page.items);
    if (page.items.length < 2000) return found;
    after = page.items[page.items.length - 1].step;
  }
}
