// What the run was begun with.

import { h } from "../dom.js";
import { json, num } from "../format.js";
import { measured } from "../outcome.js";

export async function settings(context) {
  const run = context.info;
  const made = [
    ["model", run.model],
    ["loss", run.loss],
    ["reward", run.reward],
    ["learner", run.learner],
    ["start weights (SHA-256)", run.start_weights],
  ];
  const evaluations = run.evaluations.filter(Boolean);
  return {
    node: h(
      "section",
      {},
      h("div", { class: "head" }, h("h1", {}, "Settings")),
      h("div", { class: "card" }, h("h2", {}, "Made of"), pairs(made)),
      h("div", { class: "card" }, h("h2", {}, "Settings"), pairs(Object.entries(run.config).sort())),
      evaluations.length
        ? h(
            "div",
            { class: "card scroll" },
            h("h2", {}, "Evaluations"),
            h(
              "table",
              {},
              h(
                "thead",
                {},
                h(
                  "tr",
                  {},
                  h("th", { scope: "col" }, "Name"),
                  ["Step", "Temperature", "Result", "95 %", "Tasks", "Unscored"].map((it) =>
                    h("th", { scope: "col", class: "num" }, it),
                  ),
                ),
              ),
              h(
                "tbody",
                {},
                evaluations.map((it) =>
                  h(
                    "tr",
                    {},
                    h("td", {}, it.name),
                    h("td", { class: "num" }, it.step),
                    h("td", { class: "num" }, it.temperature ?? "agent's own"),
                    h("td", { class: "num" }, measured(it)),
                    h("td", { class: "num" }, it.interval ? it.interval.map((x) => num(x)).join(" – ") : "–"),
                    h("td", { class: "num" }, it.n),
                    h("td", { class: "num" }, it.unscored),
                  ),
                ),
              ),
            ),
          )
        : null,
    ),
  };
}

const pairs = (found) =>
  h(
    "dl",
    { class: "settings" },
    found.map(([name, value]) =>
      h("div", {}, h("dt", {}, name), h("dd", {}, value === null || value === undefined ? "–" : json(value))),
    ),
  );
