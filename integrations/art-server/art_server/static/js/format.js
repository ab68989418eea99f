// Numbers, times and tasks as words.

export function num(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e6)
    return value
      .toExponential(Math.max(0, digits - 2))
      .replace("e-", "e−")
      .replace("e+", "e")
      .replace("-", "−");
  if (Number.isInteger(value)) return value.toLocaleString("en").replace("-", "−");
  const places = Math.max(0, Math.min(digits, digits - 1 - Math.floor(Math.log10(size))));
  return value.toFixed(places).replace("-", "−");
}

// Of an axis: no more places than it takes.
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
  let at = 0;
  for (; size >= 1000 && at < units.length - 1; at += 1) size /= 1000;
  return `${at ? num(size) : size} ${units[at]}`;
}

export const short = (text, most = 160) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
export const json = (value) => (typeof value === "string" ? value : JSON.stringify(value, null, 2));

// What a task is about, in one line, wherever its author put it.
export function taskText(task) {
  if (task === null || task === undefined) return "(no task)";
  if (typeof task !== "object") return String(task);
  if (Array.isArray(task)) {
    const asked = task.filter((it) => it && it.role === "user").pop();
    return asked ? contentText(asked.content) : JSON.stringify(task);
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

// [text, kind of chip] of how a run of the agent ended.
export const STATES = {
  finished: ["finished", ""],
  failed: ["failed", "bad"],
  running: ["running", "accent"],
  lost: ["lost, made again", ""],
};

// As STATES; nobody runs what has not ended in a run that no process has open.
export const stateOf = (state, run) => (state === "running" && !run.open ? ["not finished", ""] : STATES[state]);

// [value, name] of the splits that can be chosen: the usual ones are there before a rollout of theirs is.
export function splitsOf(run) {
  const names = new Set(["train", "eval", ...run.splits.map((it) => it.split).filter(Boolean)]);
  return [["", "all"], ...[...names].map((it) => [it, it])];
}
