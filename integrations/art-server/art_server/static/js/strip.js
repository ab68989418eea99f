// The rewards of a group on one line: a dot per run, the mean, and one standard deviation to either side.

import { h } from "./dom.js";
import { num, STATES } from "./format.js";

const WIDTH = 400,
  HEIGHT = 46,
  BASE = 27,
  LEFT = 14,
  RIGHT = 332,
  ASIDE = 372;

// The least and the greatest reward of all groups on a page, so that their strips can be compared.
export function extent(groups) {
  const rewards = groups.flatMap((it) => it.rewards);
  if (!rewards.length) return [0, 1];
  const low = Math.min(...rewards),
    high = Math.max(...rewards);
  return low === high ? [low - 0.5, high + 0.5] : [low, high];
}

export function strip(group, [low, high], link) {
  const across = (reward) => LEFT + ((RIGHT - LEFT) * (reward - low)) / (high - low);
  const node = h("svg", {
    class: "strip",
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
    preserveAspectRatio: "xMidYMid meet",
    role: "group",
    "aria-label": described(group),
  });
  node.append(h("line", { class: "axis", x1: LEFT, x2: RIGHT, y1: BASE + 7, y2: BASE + 7 }));
  if (group.mean !== null && group.spread) {
    const from = Math.max(LEFT, across(group.mean - group.spread)),
      to = Math.min(RIGHT, across(group.mean + group.spread));
    node.append(
      h("rect", { class: "spread", x: from, y: 4, width: Math.max(0, to - from), height: BASE + 3, rx: 3 }),
    );
  }
  if (group.mean !== null)
    node.append(h("line", { class: "mean", x1: across(group.mean), x2: across(group.mean), y1: 4, y2: BASE + 7 }));
  const levels = new Map();
  const level = (at) => {
    const place = Math.round(at / 9);
    levels.set(place, (levels.get(place) ?? -1) + 1);
    return levels.get(place);
  };
  for (const member of group.members) {
    const counts = member.reward !== null && member.state !== "lost";
    const at = counts ? across(member.reward) : ASIDE;
    const [aside, above] = seat(level(at));
    node.append(
      h(
        "a",
        { svg: true, href: link(member.rollout_id), class: member.state, "aria-label": told(member) },
        h("title", {}, told(member)),
        shape(member, at + aside, BASE - above),
      ),
    );
  }
  node.append(
    h("text", { x: LEFT - 4, y: HEIGHT - 2 }, num(low, 2)),
    h("text", { x: RIGHT + 4, y: HEIGHT - 2, "text-anchor": "end" }, num(high, 2)),
  );
  if (group.members.some((it) => it.reward === null || it.state === "lost")) {
    node.append(h("text", { x: ASIDE, y: HEIGHT - 2, "text-anchor": "middle" }, "no reward"));
  }
  return node;
}

// Equal rewards stand in columns of four, the second to the right of the first, the third to the left, and so on.
function seat(place) {
  const column = Math.floor(place / 4),
    side = column % 2 ? 1 : -1;
  return [side * Math.ceil(column / 2) * 9, (place % 4) * 8];
}

function shape(member, x, y) {
  if (member.state === "failed") return h("path", { d: `M${x - 3.5} ${y - 3.5}l7 7m0 -7l-7 7` });
  if (member.state === "lost") return h("path", { d: `M${x} ${y - 4}l4 4l-4 4l-4 -4z` });
  return h("circle", { cx: x, cy: y, r: 4.5 });
}

const told = (member) =>
  `${STATES[member.state][0]}, reward ${num(member.reward)}${member.error ? `: ${member.error}` : ""}`;

const described = (group) =>
  `${group.size} runs, mean reward ${num(group.mean)}, standard deviation ${num(group.spread)}`;

export const stripLegend = () =>
  h(
    "div",
    { class: "legend" },
    mark(h("circle", { cx: 7, cy: 7, r: 4.5 }), "", "run"),
    mark(h("path", { d: "M3.5 3.5l7 7m0 -7l-7 7" }), "failed", "failed run, scored too"),
    mark(h("path", { d: "M7 3l4 4l-4 4l-4 -4z" }), "lost", "attempt that was lost and made again; does not count"),
    mark(h("line", { class: "mean", x1: 7, x2: 7, y1: 1, y2: 13 }), "", "mean"),
    mark(h("rect", { class: "spread", x: 0, y: 2, width: 14, height: 10 }), "", "± one standard deviation"),
  );

// The same rules draw a legend's sign and a strip's.
function mark(drawn, kind, text) {
  const sign = h(
    "svg",
    { class: "strip", viewBox: "0 0 14 14", "aria-hidden": "true" },
    h("a", { svg: true, class: kind }, drawn),
  );
  sign.setAttribute("class", "strip sign");
  return h("span", {}, sign, text);
}
