// A run's status, the reason for it, and its evaluation results.

import { h } from "./dom.js";
import { num, percent } from "./format.js";

const CHIP_CLASSES = { running: "accent", finished: "good", stopped: "warn", crashed: "bad", "dry run": "" };

export const statusChip = (run) =>
  run.status ? h("span", { class: `chip status ${CHIP_CLASSES[run.status]}`, title: run.reason }, run.status) : null;

// Why the run stopped or crashed.
export const reason = (run) => run.reason && h("p", { class: "small soft reason", title: run.reason }, run.reason);

// An evaluation's success rate, or its mean reward if the reward doesn't define success.
export const evaluationResult = (evaluation) =>
  !evaluation ? "–" : evaluation.counts_successes ? percent(evaluation.success) : num(evaluation.success);

export const temperatureName = (temperature) =>
  temperature === null ? "the agent's own temperature" : `temperature ${temperature}`;
