// Curves over steps, by uPlot. Knows nothing about where the numbers come from.

import uPlot from "../vendor/uPlot.esm.js";
import { h } from "./dom.js";
import { num, tick } from "./format.js";

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const SHAPES = ["●", "○", "■"];
const sync = uPlot.sync("steps");

// One card: title, newest value, curve; marks are {x, y, low, high, shape}, drawn as points with their intervals.
export class Chart {
  constructor({
    title,
    about = "",
    height = 150,
    format = num,
    ticks = tick,
    hue = "--blue",
    floor = null,
    ceiling = null,
  }) {
    Object.assign(this, { height, format, ticks, hue, floor, ceiling });
    this.value = h("span", { class: "value" });
    this.plot = h("div", { class: "plot" });
    this.about = h("p", { class: "about", title: about }, about);
    this.node = h(
      "figure",
      { class: "card chart", "aria-label": title },
      h("figcaption", {}, h("span", { class: "title" }, title), this.value),
      this.about,
      this.plot,
    );
    this.resizing = new ResizeObserver(() => this.#resize());
    this.resizing.observe(this.plot);
    this.data = null;
  }

  set(steps, values, smooth, marks = []) {
    this.marks = marks;
    const last = lastKnown(values);
    this.resting = last === null ? "–" : this.format(last);
    this.value.textContent = this.resting;
    this.data = smooth > 1 ? [steps, values, rolling(values, smooth)] : [steps, values];
    const kind = `${this.data.length}`;
    if (this.chart && this.kind === kind) this.chart.setData(this.data);
    else this.draw();
    this.kind = kind;
  }

  tell(about) {
    this.about.textContent = this.about.title = about;
  }

  draw() {
    if (!this.data || !this.plot.clientWidth) return;
    this.chart?.destroy();
    this.chart = new uPlot(this.#options(this.plot.clientWidth), this.data, this.plot);
    this.chart.root.setAttribute("aria-hidden", "true");
  }

  destroy() {
    this.resizing.disconnect();
    this.chart?.destroy();
    this.chart = null;
  }

  #resize() {
    const width = this.plot.clientWidth;
    if (!width || !this.data) return;
    if (!this.chart) this.draw();
    else if (this.chart.width !== width) this.chart.setSize({ width, height: this.height });
  }

  #options(width) {
    const hue = colour(this.hue),
      grid = { stroke: colour("--grid"), width: 1 };
    const smooth = this.data.length > 2;
    const points = { show: (chart) => chart.data[0].length < 2, size: 6, fill: hue, stroke: hue };
    const axis = { stroke: colour("--faint"), grid, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const series = [{}, { stroke: hue, width: smooth ? 1 : 2, alpha: smooth ? 0.35 : 1, points, spanGaps: true }];
    if (smooth) series.push({ stroke: hue, width: 2, points, spanGaps: true });
    return {
      width,
      height: this.height,
      series,
      legend: { show: false },
      padding: [8, 16, 0, 0],
      scales: {
        x: { time: false, range: (chart, low, high) => this.#across(low, high) },
        y: { range: (chart, low, high) => this.#range(low, high) },
      },
      axes: [
        {
          ...axis,
          size: 24,
          gap: 4,
          space: 50,
          incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000],
          values: (chart, at) => at.map(tick),
        },
        {
          ...axis,
          size: (chart, shown) => 14 + 6.5 * Math.max(2, ...(shown ?? []).map((it) => it.length)),
          gap: 4,
          space: 34,
          values: (chart, at) => at.map(this.ticks),
        },
      ],
      cursor: {
        sync: { key: sync.key, setSeries: false },
        y: false,
        points: { size: 7 },
        drag: { x: true, y: false },
      },
      hooks: { setCursor: [(chart) => this.#tell(chart)], draw: [(chart) => this.#mark(chart)] },
    };
  }

  #across(low, high) {
    const at = this.marks.map((it) => it.x);
    const least = Math.min(low ?? Infinity, ...at),
      most = Math.max(high ?? -Infinity, ...at);
    if (!Number.isFinite(least)) return [0, 1];
    return least === most ? [least - 1, most + 1] : [least, most];
  }

  #range(low, high) {
    for (const mark of this.marks) {
      low = Math.min(low ?? Infinity, mark.low ?? mark.y);
      high = Math.max(high ?? -Infinity, mark.high ?? mark.y);
    }
    if (low === null || low === undefined || !Number.isFinite(low)) return [0, 1];
    const flat = high - low <= Math.abs(high) * 1e-6; // but for rounding
    const room = (flat ? Math.abs(high) * 0.1 : (high - low) * 0.06) || 1;
    const least = this.floor !== null && low >= this.floor ? Math.max(this.floor, low - room) : low - room;
    const most = this.ceiling !== null && high <= this.ceiling ? Math.min(this.ceiling, high + room) : high + room;
    return [least, most];
  }

  // The value under the cursor, in every chart at once.
  #tell(chart) {
    const at = chart.cursor.idx;
    if (at === null || at === undefined) {
      this.value.textContent = this.resting;
      return;
    }
    const value = this.data[1][at];
    this.value.textContent = `step ${this.data[0][at]}: ${value === null ? "–" : this.format(value)}`;
  }

  #mark(chart) {
    if (!this.marks.length) return;
    const pen = chart.ctx,
      size = window.devicePixelRatio || 1;
    pen.save();
    pen.strokeStyle = pen.fillStyle = colour("--orange");
    pen.lineWidth = 1.5 * size;
    for (const { x, y, low, high, shape } of this.marks) {
      const across = chart.valToPos(x, "x", true),
        up = (value) => chart.valToPos(value, "y", true);
      if (low !== null && low !== undefined) {
        pen.beginPath();
        pen.moveTo(across, up(low));
        pen.lineTo(across, up(high));
        pen.stroke();
      }
      pen.beginPath();
      if (SHAPES[shape % SHAPES.length] === "■") pen.rect(across - 4 * size, up(y) - 4 * size, 8 * size, 8 * size);
      else pen.arc(across, up(y), 4 * size, 0, 2 * Math.PI);
      pen.fillStyle = colour(SHAPES[shape % SHAPES.length] === "○" ? "--card" : "--orange");
      pen.fill();
      pen.stroke();
    }
    pen.restore();
  }
}

export const lastKnown = (values) => {
  for (let at = values.length - 1; at >= 0; at -= 1) if (values[at] !== null) return values[at];
  return null;
};

// The mean of the last `count` known values; null where none is known.
export function rolling(values, count) {
  let sum = 0;
  const held = [];
  return values.map((value) => {
    if (value !== null) {
      held.push(value);
      sum += value;
      if (held.length > count) sum -= held.shift();
    }
    return held.length ? sum / held.length : null;
  });
}
