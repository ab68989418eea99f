// A run compared with another one: their newest evaluations on the held-out tasks that both have, or one of these tasks.

import { get, runPath } from "../api.js";
import { changeText } from "../decision.js";
import { emptyCard, fill, h } from "../dom.js";
import { num, percent, plural, signed, taskText, truncate } from "../format.js";
import { temperatureName } from "../outcome.js";
import { flip, flipLink } from "./flip.js";

export async function versus(context) {
  const other = context.argument,
    comparison = await get(runPath(context.run, `/compare/${encodeURIComponent(other)}`), {}, context.signal),
    { changes, evaluations, rewards, tasks } = comparison;
  const [first, second] = evaluations;
  const title = h(
    "div",
    {},
    h("h1", {}, `${other} compared with ${context.run}`),
    changes.length ? h("p", { class: "soft" }, `${second} of ${other}; ${first} of ${context.run}`) : null,
    rewards.length ? h("p", { class: "soft" }, `Scored by different rewards: ${rewards.join(", ")}`) : null,
  );
  if (!changes.length)
    return {
      node: h(
        "section",
        {},
        title,
        emptyCard(
          "Nothing to compare",
          "These runs were not evaluated on the same tasks, at the same temperature, by comparable rewards. Measure both with art eval.",
        ),
      ),
    };
  if (context.parameters.get("a") && context.parameters.get("b")) return flip(context, tasks);
  const measures = h(
    "div",
    { class: "card scroll measures" },
    h("h2", {}, "Per task"),
    h("p", {}, "Reading the calls…"),
  );
  return {
    ready: () => loadMeasures(context, changes[0], measures),
    node: h(
      "section",
      {},
      title,
      h("div", { class: "card decision" }, changes.map(verdict)),
      measures,
      tasks.length ? changedCard(context, comparison) : null,
    ),
  };
}

const column = (name, kind) => h("th", { scope: "col", class: kind }, name);

const dollars = (value) => (value === null ? "–" : `$${num(value)}`);

// Measure -> its name, the format of a value and whether differences are in points. The verdict has success, or else the reward.
const MEASURES = {
  success: ["Success", percent, true],
  reward: ["Reward", num],
  failed: ["Failed rollouts", percent, true],
  cost: ["Cost", dollars],
  seconds: ["Seconds, mean", num],
  seconds_p50: ["Seconds, p50", num],
  seconds_p95: ["Seconds, p95", num],
  calls: ["Model calls", num],
  prompt_tokens: ["Prompt tokens", num],
  sampled_tokens: ["Sampled tokens", num],
};

// Reads all calls of both evaluations, which may take seconds, so the rest of the page doesn't wait for it.
async function loadMeasures(context, change, card) {
  const title = h("h2", {}, "Per task");
  try {
    const path = runPath(context.run, `/compare/${encodeURIComponent(context.argument)}/measures`);
    fill(card, title, measuresTable(context, change, await get(path, {}, context.signal)));
  } catch (error) {
    if (error.name === "AbortError" || !(error.status >= 0)) throw error;
    fill(card, title, h("p", { class: "soft" }, error.message));
  }
}

function measuresTable(context, change, measures) {
  const other = context.argument,
    inVerdict = change.counts_successes ? "success" : "reward";
  const row = (measure) => {
    const [name, format] = MEASURES[measure.name];
    return h(
      "tr",
      {},
      h("td", { class: "wide" }, name),
      h("td", { class: "num", "data-name": context.run }, format(measure.first)),
      h("td", { class: "num", "data-name": other }, format(measure.second)),
      h("td", { class: "num", "data-name": "Difference" }, differenceText(measure)),
    );
  };
  return [
    h("p", { class: "soft" }, `The tasks that both have, ${temperatureName(change.temperature)}; intervals of 95 %.`),
    h(
      "table",
      { class: "stack" },
      h(
        "thead",
        {},
        h("tr", {}, column("Measure"), column(context.run, "num"), column(other, "num"), column("Difference", "num")),
      ),
      h("tbody", {}, measures.filter(({ name }) => name in MEASURES && name !== inVerdict).map(row)),
    ),
    measures.some(({ name }) => name === "cost")
      ? null
      : h(
          "p",
          { class: "soft small" },
          "The cost is unknown: no price is listed for these models. art compare --price takes one.",
        ),
  ];
}

function differenceText({ name, difference, low, high }) {
  if (difference === null) return "–";
  const [, format, points] = MEASURES[name],
    unit = format === dollars ? "$" : "",
    at = (value) => signed(points ? 100 * value : value).replace(/^([+−-]?)/, `$1${unit}`);
  return `${at(difference)}${points ? " points" : ""}${low === null ? "" : ` (${at(low)} to ${at(high)})`}`;
}

function changedCard(context, { tasks, changed }) {
  const other = context.argument;
  const rollout = (run, id) => h("a", { href: context.link(run, "rollout", id) }, "open");
  const row = (task) =>
    h(
      "tr",
      {},
      h(
        "td",
        { class: "wide" },
        h(
          "a",
          { href: flipLink(context, task), class: "task", title: "Both transcripts, side by side", "data-item": true },
          truncate(taskText(task.task), 200),
        ),
      ),
      h("td", { class: "num", "data-name": "Change" }, signed(task.change)),
      h("td", { "data-name": context.run }, rollout(context.run, task.before)),
      h("td", { "data-name": other }, rollout(other, task.after)),
    );
  return h(
    "div",
    { class: "card scroll" },
    h("h2", {}, `${plural(changed, "task")} with another result`),
    changed > tasks.length ? h("p", { class: "soft" }, `The first ${tasks.length} are shown.`) : null,
    h(
      "table",
      { class: "stack" },
      h("thead", {}, h("tr", {}, column("Task"), column("Change", "num"), column(context.run), column(other))),
      h("tbody", { "data-list": true }, tasks.map(row)),
    ),
  );
}

const TITLES = {
  better: ["Better", "good"],
  worse: ["Worse", "bad"],
  "can't tell": ["Can't tell which is better", ""],
};

function verdict(change) {
  const format = change.counts_successes ? percent : num,
    [title, tone] = TITLES[change.verdict];
  return h(
    "div",
    { class: `verdict ${tone}` },
    h("h2", {}, title),
    h(
      "p",
      {},
      h("b", {}, `${format(change.before)} → ${format(change.after)}`),
      ` held out, ${temperatureName(change.temperature)}`,
    ),
    h("p", {}, changeText(change)),
  );
}
