// Requests to the server. If the server requires a token, it is stored for this tab only.

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const TOKEN_KEY = "art-key";
let askForToken = null;
export const onMissingToken = (ask) => {
  askForToken = ask;
};

export async function get(path, parameters = {}, signal = undefined) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    if (value !== null && value !== undefined && value !== "") query.set(name, value);
  }
  const url = query.toString() ? `${path}?${query}` : path;
  const token = sessionStorage.getItem(TOKEN_KEY);
  let response;
  try {
    response = await fetch(url, { signal, headers: token ? { Authorization: `Bearer ${token}` } : {} });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "Can't reach the server. Is art view or art serve still running?");
  }
  if (response.status === 401 && askForToken) {
    sessionStorage.setItem(TOKEN_KEY, await askForToken());
    return get(path, parameters, signal);
  }
  if (!response.ok) throw new ApiError(response.status, await errorMessage(response));
  return response.json();
}

async function errorMessage(response) {
  try {
    const { detail } = await response.json();
    return typeof detail === "string" ? detail : "The request has invalid parameters.";
  } catch {
    return `The server returned HTTP ${response.status}.`;
  }
}

export const runPath = (run, rest = "") => `api/runs/${encodeURIComponent(run)}${rest}`;
export const rolloutPath = (run, rollout, rest = "") =>
  runPath(run, `/trajectories/${encodeURIComponent(rollout)}${rest}`);

// All steps after step `after`, fetched in pages.
export async function stepsAfter(run, after, signal) {
  const steps = [];
  for (;;) {
    const page = await get(runPath(run, "/metrics"), { after, limit: 2000 }, signal);
    steps.push(...page.items);
    if (page.items.length < 2000) return steps;
    after = page.items[page.items.length - 1].step;
  }
}
