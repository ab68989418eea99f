// A trajectory's calls as a tree, by node and agent or by shared token prefix.

import { fill, h, toggle } from "./dom.js";
import { num, signed } from "./format.js";

const MAX_DEPTH = 6,
  GROUPING_KEY = "art-tree";

export class CallTree {
  constructor(calls, onSelect) {
    this.calls = calls;
    this.onSelect = onSelect;
    this.selected = calls.length ? calls[calls.length - 1].index : null;
    this.list = h("div", { class: "tree", role: "tree", "aria-label": "Calls", "data-list": true });
    const hasAgents = calls.some((call) => call.agent);
    this.grouping = localStorage.getItem(GROUPING_KEY) ?? (hasAgents ? "agent" : "prefix");
    this.node = h(
      "div",
      {},
      h(
        "div",
        { class: "head" },
        h("h2", {}, "Calls"),
        toggle(
          "Group calls",
          [
            ["agent", "By node", "Grouped by the node or agent that made the call"],
            ["prefix", "By prefix", "A call that doesn't extend an earlier call's tokens starts a branch"],
          ],
          this.grouping,
          (grouping) => {
            this.grouping = grouping;
            localStorage.setItem(GROUPING_KEY, grouping);
            this.draw();
          },
        ),
      ),
      this.list,
    );
    this.draw();
  }

  select(index) {
    this.selected = index;
    for (const item of this.list.querySelectorAll("[data-call]")) {
      const isSelected = Number(item.dataset.call) === index;
      item.setAttribute("aria-selected", String(isSelected));
      item.tabIndex = isSelected ? 0 : -1;
    }
  }

  draw() {
    const rows = this.grouping === "agent" ? byAgent(this.calls) : byPrefix(this.calls);
    fill(this.list, rows.length ? rows.map((row) => this.#row(row)) : h("p", { class: "soft" }, "No calls."));
    this.select(this.selected);
  }

  #row({ call, depth, name, fork }) {
    const level = Math.min(depth, MAX_DEPTH);
    if (!call)
      return h(
        "div",
        {
          class: `agent d${level}`,
          role: "treeitem",
          "aria-level": depth + 1,
          "aria-expanded": "true",
          tabindex: -1,
          "data-item": true,
        },
        h("span", { class: "label" }, name),
      );
    const select = () => {
      this.select(call.index);
      this.onSelect(call);
    };
    const agent = this.grouping === "prefix" && call.agent ? ` ${call.agent.split("/").pop()}` : "";
    return h(
      "div",
      {
        class: `d${level}`,
        role: "treeitem",
        "aria-level": depth + 1,
        tabindex: -1,
        "data-call": call.index,
        "data-item": true,
        onclick: select,
        onfocus: select,
      },
      h(
        "span",
        { class: "label" },
        fork !== undefined &&
          h(
            "span",
            {
              class: "fork",
              title: fork
                ? `Shares the first ${fork} tokens with call ${call.parent}`
                : "Shares no tokens with an earlier call",
            },
            `⑂ ${fork} `,
          ),
        `${call.index}${agent}`,
        h("span", { class: "faint" }, ` ${outcome(call)}`),
      ),
      h(
        "span",
        { class: "tip" },
        `${num(call.sampled_tokens)} tok`,
        call.advantage !== null ? ` ${signed(call.advantage, 2)}` : "",
      ),
    );
  }
}

const outcome = (call) =>
  call.finish_reason === "tool_calls" ? "tool call" : call.finish_reason === "stop" ? "answer" : call.finish_reason;

// Every part of an agent's path is a level, with its calls below it, in the order of their answers.
function byAgent(calls) {
  const rows = [];
  let current = [];
  for (const call of calls) {
    const path = (call.agent ?? "").split("/").filter(Boolean);
    let shared = 0;
    while (shared < path.length && shared < current.length && path[shared] === current[shared]) shared += 1;
    for (let depth = shared; depth < path.length; depth += 1) rows.push({ name: path[depth], depth });
    current = path;
    rows.push({ call, depth: path.length });
  }
  return rows;
}

// The first call that continues all of its parent's tokens stays on the parent's level; others start a branch below it.
function byPrefix(calls) {
  const depths = new Map(),
    continued = new Set();
  return calls.map((call) => {
    const continues = call.parent !== null && call.continues && !continued.has(call.parent);
    if (continues) continued.add(call.parent);
    const parentDepth = call.parent === null ? -1 : (depths.get(call.parent) ?? -1);
    const depth = continues ? parentDepth : parentDepth + 1;
    depths.set(call.index, depth);
    return { call, depth, fork: continues || call.index === 0 ? undefined : call.shared_tokens };
  });
}
