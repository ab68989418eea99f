// The list of runs.

import { get } from "../api.js";
import { emptyCard, fill, h } from "../dom.js";
import { ago, num } from "../format.js";
import { evaluationResult, reason, statusChip, temperatureName } from "../outcome.js";

export async function runs(context) {
  const rows = h("tbody", { "data-list": true });
  const draw = (items) =>
    fill(
      rows,
      items.map((run) => row(run, context)),
    );
  draw(context.runs);
  if (!context.runs.length) {
    return {
      node: emptyCard(
        "No runs yet",
        "A run is listed as soon as it starts. To start one:",
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
  const columns = [
    ...["Run", "Status", "Model, loss and reward"].map((name) => column(name)),
    column("Steps", "num"),
    column("Held-out", "num", "Success or mean reward on held-out tasks, before and after training"),
    column("Final reward", "num", "Mean training reward of the last 4 steps"),
    column("Last updated", "num"),
  ];
  return {
    node: h(
      "section",
      {},
      h("div", { class: "head" }, h("h1", {}, "Runs")),
      h(
        "div",
        { class: "card scroll" },
        h("table", { class: "stack runs" }, h("thead", {}, h("tr", {}, columns)), rows),
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
  const isEvaluation = run.kind === "evaluation",
    lossAndReward = [isEvaluation ? null : run.loss, run.reward].filter(Boolean).join(" · ");
  return h(
    "tr",
    {},
    name,
    h("td", { "data-name": "Status" }, statusChip(run) ?? "–"),
    h(
      "td",
      { "data-name": "Model" },
      ellipsis(run.model ?? "–"),
      lossAndReward && ellipsis(lossAndReward, "small soft"),
    ),
    h("td", { class: "num", "data-name": "Steps" }, isEvaluation ? "evaluation" : steps),
    h(
      "td",
      { class: "num pairs", "data-name": "Held-out" },
      isEvaluation ? evaluationResult(run.measured) : run.pairs.length ? run.pairs.map(change) : "–",
    ),
    h("td", { class: "num", "data-name": "Final reward" }, num(run.final_reward)),
    h("td", { class: "num", "data-name": "Updated" }, run.written ? ago(run.written) : "–"),
  );
}

const ellipsis = (text, kind = "") => h("span", { class: `short ${kind}`, title: text }, text);

const change = (pair) =>
  h(
    "div",
    { class: "change" },
    `${evaluationResult(pair.before)} → ${evaluationResult(pair.after)} `,
    h("small", {}, temperatureName(pair.temperature)),
  );
