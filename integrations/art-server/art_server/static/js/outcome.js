// How a run stands or ended, and what it gained, at one temperature at a time.

import { h } from "./dom.js";
import { num, percent } from "./format.js";

const KINDS = { running: "accent", finished: "good", stopped: "warn", crashed: "bad", "dry run": "" };

export const statusChip = (run) =>
  run.status ? h("span", { class: `chip status ${KINDS[run.status]}`, title: run.reason }, run.status) : null;

// Why it is not finished, below its name.
export const reason = (run) => run.reason && h("p", { class: "small soft why", title: run.reason }, run.reason);

export const measured = (it) => (!it ? "–" : it.counts_successes ? percent(it.success) : num(it.success));
export const temperatureName = (temperature) =>
  temperature === null ? "the agent's own temperature" : `temperature ${temperature}`;
