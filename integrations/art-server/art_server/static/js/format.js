// Formats numbers, times and tasks.

export function num(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const magnitude = Math.abs(value);
  if (magnitude < 1e-3 || magnitude >= 1e6)
    return value
      .toExponential(Math.max(0, digits - 2))
      .replace("e-", "e−")
      .replace("e+", "e")
      .replace("-", "−");
  if (Number.isInteger(value)) return value.toLocaleString("en").replace("-", "−");
  const decimals = Math.max(0, Math.min(digits, digits - 1 - Math.floor(Math.log10(magnitude))));
  return value.toFixed(decimals).replace("-", "−");
}

// An axis label, with no more decimals than necessary.
export const tick = (value) =>
  value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6)
    ? num(value)
    : String(+value.toPrecision(4)).replace("-", "−");
export const signed = (value, digits = 3) => (value > 0 ? "+" : "") + num(value, digits);
export const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)} %`);
export const percentTick = (value) => `${tick(100 * value)} %`;
export const plural = (count, one, many = `${one}s`) => `${count.toLocaleString("en")} ${count === 1 ? one : many}`;

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 100) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 100 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function ago(unix) {
  const seconds = Math.max(0, Date.now() / 1000 - unix);
  if (seconds < 5) return "just now";
  if (seconds < 172800) return `${duration(Math.round(seconds)).replace(".0", "")} ago`;
  return new Date(unix * 1000).toLocaleDateString("en", { year: "numeric", month: "short", day: "numeric" });
}

export function bytes(size) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  for (; size >= 1000 && unit < units.length - 1; unit += 1) size /= 1000;
  return `${unit ? num(size) : size} ${units[unit]}`;
}

export const truncate = (text, maxLength = 160) =>
  text.length > maxLength ? `${text.slice(0, maxLength - 1)}…` : text;
export const json = (value) => (typeof value === "string" ? value : JSON.stringify(value, null, 2));

// A one-line summary of a task, from the usual keys.
export function taskText(task) {
  if (task === null || task === undefined) return "(no task)";
  if (typeof task !== "object") return String(task);
  if (Array.isArray(task)) {
    const question = task.filter((message) => message && message.role === "user").pop();
    return question ? contentText(question.content) : JSON.stringify(task);
  }
  for (const key of ["input", "messages", "question", "prompt", "query", "instruction", "task", "text", "name"]) {
    if (task[key] !== undefined && task[key] !== null) return taskText(task[key]);
  }
  return JSON.stringify(task);
}

export function contentText(content) {
  if (content === null || content === undefined) return "";
  if (typeof content === "string") return content;
  if (Array.isArray(content))
    return content.map((part) => (part && typeof part.text === "string" ? part.text : json(part))).join("\n");
  return json(content);
}

// State of a rollout -> [text, chip class].
export const STATES = {
  finished: ["finished", ""],
  failed: ["failed", "bad"],
  running: ["running", "accent"],
  lost: ["lost, retried", ""],
};

// As STATES, but a rollout can't be running if no process has its run open.
export const stateOf = (state, run) => (state === "running" && !run.open ? ["unfinished", ""] : STATES[state]);

// [value, text] of the splits to choose from; train and eval are listed even before they have rollouts.
export function splitsOf(run) {
  const names = new Set(["train", "eval", ...run.splits.map((each) => each.split).filter(Boolean)]);
  return [["", "all"], ...[...names].map((name) => [name, name])];
}
