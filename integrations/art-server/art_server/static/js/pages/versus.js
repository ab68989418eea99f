// A run compared with another one: their newest evaluations on the held-out tasks that both have.

import { get, runPath } from "../api.js";
import { changeText } from "../decision.js";
import { emptyCard, h } from "../dom.js";
import { num, percent, plural, signed, taskText, truncate } from "../format.js";
import { temperatureName } from "../outcome.js";

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
  const column = (name, kind) => h("th", { scope: "col", class: kind }, name);
  const rollout = (run, id) => h("a", { href: context.link(run, "rollout", id) }, "open");
  const row = (task) =>
    h(
      "tr",
      {},
      h("td", { class: "wide" }, truncate(taskText(task.task), 200)),
      h("td", { class: "num", "data-name": "Change" }, signed(task.change)),
      h("td", { "data-name": context.run }, rollout(context.run, task.before)),
      h("td", { "data-name": other }, rollout(other, task.after)),
    );
  return {
    node: h(
      "section",
      {},
      title,
      h("div", { class: "card decision" }, changes.map(verdict)),
      tasks.length
        ? h(
            "div",
            { class: "card scroll" },
            h("h2", {}, `${plural(comparison.changed, "task")} with another result`),
            comparison.changed > tasks.length
              ? h("p", { class: "soft" }, `The first ${tasks.length} are shown.`)
              : null,
            h(
              "table",
              { class: "stack" },
              h("thead", {}, h("tr", {}, column("Task"), column("Change", "num"), column(context.run), column(other))),
              h("tbody", { "data-list": true }, tasks.map(row)),
            ),
          )
        : null,
    ),
  };
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
