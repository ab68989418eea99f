// All runs of a folder.

import { get } from "../api.js";
import { empty, fill, h } from "../dom.js";
import { ago, num, percent } from "../format.js";

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
  const heads = ["Run", "Model", "Loss", "Reward"].map((it) => h("th", { scope: "col" }, it));
  const numbers = ["Steps", "Before", "After", "Last written"].map((it) =>
    h("th", { scope: "col", class: "num" }, it),
  );
  return {
    node: h(
      "section",
      {},
      h("div", { class: "head" }, h("h1", {}, "Runs")),
      h(
        "div",
        { class: "card scroll" },
        h("table", { class: "stack" }, h("thead", {}, h("tr", {}, heads, numbers)), rows),
      ),
    ),
  };
}

function row(run, { link }) {
  const name = h(
    "td",
    { class: "wide" },
    h("a", { href: link(run.name), "data-item": true }, run.name),
    run.problem && h("p", { class: "small soft" }, run.problem),
  );
  if (run.problem) return h("tr", {}, name, h("td", { colspan: 7 }));
  const steps = `${run.last_step ?? 0}${run.planned_steps ? ` / ${run.planned_steps}` : ""}`;
  const evaluates = run.kind === "evaluation";
  return h(
    "tr",
    {},
    name,
    h("td", { "data-name": "Model" }, run.model ?? "–"),
    h("td", { "data-name": "Loss" }, (!evaluates && run.loss) || "–"),
    h("td", { "data-name": "Reward" }, run.reward ?? "–"),
    h("td", { class: "num", "data-name": "Steps" }, evaluates ? "evaluation" : steps),
    evaluates
      ? h("td", { class: "num", "data-name": "Measured", colspan: 2 }, measured(run.measured))
      : [
          h("td", { class: "num", "data-name": "Before" }, measured(run.before)),
          h("td", { class: "num", "data-name": "After" }, measured(run.after)),
        ],
    h("td", { class: "num", "data-name": "Written" }, run.written ? ago(run.written) : "–"),
  );
}

export const measured = (it) => (!it ? "–" : it.counts_successes ? percent(it.success) : num(it.success));
