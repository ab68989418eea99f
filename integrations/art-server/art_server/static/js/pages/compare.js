// Two rollouts of one task side by side; by default, of a held-out task that was lost or won, before and after training.

import { get, rolloutPath, runPath } from "../api.js";
import { emptyCard, field, fill, h, select } from "../dom.js";
import { num, plural, signed, taskText, truncate } from "../format.js";
import { temperatureName } from "../outcome.js";
import { sharedMessages, transcript, viewSwitch } from "./transcript.js";

const LIMIT = 200; // rollouts per request

export async function compare(context) {
  const selection = {
    task_id: context.parameters.get("task_id") ?? "",
    a: context.parameters.get("a") ?? "",
    b: context.parameters.get("b") ?? "",
    view: context.parameters.get("view") ?? "messages",
  };
  const [tasks, changed] = await Promise.all([
    get(runPath(context.run, "/tasks"), { limit: 200 }, context.signal),
    get(runPath(context.run, "/changed-tasks"), { limit: 200 }, context.signal),
  ]);
  const flips = new Map(changed.items.map((task) => [task.task_id, task]));
  if (!tasks.total)
    return {
      node: emptyCard("Nothing to compare yet", "You can compare two trajectories as soon as a task has two rollouts."),
    };
  if (!selection.task_id) selection.task_id = changed.items[0]?.task_id ?? tasks.items[0].task_id;
  const body = h("div", { class: "pair" }),
    summary = h("p", { class: "soft" }),
    heading = h("h1");
  let rollouts = [],
    total = 0;
  const change = async (changes) => {
    Object.assign(selection, changes);
    context.saveParameters(selection);
    if ("task_id" in changes) await load();
    await draw();
  };
  const load = async () => {
    ({ rollouts, total } = await loadRollouts(context, selection.task_id));
    const flip = flips.get(selection.task_id);
    const [first, last] = flip ? [flip.before, flip.after] : firstAndLast(rollouts);
    if (!rollouts.some((rollout) => rollout.rollout_id === selection.a)) selection.a = first;
    if (!rollouts.some((rollout) => rollout.rollout_id === selection.b)) selection.b = last;
    fill(heading, taskText(rollouts[0]?.task ?? tasks.items.find((task) => task.task_id === selection.task_id)?.task));
    const restriction = total > 2 * LIMIT ? `; only the first and last ${LIMIT} can be selected` : "";
    fill(
      summary,
      `${plural(total, "rollout")} of this task, steps ${rollouts[0]?.step ?? "–"} to ${rollouts[rollouts.length - 1]?.step ?? "–"}${restriction}`,
    );
  };
  const draw = async () => {
    if (!rollouts.length) return void fill(body, emptyCard("No rollouts of this task", "Choose another task."));
    const pair = await Promise.all(
      [selection.a, selection.b].map((id) => get(rolloutPath(context.run, id), {}, context.signal)),
    );
    const shared = sharedMessages(...pair);
    fill(
      body,
      pair.map((rollout, index) => side(context, rollout, index ? "b" : "a", rollouts, shared, selection, change)),
    );
  };
  const listed = new Map([...changed.items, ...tasks.items].map((task) => [task.task_id, task]));
  if (!listed.has(selection.task_id))
    listed.set(selection.task_id, { task_id: selection.task_id, task: `task ${selection.task_id}` });
  const options = [...listed.values()].map((task) => [
    task.task_id,
    `${flips.has(task.task_id) ? `${signed(flips.get(task.task_id).change)} ` : ""}${truncate(taskText(task.task), 70)}`,
  ]);
  await load();
  await draw();
  const taskSelect = select(options, selection.task_id, (task_id) => change({ task_id, a: "", b: "" }));
  const showFirstAndLast = () => {
    const [a, b] = firstAndLast(rollouts);
    change({ a, b });
  };
  const showExtremes = () => {
    const scored = rollouts.filter((rollout) => rollout.reward !== null).sort((x, y) => x.reward - y.reward);
    if (scored.length > 1) change({ a: scored[0].rollout_id, b: scored[scored.length - 1].rollout_id });
  };
  return {
    node: h(
      "section",
      {},
      h("div", { class: "head" }, h("div", {}, heading, summary)),
      h(
        "div",
        { class: "row" },
        field("Task", taskSelect),
        h("button", { type: "button", onclick: showFirstAndLast }, "First and last step"),
        h("button", { type: "button", onclick: showExtremes }, "Worst and best"),
        viewSwitch(selection.view, (view) => change({ view })),
      ),
      body,
    ),
  };
}

// The oldest and the newest rollouts of a task, up to LIMIT of each.
async function loadRollouts(context, task_id) {
  const fetchPage = (order) =>
    get(runPath(context.run, "/trajectories"), { task_id, order, limit: LIMIT }, context.signal);
  const oldest = await fetchPage("oldest");
  const newest = oldest.total > LIMIT ? await fetchPage("newest") : { items: [] };
  const byId = new Map([...oldest.items, ...newest.items.reverse()].map((rollout) => [rollout.rollout_id, rollout]));
  const rollouts = [...byId.values()].filter((rollout) => rollout.state !== "lost" && rollout.state !== "running");
  return { rollouts, total: oldest.total };
}

// The ids of a rollout of the first step and one of the last, both of training or both evaluated at the same temperature.
function firstAndLast(rollouts) {
  const bySampling = new Map();
  for (const rollout of rollouts) {
    const sampling = samplingName(rollout);
    bySampling.set(sampling, [...(bySampling.get(sampling) ?? []), rollout]);
  }
  const span = (group) => (group[group.length - 1].step ?? 0) - (group[0].step ?? 0);
  const [widest] = [...bySampling.values()].sort((x, y) => span(y) - span(x));
  if (!widest) return [undefined, undefined];
  const first = median(widest, widest[0].step),
    rest = widest.filter((rollout) => rollout.rollout_id !== first);
  return [first, rest.length ? median(rest, widest[widest.length - 1].step) : first];
}

const samplingName = (rollout) =>
  rollout.evaluation ? `eval, ${temperatureName(rollout.evaluation.temperature)}` : (rollout.split ?? "");

// The id of a step's rollout with the median reward, as a typical one.
function median(rollouts, step) {
  const ofStep = rollouts
    .filter((rollout) => rollout.step === step)
    .sort((x, y) => (x.reward ?? -Infinity) - (y.reward ?? -Infinity));
  return ofStep[Math.floor((ofStep.length - 1) / 2)]?.rollout_id ?? rollouts[0]?.rollout_id;
}

function side(context, trajectory, name, rollouts, shared, selection, change) {
  const options = rollouts.map((rollout) => [
    rollout.rollout_id,
    `step ${rollout.step ?? "–"} · ${samplingName(rollout)} · reward ${num(rollout.reward)}${rollout.state === "failed" ? " · failed" : ""}`,
  ]);
  const label = name === "a" ? "First trajectory" : "Second trajectory";
  const head = select(options, trajectory.rollout_id, (id) => change({ [name]: id }), { "aria-label": label });
  return transcript(context, context.run, trajectory, { label, head, shared, view: selection.view });
}
