// The list of runs, and the rounds of art retrain.

import { get } from "../api.js";
import { emptyCard, fill, h, inUse } from "../dom.js";
import { ago, duration, num, plural, signed } from "../format.js";
import { evaluationResult, reason, statusChip, temperatureName } from "../outcome.js";

export async function runs(context) {
  const rows = h("tbody", { "data-list": true }),
    compareLink = h("span", { class: "soft" }),
    newest = h("p", { class: "soft small" }),
    selected = new Set();
  let items = context.runs,
    total = context.totalRuns,
    search = "";
  const history = h("div", {}, roundsCard(context.rounds, items, context.link));
  const draw = () => {
    fill(newest, total > items.length ? `Only the newest ${items.length} of ${total} runs are listed` : null);
    const words = search.toLowerCase().split(/\s+/);
    const shown = items.filter((run) => words.every((word) => searchText(run).includes(word)));
    fill(
      rows,
      shown.map((run) => row(run, context, selectBox(run))),
    );
  };
  const selectBox = (run) =>
    h("input", {
      type: "checkbox",
      checked: selected.has(run.name),
      "aria-label": `Select ${run.name}`,
      onchange: (event) => {
        selected[event.target.checked ? "add" : "delete"](run.name);
        drawCompareLink();
      },
    });
  const drawCompareLink = () => {
    const names = [...selected]; // in the order of selection: the second is compared with the first
    fill(
      compareLink,
      names.length === 2
        ? h("a", { href: context.link(names[0], "versus", names[1]) }, `Compare ${names[1]} with ${names[0]}`)
        : "Select two runs to compare them",
    );
  };
  draw();
  drawCompareLink();
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
    if (page && !rows.contains(document.activeElement)) {
      ({ items, total } = page);
      draw();
      if (!inUse(history)) fill(history, roundsCard(page.rounds, items, context.link));
    }
  }, 5000);
  context.onStop(() => clearInterval(timer));
  const column = (name, kind, title) => h("th", { scope: "col", class: kind, title }, name);
  const columns = [
    ...["Run", "Status", "Model, loss and reward"].map((name) => column(name)),
    column("Steps", "num"),
    column("Held-out", "num", "Success or mean reward on held-out tasks, before and after training"),
    column("Final reward", "num", "Mean training reward of the last 4 steps"),
    column("Cost", "num", "Time of all steps, and what the judge cost"),
    column("Last updated", "num"),
  ];
  return {
    node: h(
      "section",
      {},
      h(
        "div",
        { class: "head" },
        h("div", {}, h("h1", {}, "Runs"), compareLink, newest),
        h("input", {
          type: "search",
          placeholder: "Search names, models, status",
          "aria-label": "Search runs",
          oninput: (event) => {
            search = event.target.value.trim();
            draw();
          },
        }),
      ),
      history,
      h(
        "div",
        { class: "card scroll" },
        h("table", { class: "stack runs" }, h("thead", {}, h("tr", {}, columns)), rows),
      ),
    ),
  };
}

const STATE_CLASSES = { training: "accent", accepted: "good", rejected: "warn", stopped: "bad", "rolled back": "bad" };

function roundsCard(rounds, runs, link) {
  if (!rounds.length) return null;
  const column = (name, kind = "") => h("th", { scope: "col", class: kind }, name),
    known = new Set(runs.map((run) => run.name));
  const columns = [
    ...["Round", "State"].map((name) => column(name)),
    ...["Tasks", "Held-out", "Change", "Cost", "Begun"].map((name) => column(name, "num")),
  ];
  const line = (round) => {
    const { difference, low, high, counts_successes: points } = round,
      [scale, unit] = points ? [100, " points"] : [1, ""],
      at = (value) => signed(scale * value, 3);
    return h(
      "tr",
      {},
      h(
        "td",
        { class: "wide" },
        known.has(round.name) ? h("a", { href: link(round.name), "data-item": true }, round.name) : round.name,
        h("p", { class: "small soft" }, `from ${round.start}`),
      ),
      h(
        "td",
        { class: "pairs", "data-name": "State" },
        h("span", { class: `chip status ${STATE_CLASSES[round.state] ?? ""}` }, round.state),
        round.why && h("p", { class: "small soft" }, round.why),
      ),
      h("td", { class: "num", "data-name": "Tasks" }, `${round.new} new, ${round.older} older`),
      h(
        "td",
        { class: "num pairs", "data-name": "Held-out" },
        `${evaluationResult(round.before)} → ${evaluationResult(round.after)} `,
        h("small", {}, plural(round.held_out, "task")),
      ),
      h(
        "td",
        { class: "num pairs", "data-name": "Change" },
        difference === null ? "–" : `${at(difference)}${unit} `,
        difference === null || low === null ? null : h("small", {}, `95 %: ${at(low)} to ${at(high)}`),
      ),
      h(
        "td",
        { class: "num", "data-name": "Cost" },
        cost(round),
        " ",
        h("small", {}, plural(round.rollouts, "rollout")),
      ),
      h("td", { class: "num", "data-name": "Begun" }, round.began ? ago(round.began) : "–"),
    );
  };
  return h(
    "div",
    { class: "card scroll rounds" },
    h("h2", {}, "Rounds of art retrain"),
    h("table", { class: "stack runs" }, h("thead", {}, h("tr", {}, columns)), h("tbody", {}, rounds.map(line))),
  );
}

const searchText = (run) =>
  [run.name, run.status, run.reason, run.model, run.loss, run.reward, run.problem].join(" ").toLowerCase();

function row(run, { link }, selectBox) {
  const name = h(
    "td",
    { class: "wide" },
    h(
      "div",
      { class: "named" },
      run.problem ? null : selectBox,
      h("a", { href: link(run.name), class: "short", title: run.name, "data-item": true }, run.name),
    ),
    run.problem ? h("p", { class: "small soft" }, run.problem) : reason(run),
  );
  if (run.problem) return h("tr", {}, name, h("td", { colspan: 7 }));
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
    h("td", { class: "num", "data-name": "Steps" }, run.kind === "training" ? steps : run.kind),
    h(
      "td",
      { class: "num pairs", "data-name": "Held-out" },
      isEvaluation ? evaluationResult(run.measured) : run.pairs.length ? run.pairs.map(change) : "–",
    ),
    h("td", { class: "num", "data-name": "Final reward" }, num(run.final_reward)),
    h("td", { class: "num", "data-name": "Cost" }, cost(run)),
    h("td", { class: "num", "data-name": "Updated" }, run.written ? ago(run.written) : "–"),
  );
}

const cost = ({ seconds, judge_cost }) =>
  [seconds ? duration(seconds) : "–", judge_cost && `$${judge_cost.toFixed(2)}`].filter(Boolean).join(", ");

const ellipsis = (text, kind = "") => h("span", { class: `short ${kind}`, title: text }, text);

const change = (pair) =>
  h(
    "div",
    { class: "change" },
    `${evaluationResult(pair.before)} → ${evaluationResult(pair.after)} `,
    h("small", {}, temperatureName(pair.temperature)),
  );
