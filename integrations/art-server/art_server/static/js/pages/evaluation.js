// A folder in which an agent was only measured: what was found, and every task's run.

import { fill, h, tile } from "../dom.js";
import { num, percent } from "../format.js";
import { measured, reason, statusChip } from "../outcome.js";
import { rollouts } from "./rollouts.js";

export async function evaluation(context) {
  const tiles = h("dl", { class: "tiles" }),
    tasks = await rollouts(context),
    said = h("p", { class: "soft" }, `An evaluation of ${context.info.model}: nothing is trained here.`),
    status = h("div", { class: "row" }),
    title = h("div", {}, h("h1", {}, context.run), said, status);
  const draw = (run) => {
    fill(status, statusChip(run), reason(run));
    fill(tiles, shown(run));
  };
  draw(context.info);
  tasks.node.classList.add("stacked");
  return {
    node: h("section", {}, h("div", { class: "head" }, title), tiles, tasks.node),
    update: (run) => {
      draw(run);
      return tasks.update(run);
    },
  };
}

function shown(run) {
  const found = run.measured,
    counts = found?.counts_successes,
    word = counts ? percent : num;
  const begun = run.splits.reduce((sum, it) => sum + it.rollouts, 0);
  return [
    tile(
      counts === false ? "Mean reward" : "Success",
      measured(found),
      found?.interval ? `95 %: ${found.interval.map((it) => word(it)).join(" to ")}` : "not measured to the end",
    ),
    counts ? tile("Mean reward", num(found.mean_reward), "of the same runs") : null,
    tile(
      "Tasks",
      num(found?.n ?? begun),
      !found ? "begun" : found.unscored ? `${num(found.unscored)} of them without a reward` : "all scored",
    ),
    tile("Temperature", found?.temperature ?? "the agent's own", `reward: ${run.reward}`),
  ];
}
