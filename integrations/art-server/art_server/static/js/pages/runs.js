// All runs of a folder.

import { get } from "../api.js";
import { empty, fill, h } from "../dom.js";
import { ago, num } from "../format.js";
import { measured, reason, statusChip, temperatureName } from "../outcome.js";

export async function runs(context) {
  const rows = h("tbody", { "data-list": true });
  const draw = (found) =>
    fill(
      rows,
      found.map((run) => row(run, context)),
    );
  draw(context.known);
  if (!context.known.length) {
    return {
      node: empty(
        "No run here yet",
        "A run folder appears as soon as a run begins. To make one:",
        h("code", {}, "art train agent.py:agent tasks.jsonl --reward agent.py:reward --model tiny"),
      ),
    };
  }
  const timer = setInterval(async () => {
    if (document.hidden) return;
    const page = await get("api/runs", { limit: 500 }, context.signal).catch(() => null);
    if (page && !rows.contains(document.activeElement)) draw(page.items);
  }, 5000);
  context.onStop(() => clearInterval(timer));
  const column = (name, kind, title) => h("th", { scope: "col", class: kind, title }, name);
  const heads = [
    ...["Run", "Status", "Model, loss and reward"].map((it) => column(it)),
    column("Steps", "num"),
    column("Held-out", "num", "Success or mean reward on held-out tasks, before training and since"),
    column("Final reward", "num", "Mean training reward of the last 4 steps"),
    column("Last written", "num"),
  ];
  return {
    node: h(
      "section",
      {},
      h("div", { class: "head" }, h("h1", {}, "Runs")),
      h(
        "div",
        { class: "card scroll" },
        h("table", { class: "stack runs" }, h("thead", {}, h("tr", {}, heads)), rows),
      ),
    ),
  };
}

function row(run, { link }) {
  const name = h(
    "td",
    { class: "wide" },
    h("a", { href: link(run.name), class: "short", title: run.name, "data-item": true }, run.name),
    run.problem ? h("p", { class: "small soft" }, run.problem) : reason(run),
  );
  if (run.problem) return h("tr", {}, name, h("td", { colspan: 6 }));
  const steps = `${run.last_step ?? 0}${run.planned_steps ? ` / ${run.planned_steps}` : ""}`;
  const evaluates = run.kind === "evaluation",
    made = [evaluates ? null : run.loss, run.reward].filter(Boolean).join(" · ");
  return h(
    "tr",
    {},
    name,
    h("td", { "data-name": "Status" }, statusChip(run) ?? "–"),
    h("td", { "data-name": "Model" }, short(run.model ?? "–"), made && short(made, "small soft")),
    h("td", { class: "num", "data-name": "Steps" }, evaluates ? "evaluation" : steps),
    h(
      "td",
      { class: "num pairs", "data-name": "Held-out" },
      evaluates ? measured(run.measured) : run.pairs.length ? run.pairs.map(change) : "–",
    ),
    h("td", { class: "num", "data-name": "Final reward" }, num(run.final_reward)),
    h("td", { class: "num", "data-name": "Written" }, run.written ? ago(run.written) : "–"),
  );
}

const short = (text, kind = "") => h("span", { class: `short ${kind}`, title: text }, text);

const change = (pair) =>
  h(
    "div",
    { class: "change" },
    `${measured(pair.before)} → ${measured(pair.after)} `,
    h("small", {}, temperatureName(pair.temperature)),
  );
