// The run's settings and evaluations.

import { h } from "../dom.js";
import { json, num } from "../format.js";
import { evaluationResult } from "../outcome.js";

export async function settings(context) {
  const run = context.info;
  const components = [
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
      h("div", { class: "card" }, h("h2", {}, "Components"), definitions(components)),
      h("div", { class: "card" }, h("h2", {}, "Settings"), definitions(Object.entries(run.config).sort())),
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
                  ["Step", "Temperature", "Result", "95 % interval", "Tasks", "Unscored"].map((name) =>
                    h("th", { scope: "col", class: "num" }, name),
                  ),
                ),
              ),
              h(
                "tbody",
                {},
                evaluations.map((evaluation) =>
                  h(
                    "tr",
                    {},
                    h("td", {}, evaluation.name),
                    h("td", { class: "num" }, evaluation.step),
                    h("td", { class: "num" }, evaluation.temperature ?? "agent's own"),
                    h("td", { class: "num" }, evaluationResult(evaluation)),
                    h(
                      "td",
                      { class: "num" },
                      evaluation.interval ? evaluation.interval.map((bound) => num(bound)).join(" – ") : "–",
                    ),
                    h("td", { class: "num" }, evaluation.n),
                    h("td", { class: "num" }, evaluation.unscored),
                  ),
                ),
              ),
            ),
          )
        : null,
    ),
  };
}

const definitions = (entries) =>
  h(
    "dl",
    { class: "settings" },
    entries.map(([name, value]) =>
      h("div", {}, h("dt", {}, name), h("dd", {}, value === null || value === undefined ? "–" : json(value))),
    ),
  );
