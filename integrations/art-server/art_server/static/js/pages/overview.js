// The run at a glance: how far it is, what it gained, and every metric of its steps, live.

import { stepsAfter } from "../api.js";
import { Chart, SHAPES } from "../chart.js";
import { empty, field, fill, h, select, tile } from "../dom.js";
import { duration, num, percent, percentTick, plural, signed } from "../format.js";
import { measured, reason, statusChip, temperatureName } from "../outcome.js";
import { evaluation } from "./evaluation.js";

// Charts of their own, above the others.
const LARGE = {
  reward: { title: "Reward", about: "Mean over a step's trajectories", hue: "--blue", height: 210 },
  success: {
    title: "Success",
    about: "Share of a step's trajectories",
    hue: "--green",
    height: 210,
    format: percent,
    ticks: percentTick,
    floor: 0,
    ceiling: 1,
  },
};
// A line below the metric's name; a metric without one is drawn too.
const CAPTIONS = {
  call_reward: "Mean over the calls that have one of their own",
  loss: "What the optimizer minimised",
  kl_ref: "From the start weights",
  kl_old: "From the weights that sampled",
  entropy: "How undecided the policy is, in nats",
  mismatch: "Engine and learner, on a fixed text",
  logprob_gap: "Engine and learner, on trained tokens",
  clip_fraction: "Share of tokens at the clip",
  ratio: "New probability by old",
  grad_norm: "Before clipping",
  learning_rate: "AdamW's",
  groups_with_contrast: "Groups that teach something",
  staleness: "Optimizer steps behind, mean",
  seconds: "Of the whole step",
  sampled_tokens: "Tokens that the policy wrote",
  calls: "Model calls of a step",
  failed: "Trajectories that ended in an error",
  tokens_per_second: "Of the learner",
  cache_hit_rate: "Prompt tokens computed before",
  untrained: "Share of the tokens left out",
  forced: "Share of the tokens that a grammar forced",
};
// Until the reader chooses others.
const SHOWN_AT_FIRST = [
  "call_reward",
  "loss",
  "kl_ref",
  "kl_old",
  "entropy",
  "mismatch",
  "logprob_gap",
  "grad_norm",
  "groups_with_contrast",
  "seconds",
];
const SMOOTHINGS = [
  ["0", "off"],
  ["5", "5 steps"],
  ["20", "20 steps"],
  ["50", "50 steps"],
];
const CHOICE = "art-metrics",
  SMOOTHING = "art-smoothing",
  ROWS = 200;

class Overview {
  constructor(context, steps) {
    this.context = context;
    this.steps = steps;
    this.charts = new Map();
    this.chosen = remembered(CHOICE);
    this.status = h("span");
    this.why = h("div");
    this.tiles = h("dl", { class: "tiles" });
    this.large = h("div", { class: "charts large" });
    this.small = h("div", { class: "charts" });
    this.list = h("div", { class: "checks" });
    this.table = h("div", { class: "metrics-table" });
    this.nothing = h("div");
    const smoothing = select(SMOOTHINGS, localStorage.getItem(SMOOTHING) ?? "auto", (value) => {
      localStorage.setItem(SMOOTHING, value);
      this.draw();
    });
    smoothing.prepend(h("option", { value: "auto", selected: !localStorage.getItem(SMOOTHING) }, "auto"));
    this.tableBox = h(
      "details",
      { class: "card", ontoggle: () => this.drawTable() },
      h("summary", {}, "The numbers as a table"),
      this.table,
    );
    this.choiceBox = h("details", { class: "card" }, h("summary", {}, "Choose metrics"), this.list);
    this.node = h(
      "section",
      { class: "overview" },
      h("div", { class: "head" }, h("div", { class: "row" }, h("h1", {}, context.run), this.status), field("Smoothing", smoothing)),
      this.why,
      this.tiles,
      this.nothing,
      this.large,
      this.small,
      this.choiceBox,
      this.tableBox,
    );
    const redraw = () => this.charts.forEach((it) => it.draw());
    addEventListener("art-theme", redraw);
    context.onStop(() => {
      removeEventListener("art-theme", redraw);
      this.charts.forEach((it) => it.destroy());
    });
  }

  async update(run) {
    this.context.info = run;
    const last = this.steps.length ? this.steps[this.steps.length - 1].step : -1;
    if (run.last_step !== null && run.last_step < last) this.steps = []; // gone on from an earlier checkpoint
    const fresh =
      run.last_step === last ? [] : await stepsAfter(run.name, this.steps.length ? last : -1, this.context.signal);
    this.steps.push(...fresh);
    if (fresh.length || run.evaluations.length !== this.evaluated) this.draw();
    else this.drawTiles();
  }

  names() {
    const found = new Set();
    for (const it of this.steps) for (const name of Object.keys(it.metrics)) found.add(name);
    return [...found].sort();
  }

  values(name) {
    return this.steps.map((it) => it.metrics[name] ?? null);
  }

  smooth() {
    const asked = localStorage.getItem(SMOOTHING);
    if (asked && asked !== "auto") return Number(asked);
    return this.steps.length > 300 ? 20 : this.steps.length > 30 ? 5 : 0;
  }

  draw() {
    const names = this.names(),
      across = this.steps.map((it) => it.step);
    this.evaluated = this.context.info.evaluations.length;
    this.drawTiles();
    fill(this.nothing, this.steps.length ? null : this.waiting());
    this.choiceBox.hidden = this.tableBox.hidden = !this.steps.length;
    const shown = this.chosen ?? new Set(SHOWN_AT_FIRST);
    const run = this.context.info;
    const marks = run.evaluations.filter((it) => it && typeof it.success === "number");
    const wanted = [
      ...Object.keys(LARGE).filter((it) => names.includes(it) || (it === "success" && marks.length)),
      ...order(names).filter((it) => shown.has(it) && !(it in LARGE)),
    ];
    for (const [name, chart] of this.charts) {
      if (!wanted.includes(name)) {
        chart.destroy();
        chart.node.remove();
        this.charts.delete(name);
      }
    }
    for (const name of wanted) {
      let chart = this.charts.get(name);
      if (!chart) {
        chart = new Chart(LARGE[name] ?? { title: name, about: CAPTIONS[name] ?? "" });
        this.charts.set(name, chart);
      }
      (name in LARGE ? this.large : this.small).append(chart.node);
      const counts = name === "success" && marks.every((it) => it.counts_successes);
      if (name === "success" && counts) chart.tell(heldOutLegend(run.pairs));
      chart.set(across, this.values(name), this.smooth(), counts ? marks.map((it) => point(it, run.pairs)) : []);
    }
    this.drawChoice(
      names.filter((it) => !(it in LARGE)),
      shown,
    );
    this.drawTable();
  }

  drawTiles() {
    const run = this.context.info,
      ofCalls = this.values("call_reward").some((it) => it !== null) && !this.values("reward").some(Boolean),
      rewards = this.values(ofCalls ? "call_reward" : "reward").filter((it) => it !== null);
    const planned = run.planned_steps,
      done = run.last_step ?? 0,
      progress = run.progress;
    const expected = progress?.expected ? ` of ${Math.max(progress.expected, progress.begun)}` : "";
    const under = progress && `step ${progress.step}: ${progress.finished}${expected} runs done`;
    const recent = mean(rewards.slice(-4)),
      first = mean(rewards.slice(0, 4));
    fill(this.status, statusChip(run));
    fill(this.why, reason(run));
    this.why.hidden = !run.reason;
    const spent = this.steps.reduce((sum, it) => sum + (it.metrics.seconds ?? 0), 0);
    const last = this.steps.length ? this.steps[this.steps.length - 1].metrics : {};
    fill(
      this.tiles,
      tile(
        "Steps",
        [num(done), planned ? h("small", {}, ` of ${planned}`) : null],
        under || (planned && done >= planned ? "all done" : `loss ${run.loss ?? "–"}`),
        planned ? done / planned : null,
      ),
      tile(
        ofCalls ? "Reward of calls" : "Reward",
        num(recent),
        rewards.length > 4
          ? `last 4 steps; first 4: ${num(first)} (${signed(recent - first)})`
          : "mean of the last steps",
      ),
      run.pairs.length ? run.pairs.map(heldOut) : tile("Held-out success", "–", "held-out tasks: none measured"),
      tile(
        "Groups with contrast",
        [
          num(last.groups_with_contrast ?? null),
          last.groups_sampled ? h("small", {}, ` of ${num(last.groups_sampled)}`) : null,
        ],
        this.steps.length
          ? `of the last step; ${duration(last.seconds)} a step, ${duration(spent)} in all`
          : "what there is to learn from",
      ),
    );
  }

  waiting() {
    const run = this.context.info;
    const seen = h("a", { href: this.context.link(run.name, "rollouts") }, "See the trajectories");
    if (run.status === "dry run")
      return empty("A dry run", "One group of trajectories was made and scored; a dry run takes no step.", seen);
    if (run.splits.length && !run.open)
      return empty("No step here", "The agent was run, and no optimizer step was taken; nobody has this run open.", seen);
    if (run.splits.length)
      return empty(
        "No step yet",
        "Trajectories are being made; the curves begin with the first optimizer step.",
        seen,
      );
    return empty(
      "Nothing in this run yet",
      "As soon as the agent is run, its trajectories are here, and a point on every curve for each optimizer step.",
    );
  }

  drawChoice(names, shown) {
    if (this.list.contains(document.activeElement)) return;
    fill(
      this.list,
      names.length
        ? names.map((name) =>
            h(
              "label",
              {},
              h("input", {
                type: "checkbox",
                checked: shown.has(name),
                onchange: (event) => this.choose(name, event.target.checked),
              }),
              name,
            ),
          )
        : h("p", { class: "soft" }, "Metrics come with the first step."),
    );
  }

  choose(name, on) {
    this.chosen = new Set(this.chosen ?? SHOWN_AT_FIRST);
    this.chosen[on ? "add" : "delete"](name);
    localStorage.setItem(CHOICE, JSON.stringify([...this.chosen]));
    this.draw();
  }

  drawTable() {
    if (!this.tableBox.open) return;
    const names = [...this.charts.keys()],
      rows = this.steps.slice(-ROWS).reverse();
    fill(
      this.table,
      this.steps.length > ROWS
        ? h(
            "p",
            { class: "soft small" },
            `The last ${ROWS} steps; all are at `,
            h("a", { href: `api/runs/${encodeURIComponent(this.context.run)}/metrics` }, "api/…/metrics"),
          )
        : null,
      h(
        "table",
        {},
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            h("th", { class: "num", scope: "col" }, "step"),
            names.map((it) => h("th", { class: "num", scope: "col" }, it)),
          ),
        ),
        h(
          "tbody",
          {},
          rows.map((row) =>
            h(
              "tr",
              {},
              h("th", { class: "num", scope: "row" }, row.step),
              names.map((name) => h("td", { class: "num" }, num(row.metrics[name] ?? null))),
            ),
          ),
        ),
      ),
    );
  }
}

const point = (it, pairs) => ({
  x: it.step,
  y: it.success,
  low: it.interval?.[0] ?? null,
  high: it.interval?.[1] ?? null,
  shape: pairs.findIndex((pair) => pair.temperature === it.temperature),
});
const heldOutLegend = (pairs) => {
  const names = pairs.map((it, index) => `${SHAPES[index % SHAPES.length]} ${temperatureName(it.temperature)}`);
  return pairs.length > 1 ? `${names.join(", ")}: held-out tasks` : `${LARGE.success.about}; held-out tasks: ${names}`;
};
const mean = (values) => (values.length ? values.reduce((sum, it) => sum + it, 0) / values.length : null);

// Before and after at one temperature: numbers of different ones are not compared.
function heldOut({ temperature, before, after }) {
  const now = after ?? before,
    since = after && before ? `; before: ${measured(before)}` : "";
  return tile(
    now.counts_successes === false ? "Held-out reward" : "Held-out success",
    measured(now),
    `${temperatureName(temperature)}${since}; ${plural(now.n, "task")}, ${after ? `step ${now.step}` : "before training"}`,
  );
}

const order = (names) => [...SHOWN_AT_FIRST.filter((it) => names.includes(it)), ...names.filter((it) => !SHOWN_AT_FIRST.includes(it))];

function remembered(key) {
  try {
    const found = JSON.parse(localStorage.getItem(key));
    return Array.isArray(found) ? new Set(found) : null;
  } catch {
    return null;
  }
}

export async function overview(context) {
  if (context.info.kind === "evaluation") return evaluation(context);
  const page = new Overview(context, await stepsAfter(context.run, -1, context.signal));
  return { node: page.node, update: (run) => page.update(run), ready: () => page.draw() };
}
