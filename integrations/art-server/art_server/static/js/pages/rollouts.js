// A table of runs of the agent, by step, split, group or task.

import { get, runPath } from "../api.js";
import { empty, field, fill, h, inUse, pager, select } from "../dom.js";
import { duration, num, plural, short, signed, splitsOf, stateOf, taskText } from "../format.js";

const LIMIT = 50;

export async function rollouts(context) {
  const from = (name, otherwise = "") => context.parameters.get(name) ?? otherwise;
  const asked = {
    step: from("step"),
    split: from("split"),
    group: from("group"),
    task_id: from("task_id"),
    order: from("order", "newest"),
    offset: Number(from("offset", 0)),
  };
  const rows = h("tbody", { "data-list": true }),
    said = h("p", { class: "soft" }),
    foot = h("div"),
    chips = h("div", { class: "row" });
  const splits = splitsOf(context.info);
  const change = async (next) => {
    Object.assign(asked, next);
    context.keep({ ...asked, offset: asked.offset || null, order: asked.order === "newest" ? null : asked.order });
    await load();
  };
  const load = async (quietly = false) => {
    const page = await get(runPath(context.run, "/trajectories"), { ...asked, limit: LIMIT }, context.signal);
    if (quietly && inUse(rows)) return;
    fill(said, plural(page.total, "trajectory", "trajectories"));
    fill(
      rows,
      page.items.length
        ? page.items.map((it) => row(it, context))
        : h(
            "tr",
            {},
            h(
              "td",
              { colspan: 10 },
              empty(
                "No trajectory here",
                "Take a filter away, or wait: a run of the agent is listed as soon as it begins.",
              ),
            ),
          ),
    );
    fill(
      foot,
      pager(page, (offset) => change({ offset })),
    );
    fill(
      chips,
      ["group", "task_id"]
        .filter((it) => asked[it])
        .map((name) =>
          h(
            "span",
            { class: "chip accent" },
            `${name === "group" ? "group" : "task"} ${asked[name].slice(0, 8)}`,
            h(
              "button",
              {
                type: "button",
                "aria-label": `Show all, not only this ${name === "group" ? "group" : "task"}`,
                onclick: () => change({ [name]: "", offset: 0 }),
              },
              "✕",
            ),
          ),
        ),
    );
  };
  const step = h("input", {
    type: "number",
    min: 0,
    value: asked.step,
    placeholder: "all",
    onchange: () => change({ step: step.value, offset: 0 }),
  });
  await load();
  const heads = ["Task", "State", "Split"].map((it) => h("th", { scope: "col" }, it));
  const numbers = ["Step", "Reward", "Success", "Advantage", "Calls", "Tokens", "Time"].map((it) =>
    h("th", { scope: "col", class: "num" }, it),
  );
  const controls = h(
    "div",
    { class: "row" },
    chips,
    field(
      "Split",
      select(splits, asked.split, (split) => change({ split, offset: 0 })),
    ),
    field("Step", step),
    field(
      "Order",
      select(
        [
          ["newest", "newest first"],
          ["oldest", "oldest first"],
        ],
        asked.order,
        (order) => change({ order, offset: 0 }),
      ),
    ),
  );
  return {
    node: h(
      "section",
      {},
      h("div", { class: "head" }, h("div", {}, h("h1", {}, "Trajectories"), said), controls),
      h(
        "div",
        { class: "card groups scroll" },
        h("table", { class: "stack" }, h("thead", {}, h("tr", {}, heads, numbers)), rows),
        foot,
      ),
    ),
    update: (run) => {
      context.info = run;
      if (!asked.offset && asked.order === "newest") return load(true);
    },
  };
}

function row(it, context) {
  const text = taskText(it.task),
    address = context.link(context.run, "rollout", it.rollout_id);
  const [name, kind] = stateOf(it.state, context.info);
  return h(
    "tr",
    {
      class: "pick",
      onclick: (event) => {
        if (!event.target.closest("a")) location.hash = address;
      },
    },
    h(
      "td",
      { class: "wide" },
      h("a", { href: address, class: "task", title: text, "data-item": true }, short(text, 200)),
      it.error && h("p", { class: "small soft" }, short(it.error, 120)),
    ),
    h("td", {}, h("span", { class: `chip ${kind}` }, name)),
    h("td", { "data-name": "Split" }, it.split ?? "–"),
    h("td", { class: "num", "data-name": "Step" }, it.step ?? "–"),
    h("td", { class: "num", "data-name": "Reward" }, num(it.reward)),
    h("td", { class: "num", "data-name": "Success" }, num(it.metrics.success)),
    h("td", { class: "num", "data-name": "Advantage" }, it.advantage === null ? "–" : signed(it.advantage)),
    h("td", { class: "num", "data-name": "Calls" }, it.calls),
    h("td", { class: "num", "data-name": "Tokens" }, num(it.sampled_tokens)),
    h("td", { class: "num", "data-name": "Time" }, it.state === "running" ? "…" : duration(it.seconds)),
  );
}
