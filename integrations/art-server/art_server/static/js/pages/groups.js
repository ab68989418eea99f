// Groups with their spread: what there is to learn from.

import { get, runPath } from "../api.js";
import { empty, field, fill, h, inUse, pager, select } from "../dom.js";
import { num, plural, short, splitsOf, stateOf, taskText } from "../format.js";
import { extent, strip, stripLegend } from "../strip.js";

const LIMIT = 30;

export async function groups(context) {
  const asked = {
    step: context.parameters.get("step") ?? "",
    split: context.parameters.get("split") ?? "train",
    offset: Number(context.parameters.get("offset") ?? 0),
  };
  const list = h("div", { class: "card groups", "data-list": true }),
    said = h("p", { class: "soft" });
  const splits = splitsOf(context.info);
  if (!splits.some(([value]) => value === asked.split)) asked.split = "";
  const step = h("input", {
    type: "number",
    min: 0,
    value: asked.step,
    placeholder: "all",
    onchange: () => change({ step: step.value, offset: 0 }),
  });
  const change = async (next) => {
    Object.assign(asked, next);
    step.value = asked.step;
    context.keep({ ...asked, offset: asked.offset || null });
    await load();
  };
  const load = async (quietly = false) => {
    const page = await get(runPath(context.run, "/groups"), { ...asked, limit: LIMIT }, context.signal);
    if (quietly && inUse(list)) return;
    draw(page);
  };
  const draw = (page) => {
    const flat = page.items.filter((it) => it.spread === 0).length;
    const dull = flat ? `; ${flat} of the ${page.items.length} shown with equal rewards and nothing to teach` : "";
    fill(said, plural(page.total, "group") + dull);
    if (!page.items.length)
      return void fill(
        list,
        empty(
          "No group here",
          "A group is several runs of the agent on one task. Choose another step or split, or wait for the first step.",
        ),
      );
    const range = extent(page.items);
    fill(
      list,
      heads(),
      page.items.map((it) => row(it, range, context)),
      pager(page, (offset) => change({ offset })),
    );
  };
  await load();
  const move = (by) =>
    change({
      step: String(Math.max(0, Number(asked.step === "" ? (context.info.last_step ?? 0) : asked.step) + by)),
      offset: 0,
    });
  const controls = h(
    "div",
    { class: "row" },
    field(
      "Split",
      select(splits, asked.split, (split) => change({ split, offset: 0 })),
    ),
    field("Step", step),
    h("button", { type: "button", "aria-label": "Step before", onclick: () => move(-1) }, "←"),
    h("button", { type: "button", "aria-label": "Step after", onclick: () => move(1) }, "→"),
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
      h("div", { class: "head" }, h("div", {}, h("h1", {}, "Groups"), said), controls),
      list,
      stripLegend(),
    ),
    update: (run) => {
      context.info = run;
      if (!asked.offset && asked.step === "") return load(true);
    },
  };
}

const heads = () =>
  h(
    "div",
    { class: "group heads", "aria-hidden": "true" },
    ["Task", "Rewards", "Mean", "Spread", "Runs"].map((it) => h("span", {}, it)),
  );

function row(group, range, context) {
  const text = taskText(group.task);
  const gone = [
    group.running && `${group.running} ${stateOf("running", context.info)[0]}`,
    group.failed && `${group.failed} failed`,
    group.lost && `${group.lost} lost`,
  ]
    .filter(Boolean)
    .join(", ");
  const all = context.link(context.run, "rollouts", "", { group: group.group });
  return h(
    "div",
    { class: "group pickable" },
    h(
      "div",
      { class: "about" },
      h("a", { href: all, "data-item": true, title: text }, short(text, 220)),
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
    h("span", { class: "n small soft" }, plural(group.size, "run"), gone && h("br"), gone),
  );
}
