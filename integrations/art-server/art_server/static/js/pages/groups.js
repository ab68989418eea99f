// Groups of rollouts with the spread of their rewards.

import { get, runPath } from "../api.js";
import { emptyCard, field, fill, h, inUse, pager, select } from "../dom.js";
import { num, plural, splitsOf, stateOf, taskText, truncate } from "../format.js";
import { extent, strip, stripLegend } from "../strip.js";

const LIMIT = 30;

export async function groups(context) {
  const filters = {
    step: context.parameters.get("step") ?? "",
    split: context.parameters.get("split") ?? "train",
    offset: Number(context.parameters.get("offset") ?? 0),
  };
  const list = h("div", { class: "card groups", "data-list": true }),
    summary = h("p", { class: "soft" });
  const splits = splitsOf(context.info);
  if (!splits.some(([value]) => value === filters.split)) filters.split = "";
  const step = h("input", {
    type: "number",
    min: 0,
    value: filters.step,
    placeholder: "all",
    onchange: () => change({ step: step.value, offset: 0 }),
  });
  const change = async (changes) => {
    Object.assign(filters, changes);
    step.value = filters.step;
    context.saveParameters({ ...filters, offset: filters.offset || null });
    await load();
  };
  const load = async (inBackground = false) => {
    const page = await get(runPath(context.run, "/groups"), { ...filters, limit: LIMIT }, context.signal);
    if (inBackground && inUse(list)) return;
    draw(page);
  };
  const draw = (page) => {
    const equal = page.items.filter((group) => group.spread === 0).length;
    const note = equal ? `; ${equal} of the ${page.items.length} shown have equal rewards and give no signal` : "";
    fill(summary, plural(page.total, "group") + note);
    if (!page.items.length)
      return void fill(
        list,
        emptyCard(
          "No groups",
          "A group is several rollouts of one task. Choose another step or split, or wait for the first step.",
        ),
      );
    const range = extent(page.items);
    fill(
      list,
      header(),
      page.items.map((group) => row(group, range, context)),
      pager(page, (offset) => change({ offset })),
    );
  };
  await load();
  const move = (offset) =>
    change({
      step: String(Math.max(0, Number(filters.step === "" ? (context.info.last_step ?? 0) : filters.step) + offset)),
      offset: 0,
    });
  const controls = h(
    "div",
    { class: "row" },
    field(
      "Split",
      select(splits, filters.split, (split) => change({ split, offset: 0 })),
    ),
    field("Step", step),
    h("button", { type: "button", "aria-label": "Previous step", onclick: () => move(-1) }, "←"),
    h("button", { type: "button", "aria-label": "Next step", onclick: () => move(1) }, "→"),
    h(
      "button",
      { type: "button", onclick: () => change({ step: String(context.info.last_step ?? 0), offset: 0 }) },
      "Latest",
    ),
    h("button", { type: "button", onclick: () => change({ step: "", offset: 0 }) }, "All"),
  );
  return {
    node: h(
      "section",
      {},
      h("div", { class: "head" }, h("div", {}, h("h1", {}, "Groups"), summary), controls),
      list,
      stripLegend(),
    ),
    update: (run) => {
      context.info = run;
      if (!filters.offset && filters.step === "") return load(true);
    },
  };
}

const header = () =>
  h(
    "div",
    { class: "group heads", "aria-hidden": "true" },
    ["Task", "Rewards", "Mean", "Spread", "Rollouts"].map((name) => h("span", {}, name)),
  );

function row(group, range, context) {
  const task = taskText(group.task);
  const details = [
    group.running && `${group.running} ${stateOf("running", context.info)[0]}`,
    group.failed && `${group.failed} failed`,
    group.lost && `${group.lost} lost`,
  ]
    .filter(Boolean)
    .join(", ");
  const address = context.link(context.run, "rollouts", "", { group: group.group });
  return h(
    "div",
    { class: "group pickable" },
    h(
      "div",
      { class: "about" },
      h("a", { href: address, "data-item": true, title: task }, truncate(task, 220)),
      h(
        "p",
        { class: "small soft" },
        [group.split, group.step !== null && `step ${group.step}`].filter(Boolean).join(" · "),
      ),
    ),
    h(
      "div",
      { class: "strip-cell" },
      strip(group, range, (id) => context.link(context.run, "rollout", id)),
    ),
    h("span", { class: "n", "data-name": "Mean" }, num(group.mean)),
    h("span", { class: "n", "data-name": "Spread" }, group.spread === null ? "–" : `±${num(group.spread)}`),
    h("span", { class: "n small soft" }, plural(group.size, "rollout"), details && h("br"), details),
  );
}
