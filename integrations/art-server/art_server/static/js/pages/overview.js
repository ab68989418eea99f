// The overview of a run: progress, results and the metrics of its steps, updated live.

import { stepsAfter } from "../api.js";
import { Chart, SHAPES } from "../chart.js";
import { Decision } from "../decision.js";
import { emptyCard, field, fill, h, select, tile } from "../dom.js";
import { duration, num, percent, percentTick, signed } from "../format.js";
import { statusChip, temperatureName } from "../outcome.js";
import { evaluation } from "./evaluation.js";

// Large charts, above the others.
const LARGE = {
  reward: { title: "Reward", caption: "Mean over the step's rollouts", hue: "--blue", height: 210 },
  success: {
    title: "Success",
    caption: "Share of the step's rollouts",
    hue: "--green",
    height: 210,
    format: percent,
    ticks: percentTick,
    floor: 0,
    ceiling: 1,
  },
  // Large only if calls alone are rewarded.
  call_reward: { title: "Call reward", caption: "Mean over calls with their own reward", hue: "--blue", height: 210 },
};
// Captions by metric; other metrics get charts without a caption.
const CAPTIONS = {
  call_reward: LARGE.call_reward.caption,
  loss: "Minimized by the optimizer",
  kl_ref: "KL from the start weights",
  kl_old: "KL from the sampling weights",
  entropy: "Of the policy, in nats",
  mismatch: "Engine vs. learner, on a fixed text",
  logprob_gap: "Engine vs. learner, on trained tokens",
  clip_fraction: "Share of clipped tokens",
  ratio: "Mean ratio of new to old probabilities",
  grad_norm: "Before clipping",
  learning_rate: "AdamW",
  groups_with_contrast: "Groups with unequal rewards",
  staleness: "Mean age of the sampling weights, in steps",
  seconds: "Duration of the step",
  sampled_tokens: "Tokens sampled by the policy",
  calls: "Model calls in the step",
  failed: "Rollouts that ended with an error",
  tokens_per_second: "Learner throughput",
  cache_hit_rate: "Share of prompt tokens cached",
  untrained: "Share of tokens not trained",
  forced: "Share of tokens forced by a grammar",
};
// Shown until the user chooses others.
const DEFAULT_METRICS = [
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
const METRICS_KEY = "art-metrics",
  SMOOTHING_KEY = "art-smoothing",
  TABLE_ROWS = 200;

class Overview {
  constructor(context, steps) {
    this.context = context;
    this.steps = steps;
    this.charts = new Map();
    this.selected = storedSet(METRICS_KEY);
    this.status = h("span");
    this.decision = new Decision(context);
    this.tiles = h("dl", { class: "tiles" });
    this.large = h("div", { class: "charts large" });
    this.small = h("div", { class: "charts" });
    this.checkboxes = h("div", { class: "checks" });
    this.table = h("div", { class: "metrics-table" });
    this.emptyBox = h("div");
    const smoothing = select(SMOOTHINGS, localStorage.getItem(SMOOTHING_KEY) ?? "auto", (value) => {
      localStorage.setItem(SMOOTHING_KEY, value);
      this.draw();
    });
    smoothing.prepend(h("option", { value: "auto", selected: !localStorage.getItem(SMOOTHING_KEY) }, "auto"));
    this.tableBox = h(
      "details",
      { class: "card", ontoggle: () => this.drawTable() },
      h("summary", {}, "Metrics as a table"),
      this.table,
    );
    this.metricsBox = h("details", {}, h("summary", {}, "Choose metrics"), this.checkboxes);
    this.healthBox = h("details", { class: "card health" }, this.decision.health, this.small, this.metricsBox);
    this.node = h(
      "section",
      { class: "overview" },
      h(
        "div",
        { class: "head" },
        h("div", { class: "row" }, h("h1", {}, context.run), this.status),
        field("Smoothing", smoothing),
      ),
      this.decision.node,
      this.tiles,
      this.emptyBox,
      this.large,
      this.healthBox,
      this.tableBox,
    );
    const redraw = () => this.charts.forEach((chart) => chart.draw());
    addEventListener("art-theme", redraw);
    context.onStop(() => {
      removeEventListener("art-theme", redraw);
      this.charts.forEach((chart) => chart.destroy());
    });
  }

  async update(run) {
    this.context.info = run;
    const last = this.steps.length ? this.steps[this.steps.length - 1].step : -1;
    if (run.last_step !== null && run.last_step < last) this.steps = []; // the run was resumed from an earlier checkpoint
    const newSteps =
      run.last_step === last ? [] : await stepsAfter(run.name, this.steps.length ? last : -1, this.context.signal);
    this.steps.push(...newSteps);
    if (newSteps.length || run.evaluations.length !== this.evaluationCount) this.draw();
    else this.drawTiles();
    await this.decision.update(run);
  }

  // RULER compares the rollouts of a group, so its mean stays about the same however good they are.
  isRelative() {
    return /^ruler/i.test(this.context.info.reward ?? "");
  }

  // Whether only calls have rewards: those of the rollouts are all 0.
  isOfCalls() {
    return this.values("call_reward").some((value) => value !== null) && !this.values("reward").some(Boolean);
  }

  isLarge(name, names, marked) {
    if (name === "reward" && this.isRelative()) return false;
    if (name === marked) return true;
    return names.includes(name) && (name === "success" || (name === "call_reward") === this.isOfCalls());
  }

  names() {
    const names = new Set();
    for (const step of this.steps) for (const name of Object.keys(step.metrics)) names.add(name);
    return [...names].sort();
  }

  values(name) {
    return this.steps.map((step) => step.metrics[name] ?? null);
  }

  smoothing() {
    const setting = localStorage.getItem(SMOOTHING_KEY);
    if (setting && setting !== "auto") return Number(setting);
    return this.steps.length > 300 ? 20 : this.steps.length > 30 ? 5 : 0;
  }

  draw() {
    const names = this.names(),
      stepNumbers = this.steps.map((each) => each.step);
    this.evaluationCount = this.context.info.evaluations.length;
    this.drawTiles();
    fill(this.emptyBox, this.steps.length ? null : this.emptyState());
    this.healthBox.hidden = this.tableBox.hidden = !this.steps.length;
    const selected = this.selected ?? new Set(DEFAULT_METRICS);
    const run = this.context.info;
    const marks = run.evaluations.filter((result) => result && typeof result.success === "number");
    // The chart that shows the evaluations.
    const marked = marks.length && (marks.every((mark) => mark.counts_successes) ? "success" : "reward");
    const large = Object.keys(LARGE).filter((name) => this.isLarge(name, names, marked));
    const choosable = names.filter((name) => !["reward", "success", ...large].includes(name));
    const wanted = [...large, ...inOrder(choosable).filter((name) => selected.has(name))];
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
        chart = new Chart(large.includes(name) ? LARGE[name] : { title: name, caption: CAPTIONS[name] ?? "" });
        this.charts.set(name, chart);
      }
      (large.includes(name) ? this.large : this.small).append(chart.node);
      if (name === marked) chart.setCaption(heldOutLegend(run.pairs, LARGE[name].caption));
      chart.set(
        stepNumbers,
        this.values(name),
        this.smoothing(),
        name === marked ? marks.map((mark) => point(mark, run.pairs)) : [],
      );
    }
    this.drawCheckboxes(choosable, selected);
    this.drawTable();
  }

  drawTiles() {
    const run = this.context.info,
      ofCalls = this.isOfCalls(),
      rewards = this.values(ofCalls ? "call_reward" : "reward").filter((value) => value !== null);
    const planned = run.planned_steps,
      done = run.last_step ?? 0,
      progress = run.progress;
    const expected = progress?.expected ? ` of ${Math.max(progress.expected, progress.begun)}` : "";
    const current = progress && `step ${progress.step}: ${progress.finished}${expected} rollouts finished`;
    const recent = mean(rewards.slice(-4)),
      first = mean(rewards.slice(0, 4));
    fill(this.status, statusChip(run));
    const totalSeconds = this.steps.reduce((sum, step) => sum + (step.metrics.seconds ?? 0), 0);
    const last = this.steps.length ? this.steps[this.steps.length - 1].metrics : {};
    fill(
      this.tiles,
      tile(
        "Steps",
        [num(done), planned ? h("small", {}, ` of ${planned}`) : null],
        current || (planned && done >= planned ? "finished" : `loss ${run.loss ?? "–"}`),
        planned ? done / planned : null,
      ),
      this.isRelative()
        ? null
        : tile(
            ofCalls ? "Call reward" : "Reward",
            num(recent),
            rewards.length > 4
              ? `last 4 steps; first 4: ${num(first)} (${signed(recent - first)})`
              : "mean of the last steps",
          ),
      tile(
        "Groups with contrast",
        [
          num(last.groups_with_contrast ?? null),
          last.groups_sampled ? h("small", {}, ` of ${num(last.groups_sampled)}`) : null,
        ],
        this.steps.length
          ? `in the last step; ${duration(last.seconds)} per step, ${duration(totalSeconds)} in total`
          : "groups with unequal rewards",
      ),
    );
  }

  emptyState() {
    const run = this.context.info;
    const trajectoriesLink = h("a", { href: this.context.link(run.name, "rollouts") }, "See the trajectories");
    if (run.status === "dry run")
      return emptyCard(
        "Dry run",
        "One group of rollouts was collected and scored. A dry run makes no optimizer step.",
        trajectoriesLink,
      );
    if (run.splits.length && !run.open)
      return emptyCard(
        "No steps",
        "Rollouts were collected, but no optimizer step was made, and the run is no longer open.",
        trajectoriesLink,
      );
    if (run.splits.length)
      return emptyCard(
        "No steps yet",
        "The first rollouts are being collected. Charts appear after the first optimizer step.",
        trajectoriesLink,
      );
    return emptyCard(
      "This run is empty",
      "Trajectories appear when the first rollout starts, and charts after the first optimizer step.",
    );
  }

  drawCheckboxes(names, selected) {
    if (this.checkboxes.contains(document.activeElement)) return;
    fill(
      this.checkboxes,
      names.length
        ? names.map((name) =>
            h(
              "label",
              {},
              h("input", {
                type: "checkbox",
                checked: selected.has(name),
                onchange: (event) => this.toggleMetric(name, event.target.checked),
              }),
              name,
            ),
          )
        : h("p", { class: "soft" }, "Metrics appear after the first step."),
    );
  }

  toggleMetric(name, isSelected) {
    this.selected = new Set(this.selected ?? DEFAULT_METRICS);
    this.selected[isSelected ? "add" : "delete"](name);
    localStorage.setItem(METRICS_KEY, JSON.stringify([...this.selected]));
    this.draw();
  }

  drawTable() {
    if (!this.tableBox.open) return;
    const names = [...this.charts.keys()],
      rows = this.steps.slice(-TABLE_ROWS).reverse();
    fill(
      this.table,
      this.steps.length > TABLE_ROWS
        ? h(
            "p",
            { class: "soft small" },
            `The last ${TABLE_ROWS} steps. For all steps, see `,
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
            names.map((name) => h("th", { class: "num", scope: "col" }, name)),
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

const point = (result, pairs) => ({
  x: result.step,
  y: result.success,
  low: result.interval?.[0] ?? null,
  high: result.interval?.[1] ?? null,
  shape: pairs.findIndex((pair) => pair.temperature === result.temperature),
});
const heldOutLegend = (pairs, caption) => {
  const names = pairs.map((pair, index) => `${SHAPES[index % SHAPES.length]} ${temperatureName(pair.temperature)}`);
  return pairs.length > 1 ? `Held-out tasks: ${names.join(", ")}` : `${caption}; held-out tasks: ${names}`;
};
const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);

const inOrder = (names) => [
  ...DEFAULT_METRICS.filter((name) => names.includes(name)),
  ...names.filter((name) => !DEFAULT_METRICS.includes(name)),
];

function storedSet(key) {
  try {
    const items = JSON.parse(localStorage.getItem(key));
    return Array.isArray(items) ? new Set(items) : null;
  } catch {
    return null;
  }
}

export async function overview(context) {
  if (context.info.kind === "evaluation") return evaluation(context);
  const page = new Overview(context, await stepsAfter(context.run, -1, context.signal));
  page.decision.update(context.info);
  return { node: page.node, update: (run) => page.update(run), ready: () => page.draw() };
}
