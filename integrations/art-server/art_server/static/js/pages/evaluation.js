// The overview of an evaluation's folder: its result, and the rollout of every task.

import { Decision } from "../decision.js";
import { fill, h, tile } from "../dom.js";
import { num, percent } from "../format.js";
import { evaluationResult, reason, statusChip } from "../outcome.js";
import { rollouts } from "./rollouts.js";

export async function evaluation(context) {
  const tiles = h("dl", { class: "tiles" }),
    tasks = await rollouts(context),
    decision = new Decision(context),
    description = h("p", { class: "soft" }, `Evaluation of ${context.info.model}, without training`),
    status = h("div", { class: "row" }),
    title = h("div", {}, h("h1", {}, context.run), description, status);
  const draw = (run) => {
    fill(status, statusChip(run), reason(run));
    fill(tiles, resultTiles(run));
  };
  draw(context.info);
  decision.update(context.info);
  tasks.node.classList.add("stacked");
  return {
    node: h("section", {}, h("div", { class: "head" }, title), tiles, decision.node, tasks.node),
    update: async (run) => {
      draw(run);
      await decision.update(run);
      return tasks.update(run);
    },
  };
}

function resultTiles(run) {
  const result = run.measured,
    hasSuccess = result?.counts_successes,
    format = hasSuccess ? percent : num;
  const started = run.splits.reduce((sum, split) => sum + split.rollouts, 0);
  return [
    tile(
      hasSuccess === false ? "Mean reward" : "Success",
      evaluationResult(result),
      result?.interval
        ? `95 % interval: ${result.interval.map((bound) => format(bound)).join(" to ")}`
        : "not finished",
    ),
    hasSuccess ? tile("Mean reward", num(result.mean_reward), "over the scored rollouts") : null,
    tile(
      "Tasks",
      num(result?.n ?? started),
      !result ? "started" : result.unscored ? `${num(result.unscored)} without a reward` : "all scored",
    ),
    tile("Temperature", result?.temperature ?? "the agent's own", `reward: ${run.reward}`),
  ];
}
