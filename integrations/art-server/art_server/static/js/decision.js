// The first screen of a run: whether held-out tasks are solved better, what still fails, what it cost, what to do next.

import { get, runPath } from "./api.js";
import { fill, h, inUse } from "./dom.js";
import { duration, num, plural, signed, taskText, truncate } from "./format.js";
import { evaluationResult, temperatureName } from "./outcome.js";

const TASKS_SHOWN = 5;

export class Decision {
  constructor(context) {
    this.context = context;
    this.node = h("section", { class: "card decision", "aria-label": "Result" });
    this.health = h("summary");
  }

  // Asks again only if something was measured or learned since, and doesn't redraw what is being read.
  async update(run) {
    const key = JSON.stringify([run.last_step, run.evaluations, run.status]);
    if (key === this.key || inUse(this.node)) return;
    try {
      const decision = await get(runPath(run.name, "/decision"), {}, this.context.signal);
      this.key = key;
      this.draw(run, decision);
    } catch (error) {
      if (error.name === "AbortError" || !(error.status >= 0)) throw error;
      fill(this.node, h("p", { class: "soft" }, error.message));
    }
  }

  draw(run, decision) {
    const measuredOnly = run.kind === "evaluation";
    fill(
      this.node,
      measuredOnly ? null : verdict(run, decision, this.context.link),
      h(
        "div",
        { class: "questions" },
        question("What fails now", this.failing(decision.failing)),
        measuredOnly ? null : question("What it cost", cost(decision.cost)),
        question("What next", decision.next.length ? decision.next.map(advice) : pending(run)),
      ),
    );
    const { problems, agreement } = decision.health;
    const state = problems.length
      ? `${plural(problems.length, "problem")}: ${problems.join("; ")}`
      : agreement || "nothing found";
    fill(this.health, "Numerical health: ", h("span", { class: problems.length ? "bad" : "" }, state));
  }

  failing(failing) {
    if (!failing) return h("p", { class: "soft" }, "No held-out tasks were evaluated.");
    const { link, run } = this.context;
    const open = (id, text) => h("a", { href: link(run, "rollout", id) }, text);
    const tasks = failing.tasks.slice(0, TASKS_SHOWN);
    const kind = failing.counts_successes ? "are not solved" : "failed",
      none = failing.counts_successes ? "All are solved" : "None failed";
    return [
      h(
        "p",
        {},
        failing.failed
          ? `${failing.failed} of ${plural(failing.measured, "held-out task")} ${kind}`
          : `${none}, of ${plural(failing.measured, "held-out task")}`,
      ),
      h(
        "ul",
        { class: "reasons" },
        failing.reasons
          .slice(0, TASKS_SHOWN)
          .map((it) => h("li", {}, h("b", {}, it.rollouts), open(it.example, it.reason))),
      ),
      tasks.length
        ? h("p", { class: "soft small" }, failing.counts_successes ? "For example" : "Lowest rewards")
        : null,
      h(
        "ul",
        { class: "tasks" },
        tasks.map((task) => h("li", {}, this.taskLink(task), task.lost && h("span", { class: "chip warn" }, "lost"))),
      ),
    ];
  }

  taskLink({ task_id, task, before, after }) {
    const { link, run } = this.context;
    const address = before ? link(run, "compare", "", { task_id, a: before, b: after }) : link(run, "rollout", after);
    return h("a", { href: address, class: "short", title: taskText(task) }, truncate(taskText(task), 120));
  }
}

function verdict(run, { changes, signs }, link) {
  const [title, tone] = headline(run, changes, signs);
  return h(
    "div",
    { class: `verdict ${tone}` },
    h("h2", {}, title),
    run.pairs.map((pair) => h("p", {}, changeLine(pair, changes))),
    run.reason && h("p", { class: "sign" }, `${capital(run.status)}: ${run.reason}`),
    signs.map((sign) => h("p", { class: "sign" }, sign)),
    signs.length
      ? h(
          "a",
          { href: link(run.name, "rollouts", "", { split: "train", order: "highest" }) },
          "Rollouts with the best rewards",
        )
      : null,
  );
}

function headline(run, changes, signs) {
  if (signs.length) return ["Check the reward before you trust this run", "warn"];
  const verdicts = changes.map((change) => change.verdict),
    all = (verdict) => verdicts.length && verdicts.every((each) => each === verdict);
  if (all("better")) return ["Better", "good"];
  if (all("worse")) return ["Worse", "bad"];
  if (verdicts.includes("worse")) return ["Worse at one temperature", "bad"];
  if (verdicts.includes("better")) return ["Better at one temperature, can't tell at the other", "good"];
  if (verdicts.length) return ["Can't tell whether it is better", ""];
  if (run.status === "dry run") return ["Dry run: nothing was trained", ""];
  return [run.open ? "Not measured yet" : "Not measured before and after training", ""];
}

function changeLine(pair, changes) {
  const change = changes.find((each) => each.temperature === pair.temperature);
  const results = `${evaluationResult(pair.before)} → ${evaluationResult(pair.after)}`;
  const line = [h("b", {}, results), ` held out, ${temperatureName(pair.temperature)}`];
  return change ? [line, h("br"), changeText(change)] : line;
}

export function changeText(change) {
  const [scale, unit] = change.counts_successes ? [100, " points"] : [1, ""],
    at = (value) => signed(scale * value, 3);
  const p = change.p === null ? "" : `; McNemar's p ${change.p < 0.001 ? "< 0.001" : `= ${num(change.p, 2)}`}`,
    interval = change.low === null ? "" : ` (95 %: ${at(change.low)} to ${at(change.high)}${p})`,
    tasks = `${plural(change.tasks, "task")}: ${change.won} better, ${change.lost} worse`;
  const unscored = change.unscored ? `; ${change.unscored} more could not be scored` : "";
  return `${at(change.value)}${unit}${interval} on the same ${tasks}${unscored}`;
}

const capital = (text) => text[0].toUpperCase() + text.slice(1);

const question = (title, answer) => h("div", {}, h("h3", {}, title), answer);

function cost({ seconds, rollouts, calls, sampled_tokens, prompt_tokens, judge }) {
  if (!rollouts && !seconds) return h("p", { class: "soft" }, "No step yet.");
  const dollars = judge.cost === undefined ? "" : `, $${judge.cost.toFixed(2)}`;
  return [
    h("p", {}, `${duration(seconds)} of training`),
    h("p", { class: "soft" }, `${plural(rollouts, "rollout")}, ${plural(calls, "model call")}`),
    h("p", { class: "soft" }, `${plural(prompt_tokens, "prompt token")}, ${plural(sampled_tokens, "sampled token")}`),
    judge.requests ? h("p", {}, `Judge: ${plural(judge.requests, "request")}${dollars}`) : null,
  ];
}

const advice = ({ text, command }) =>
  h("div", { class: "advice" }, h("p", {}, text), command && h("code", {}, command));

const pending = (run) =>
  h("p", { class: "soft" }, run.open ? "Running. Nothing to do yet." : "Compare it with another run: art compare A B.");
