// A table of rollouts, filtered by their texts, results, agent, step, split, group or task.

import { get, runPath } from "../api.js";
import { emptyCard, field, fill, h, inUse, pager, select } from "../dom.js";
import { duration, num, plural, signed, splitsOf, stateOf, taskText, truncate } from "../format.js";

const LIMIT = 50,
  TYPING_PAUSE = 300; // milliseconds after a key press until the search starts
const OUTCOMES = [
  ["", "all"],
  ["success", "success"],
  ["failure", "no success"],
  ["error", "error"],
  ["unscored", "not scored"],
];
const ORDERS = [
  ["newest", "newest first"],
  ["oldest", "oldest first"],
  ["lowest", "lowest reward first"],
  ["highest", "highest reward first"],
  ["changed", "most changed first"],
];

export async function rollouts(context) {
  const parameter = (name, fallback = "") => context.parameters.get(name) ?? fallback;
  const filters = {
    search: parameter("search"),
    outcome: parameter("outcome"),
    at_least: parameter("at_least"),
    at_most: parameter("at_most"),
    agent: parameter("agent"),
    step: parameter("step"),
    split: parameter("split"),
    group: parameter("group"),
    task_id: parameter("task_id"),
    order: parameter("order", "newest"),
    offset: Number(parameter("offset", 0)),
  };
  const rows = h("tbody", { "data-list": true }),
    summary = h("p", { class: "soft" }),
    footer = h("div"),
    chips = h("div", { class: "row" });
  const splits = splitsOf(context.info);
  const change = async (changes) => {
    Object.assign(filters, changes);
    context.saveParameters({
      ...filters,
      offset: filters.offset || null,
      order: filters.order === "newest" ? null : filters.order,
    });
    await load();
  };
  let newest = 0;
  const load = async (inBackground = false) => {
    const request = ++newest;
    const page = await get(runPath(context.run, "/trajectories"), { ...filters, limit: LIMIT }, context.signal);
    if (request !== newest || (inBackground && inUse(rows))) return; // a later request has other filters
    fill(summary, plural(page.total, "trajectory", "trajectories"));
    fill(
      rows,
      page.items.length
        ? page.items.map((rollout) => row(rollout, context))
        : h(
            "tr",
            {},
            h(
              "td",
              { colspan: 10 },
              emptyCard(
                "No trajectories",
                "Remove a filter, or wait: a rollout is listed as soon as it starts, and found by a search once it has finished.",
              ),
            ),
          ),
    );
    fill(
      footer,
      pager(page, (offset) => change({ offset })),
    );
    fill(
      chips,
      ["group", "task_id"]
        .filter((name) => filters[name])
        .map((name) =>
          h(
            "span",
            { class: "chip accent" },
            `${name === "group" ? "group" : "task"} ${filters[name].slice(0, 8)}`,
            h(
              "button",
              {
                type: "button",
                "aria-label": `Remove the filter by ${name === "group" ? "group" : "task"}`,
                onclick: () => change({ [name]: "", offset: 0 }),
              },
              "✕",
            ),
          ),
        ),
    );
  };
  const number = (name, label, attributes) => {
    const input = h("input", {
      type: "number",
      value: filters[name],
      onchange: () => change({ [name]: input.value, offset: 0 }),
      ...attributes,
    });
    return field(label, input);
  };
  const choice = (name, label, options) =>
    field(
      label,
      select(options, filters[name], (value) => change({ [name]: value, offset: 0 })),
    );
  await load();
  const textColumns = ["Task", "State", "Split"].map((name) => h("th", { scope: "col" }, name));
  const numberColumns = ["Step", "Reward", "Success", "Advantage", "Calls", "Tokens", "Time"].map((name) =>
    h("th", { scope: "col", class: "num" }, name),
  );
  const agents = context.info.agents.map((agent) => [agent, agent]);
  const controls = h(
    "div",
    { class: "row" },
    chips,
    searchBox(filters.search, (search) => change({ search, offset: 0 }), context),
    choice("outcome", "Outcome", OUTCOMES),
    number("at_least", "Reward from", { step: "any", placeholder: "any" }),
    number("at_most", "to", { step: "any", placeholder: "any" }),
    agents.length > 1 && choice("agent", "Agent", [["", "all"], ...agents]),
    choice("split", "Split", splits),
    number("step", "Step", { min: 0, placeholder: "all" }),
    choice("order", "Order", ORDERS),
  );
  return {
    node: h(
      "section",
      {},
      h("div", { class: "head" }, h("div", {}, h("h1", {}, "Trajectories"), summary)),
      controls,
      h(
        "div",
        { class: "card groups scroll" },
        h("table", { class: "stack" }, h("thead", {}, h("tr", {}, textColumns, numberColumns)), rows),
        footer,
      ),
    ),
    update: (run) => {
      context.info = run;
      if (!filters.offset && filters.order === "newest") return load(true);
    },
  };
}

function searchBox(search, onSearch, context) {
  let timer = 0;
  context.onStop(() => clearTimeout(timer));
  const start = () => {
    clearTimeout(timer);
    timer = setTimeout(() => onSearch(input.value.trim()), TYPING_PAUSE);
  };
  const input = h("input", {
    type: "search",
    value: search,
    placeholder: "Search tasks, messages, errors",
    title: 'All words must occur; "quoted words" must follow each other',
    "aria-label": "Search",
    oninput: start,
  });
  return input;
}

function row(rollout, context) {
  const task = taskText(rollout.task),
    address = context.link(context.run, "rollout", rollout.rollout_id);
  const [name, kind] = stateOf(rollout.state, context.info);
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
      h("a", { href: address, class: "task", title: task, "data-item": true }, truncate(task, 200)),
      rollout.change !== null && h("p", { class: "small soft" }, `${signed(rollout.change)} since before training`),
      rollout.error && h("p", { class: "small soft" }, truncate(rollout.error, 120)),
    ),
    h("td", {}, h("span", { class: `chip ${kind}` }, name)),
    h("td", { "data-name": "Split" }, rollout.split ?? "–"),
    h("td", { class: "num", "data-name": "Step" }, rollout.step ?? "–"),
    h("td", { class: "num", "data-name": "Reward" }, num(rollout.reward)),
    h("td", { class: "num", "data-name": "Success" }, num(rollout.metrics.success)),
    h("td", { class: "num", "data-name": "Advantage" }, rollout.advantage === null ? "–" : signed(rollout.advantage)),
    h("td", { class: "num", "data-name": "Calls" }, rollout.calls),
    h("td", { class: "num", "data-name": "Tokens" }, num(rollout.sampled_tokens)),
    h("td", { class: "num", "data-name": "Time" }, rollout.state === "running" ? "…" : duration(rollout.seconds)),
  );
}
