// Line charts over steps, drawn by uPlot.

import uPlot from "../vendor/uPlot.esm.js";
import { h } from "./dom.js";
import { num, tick } from "./format.js";

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const SHAPES = ["●", "○", "■"];
const sync = uPlot.sync("steps");

// A card with a title, the latest value and a curve. Marks, {x, y, low, high, shape}, are drawn as points with intervals.
export class Chart {
  constructor({
    title,
    caption = "",
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
    this.caption = h("p", { class: "caption", title: caption }, caption);
    this.node = h(
      "figure",
      { class: "card chart", "aria-label": title },
      h("figcaption", {}, h("span", { class: "title" }, title), this.value),
      this.caption,
      this.plot,
    );
    this.resizeObserver = new ResizeObserver(() => this.#resize());
    this.resizeObserver.observe(this.plot);
    this.data = null;
  }

  set(steps, values, smooth, marks = []) {
    this.marks = marks;
    const last = lastValue(values);
    this.latest = last === null ? "–" : this.format(last);
    this.value.textContent = this.latest;
    this.data = smooth > 1 ? [steps, values, rolling(values, smooth)] : [steps, values];
    const seriesCount = `${this.data.length}`;
    if (this.chart && this.seriesCount === seriesCount) this.chart.setData(this.data);
    else this.draw();
    this.seriesCount = seriesCount;
  }

  setCaption(caption) {
    this.caption.textContent = this.caption.title = caption;
  }

  draw() {
    if (!this.data || !this.plot.clientWidth) return;
    this.chart?.destroy();
    this.chart = new uPlot(this.#options(this.plot.clientWidth), this.data, this.plot);
    this.chart.root.setAttribute("aria-hidden", "true");
  }

  destroy() {
    this.resizeObserver.disconnect();
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
        x: { time: false, range: (chart, low, high) => this.#xRange(low, high) },
        y: { range: (chart, low, high) => this.#yRange(low, high) },
      },
      axes: [
        {
          ...axis,
          size: 24,
          gap: 4,
          space: 50,
          incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000],
          values: (chart, splits) => splits.map(tick),
        },
        {
          ...axis,
          size: (chart, labels) => 14 + 6.5 * Math.max(2, ...(labels ?? []).map((label) => label.length)),
          gap: 4,
          space: 34,
          values: (chart, splits) => splits.map(this.ticks),
        },
      ],
      cursor: {
        sync: { key: sync.key, setSeries: false },
        y: false,
        points: { size: 7 },
        drag: { x: true, y: false },
      },
      hooks: { setCursor: [(chart) => this.#showCursorValue(chart)], draw: [(chart) => this.#drawMarks(chart)] },
    };
  }

  #xRange(low, high) {
    const xs = this.marks.map((mark) => mark.x);
    const min = Math.min(low ?? Infinity, ...xs),
      max = Math.max(high ?? -Infinity, ...xs);
    if (!Number.isFinite(min)) return [0, 1];
    return min === max ? [min - 1, max + 1] : [min, max];
  }

  #yRange(low, high) {
    for (const mark of this.marks) {
      low = Math.min(low ?? Infinity, mark.low ?? mark.y);
      high = Math.max(high ?? -Infinity, mark.high ?? mark.y);
    }
    if (low === null || low === undefined || !Number.isFinite(low)) return [0, 1];
    const flat = high - low <= Math.abs(high) * 1e-6; // except for rounding errors
    const margin = (flat ? Math.abs(high) * 0.1 : (high - low) * 0.06) || 1;
    const min = this.floor !== null && low >= this.floor ? Math.max(this.floor, low - margin) : low - margin;
    const max = this.ceiling !== null && high <= this.ceiling ? Math.min(this.ceiling, high + margin) : high + margin;
    return [min, max];
  }

  // Shows the value at the cursor, which is the same step in every chart.
  #showCursorValue(chart) {
    const index = chart.cursor.idx;
    if (index === null || index === undefined) {
      this.value.textContent = this.latest;
      return;
    }
    const value = this.data[1][index];
    this.value.textContent = `step ${this.data[0][index]}: ${value === null ? "–" : this.format(value)}`;
  }

  #drawMarks(chart) {
    if (!this.marks.length) return;
    const context = chart.ctx,
      scale = window.devicePixelRatio || 1;
    context.save();
    context.strokeStyle = context.fillStyle = colour("--orange");
    context.lineWidth = 1.5 * scale;
    for (const { x, y, low, high, shape } of this.marks) {
      const left = chart.valToPos(x, "x", true),
        top = (value) => chart.valToPos(value, "y", true);
      if (low !== null && low !== undefined) {
        context.beginPath();
        context.moveTo(left, top(low));
        context.lineTo(left, top(high));
        context.stroke();
      }
      context.beginPath();
      if (SHAPES[shape % SHAPES.length] === "■")
        context.rect(left - 4 * scale, top(y) - 4 * scale, 8 * scale, 8 * scale);
      else context.arc(left, top(y), 4 * scale, 0, 2 * Math.PI);
      context.fillStyle = colour(SHAPES[shape % SHAPES.length] === "○" ? "--card" : "--orange");
      context.fill();
      context.stroke();
    }
    context.restore();
  }
}

export const lastValue = (values) => {
  for (let index = values.length - 1; index >= 0; index -= 1) if (values[index] !== null) return values[index];
  return null;
};

// The mean of the last `count` values that aren't null; null before the first.
export function rolling(values, count) {
  let sum = 0;
  const recent = [];
  return values.map((value) => {
    if (value !== null) {
      recent.push(value);
      sum += value;
      if (recent.length > count) sum -= recent.shift();
    }
    return recent.length ? sum / recent.length : null;
  });
}
