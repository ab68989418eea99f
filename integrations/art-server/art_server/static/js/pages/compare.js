// Two runs of the agent on one task side by side: at first, what training changed from its first step to its last.

import { get, rolloutPath, runPath } from "../api.js";
import { conversation, gist } from "../conversation.js";
import { empty, field, fill, h, select, toggle } from "../dom.js";
import { num, plural, short, signed, STATES, taskText } from "../format.js";
import { temperatureName } from "../outcome.js";
import { TokenView } from "../tokens.js";
import { reasons } from "./trajectory.js";

const MOST = 200;

export async function compare(context) {
  const asked = {
    task_id: context.parameters.get("task_id") ?? "",
    a: context.parameters.get("a") ?? "",
    b: context.parameters.get("b") ?? "",
    view: context.parameters.get("view") ?? "messages",
  };
  const tasks = await get(runPath(context.run, "/tasks"), { limit: 200 }, context.signal);
  if (!tasks.total)
    return {
      node: empty(
        "Nothing to compare yet",
        "Two trajectories of one task can be compared as soon as a task was run twice.",
      ),
    };
  if (!asked.task_id) asked.task_id = tasks.items[0].task_id;
  const body = h("div", { class: "pair" }),
    said = h("p", { class: "soft" }),
    heading = h("h1");
  let runs = [],
    total = 0;
  const change = async (next) => {
    Object.assign(asked, next);
    context.keep(asked);
    if ("task_id" in next) await load();
    await draw();
  };
  const load = async () => {
    ({ runs, total } = await runsOf(context, asked.task_id));
    const [first, last] = ends(runs);
    if (!runs.some((it) => it.rollout_id === asked.a)) asked.a = first;
    if (!runs.some((it) => it.rollout_id === asked.b)) asked.b = last;
    fill(heading, taskText(runs[0]?.task ?? tasks.items.find((it) => it.task_id === asked.task_id)?.task));
    const some = total > 2 * MOST ? `; the first and the last ${MOST} can be chosen` : "";
    fill(
      said,
      `${plural(total, "run")} of this task, steps ${runs[0]?.step ?? "–"} to ${runs[runs.length - 1]?.step ?? "–"}${some}`,
    );
  };
  const draw = async () => {
    if (!runs.length) return void fill(body, empty("No run of this task", "Choose another task."));
    const pair = await Promise.all(
      [asked.a, asked.b].map((id) => get(rolloutPath(context.run, id), {}, context.signal)),
    );
    const shared = common(...pair.map(messagesOf));
    fill(
      body,
      pair.map((it, index) => side(context, it, index ? "b" : "a", runs, shared, asked, change)),
    );
  };
  const known = tasks.items.some((it) => it.task_id === asked.task_id)
    ? tasks.items
    : [...tasks.items, { task_id: asked.task_id, task: `task ${asked.task_id}`, rollouts: 0 }];
  const options = known.map((it) => [it.task_id, `${short(taskText(it.task), 70)} (${it.rollouts || "?"}×)`]);
  await load();
  await draw();
  const chooser = select(options, asked.task_id, (task_id) => change({ task_id, a: "", b: "" }));
  const first = () => {
    const [a, b] = ends(runs);
    change({ a, b });
  };
  const extremes = () => {
    const scored = runs.filter((it) => it.reward !== null).sort((x, y) => x.reward - y.reward);
    if (scored.length > 1) change({ a: scored[0].rollout_id, b: scored[scored.length - 1].rollout_id });
  };
  return {
    node: h(
      "section",
      {},
      h("div", { class: "head" }, h("div", {}, heading, said)),
      h(
        "div",
        { class: "row" },
        field("Task", chooser),
        h("button", { type: "button", onclick: first }, "First step and last"),
        h("button", { type: "button", onclick: extremes }, "Worst and best"),
        toggle(
          "View",
          [
            ["messages", "Conversation"],
            ["tokens", "Tokens"],
          ],
          asked.view,
          (view) => change({ view }),
        ),
      ),
      body,
    ),
  };
}

// The oldest and the newest, where there are more than can be listed.
async function runsOf(context, task_id) {
  const ask = (order) => get(runPath(context.run, "/trajectories"), { task_id, order, limit: MOST }, context.signal);
  const oldest = await ask("oldest");
  const newest = oldest.total > MOST ? await ask("newest") : { items: [] };
  const known = new Map([...oldest.items, ...newest.items.reverse()].map((it) => [it.rollout_id, it]));
  const runs = [...known.values()].filter((it) => it.state !== "lost" && it.state !== "running");
  return { runs, total: oldest.total };
}

// A run of the first step and one of the last, sampled alike: in training, or in evaluations at one temperature.
function ends(runs) {
  const kinds = new Map();
  for (const run of runs) {
    const kind = sampled(run);
    kinds.set(kind, [...(kinds.get(kind) ?? []), run]);
  }
  const span = (kind) => (kind[kind.length - 1].step ?? 0) - (kind[0].step ?? 0);
  const [widest] = [...kinds.values()].sort((x, y) => span(y) - span(x));
  if (!widest) return [undefined, undefined];
  const a = best(widest, widest[0].step),
    rest = widest.filter((it) => it.rollout_id !== a);
  return [a, rest.length ? best(rest, widest[widest.length - 1].step) : a];
}

const sampled = (run) =>
  run.evaluation ? `eval, ${temperatureName(run.evaluation.temperature)}` : (run.split ?? "");

// Of a step, the run nearest to the middle: neither luck nor mishap.
function best(runs, step) {
  const there = runs
    .filter((it) => it.step === step)
    .sort((x, y) => (x.reward ?? -Infinity) - (y.reward ?? -Infinity));
  return there[Math.floor((there.length - 1) / 2)]?.rollout_id ?? runs[0]?.rollout_id;
}

const messagesOf = (it) => {
  const last = it.call_list[it.call_list.length - 1];
  return last ? [...last.messages, last.answer].map((place) => it.messages[place]) : [];
};

function common(one, other) {
  let at = 0;
  while (at < one.length && at < other.length && gist(one[at]) === gist(other[at])) at += 1;
  return at;
}

function side(context, it, name, runs, shared, asked, change) {
  const options = runs.map((run) => [
    run.rollout_id,
    `step ${run.step ?? "–"} · ${sampled(run)} · reward ${num(run.reward)}${run.state === "failed" ? " · failed" : ""}`,
  ]);
  const [state, kind] = STATES[it.state];
  const messages = messagesOf(it),
    calls = new Map(it.call_list.map((call) => [it.messages[call.answer], call]));
  const view = asked.view === "tokens" ? new TokenView(context.run, it, context.signal) : null;
  view?.open();
  return h(
    "section",
    { class: "side-by-side", "aria-label": name === "a" ? "First trajectory" : "Second trajectory" },
    h(
      "div",
      { class: "side-head" },
      select(options, it.rollout_id, (id) => change({ [name]: id }), {
        "aria-label": name === "a" ? "First trajectory" : "Second trajectory",
      }),
      h(
        "div",
        { class: "row small soft" },
        h("b", {}, `reward ${num(it.reward)}`),
        h("span", {}, `advantage ${it.advantage === null ? "–" : signed(it.advantage)}`),
        h("span", { class: `chip ${kind}` }, state),
        h("span", {}, plural(it.calls, "call")),
        h("a", { href: context.link(context.run, "rollout", it.rollout_id) }, "open"),
      ),
    ),
    view ? view.node : conversation(messages, { calls, same: shared }),
    reasons(it),
  );
}
