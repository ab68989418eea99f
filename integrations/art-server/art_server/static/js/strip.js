// A group's rewards as a strip plot: a dot per rollout, the mean, and ± one standard deviation.

import { h } from "./dom.js";
import { num, STATES } from "./format.js";

const WIDTH = 400,
  HEIGHT = 46,
  BASE = 27,
  LEFT = 14,
  RIGHT = 332,
  UNSCORED = 372; // x of rollouts that have no reward or don't count

// The range of rewards over all groups of a page, so that their strips have the same scale.
export function extent(groups) {
  const rewards = groups.flatMap((group) => group.rewards);
  if (!rewards.length) return [0, 1];
  const low = Math.min(...rewards),
    high = Math.max(...rewards);
  return low === high ? [low - 0.5, high + 0.5] : [low, high];
}

export function strip(group, [low, high], link) {
  const xOf = (reward) => LEFT + ((RIGHT - LEFT) * (reward - low)) / (high - low);
  const node = h("svg", {
    class: "strip",
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
    preserveAspectRatio: "xMidYMid meet",
    role: "group",
    "aria-label": describeGroup(group),
  });
  node.append(h("line", { class: "axis", x1: LEFT, x2: RIGHT, y1: BASE + 7, y2: BASE + 7 }));
  if (group.mean !== null && group.spread) {
    const start = Math.max(LEFT, xOf(group.mean - group.spread)),
      end = Math.min(RIGHT, xOf(group.mean + group.spread));
    node.append(
      h("rect", { class: "spread", x: start, y: 4, width: Math.max(0, end - start), height: BASE + 3, rx: 3 }),
    );
  }
  if (group.mean !== null)
    node.append(h("line", { class: "mean", x1: xOf(group.mean), x2: xOf(group.mean), y1: 4, y2: BASE + 7 }));
  const dotsAt = new Map();
  const dotsBefore = (x) => {
    const column = Math.round(x / 9);
    dotsAt.set(column, (dotsAt.get(column) ?? -1) + 1);
    return dotsAt.get(column);
  };
  for (const member of group.members) {
    const counts = member.reward !== null && member.state !== "lost";
    const x = counts ? xOf(member.reward) : UNSCORED;
    const [right, up] = stackOffset(dotsBefore(x));
    node.append(
      h(
        "a",
        { svg: true, href: link(member.rollout_id), class: member.state, "aria-label": describeMember(member) },
        h("title", {}, describeMember(member)),
        dot(member, x + right, BASE - up),
      ),
    );
  }
  node.append(
    h("text", { x: LEFT - 4, y: HEIGHT - 2 }, num(low, 2)),
    h("text", { x: RIGHT + 4, y: HEIGHT - 2, "text-anchor": "end" }, num(high, 2)),
  );
  if (group.members.some((member) => member.reward === null || member.state === "lost")) {
    node.append(h("text", { x: UNSCORED, y: HEIGHT - 2, "text-anchor": "middle" }, "no reward"));
  }
  return node;
}

// Offset of the dot number `index` at the same x: columns of four, the second right of the first, the third left, and so on.
function stackOffset(index) {
  const column = Math.floor(index / 4),
    side = column % 2 ? 1 : -1;
  return [side * Math.ceil(column / 2) * 9, (index % 4) * 8];
}

function dot(member, x, y) {
  if (member.state === "failed") return h("path", { d: `M${x - 3.5} ${y - 3.5}l7 7m0 -7l-7 7` });
  if (member.state === "lost") return h("path", { d: `M${x} ${y - 4}l4 4l-4 4l-4 -4z` });
  return h("circle", { cx: x, cy: y, r: 4.5 });
}

const describeMember = (member) =>
  `${STATES[member.state][0]}, reward ${num(member.reward)}${member.error ? `: ${member.error}` : ""}`;

const describeGroup = (group) =>
  `${group.size} rollouts, mean reward ${num(group.mean)}, standard deviation ${num(group.spread)}`;

export const stripLegend = () =>
  h(
    "div",
    { class: "legend" },
    legendEntry(h("circle", { cx: 7, cy: 7, r: 4.5 }), "", "rollout"),
    legendEntry(h("path", { d: "M3.5 3.5l7 7m0 -7l-7 7" }), "failed", "failed rollout, also scored"),
    legendEntry(h("path", { d: "M7 3l4 4l-4 4l-4 -4z" }), "lost", "lost attempt, retried; doesn't count"),
    legendEntry(h("line", { class: "mean", x1: 7, x2: 7, y1: 1, y2: 13 }), "", "mean"),
    legendEntry(h("rect", { class: "spread", x: 0, y: 2, width: 14, height: 10 }), "", "± one standard deviation"),
  );

// The symbol has the class `strip`, so that it is styled like the strips.
function legendEntry(shape, kind, text) {
  const symbol = h(
    "svg",
    { class: "strip", viewBox: "0 0 14 14", "aria-hidden": "true" },
    h("a", { svg: true, class: kind }, shape),
  );
  symbol.setAttribute("class", "strip symbol");
  return h("span", {}, symbol, text);
}
