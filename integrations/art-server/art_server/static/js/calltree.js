// The calls of a trajectory as a tree: by node and agent, or by the tokens that they share.

import { fill, h, toggle } from "./dom.js";
import { num, signed } from "./format.js";

const DEEPEST = 6,
  CHOICE = "art-tree";

export class CallTree {
  constructor(calls, choose) {
    this.calls = calls;
    this.choose = choose;
    this.chosen = calls.length ? calls[calls.length - 1].index : null;
    this.list = h("div", { class: "tree", role: "tree", "aria-label": "Calls", "data-list": true });
    const named = calls.some((it) => it.agent);
    this.kind = localStorage.getItem(CHOICE) ?? (named ? "agent" : "prefix");
    this.node = h(
      "div",
      {},
      h(
        "div",
        { class: "head" },
        h("h2", {}, "Calls"),
        toggle(
          "Tree of calls",
          [
            ["agent", "By node", "Grouped by the node or agent that called"],
            ["prefix", "By prefix", "A call that begins with other tokens than the one before it starts a branch"],
          ],
          this.kind,
          (it) => {
            this.kind = it;
            localStorage.setItem(CHOICE, it);
            this.draw();
          },
        ),
      ),
      this.list,
    );
    this.draw();
  }

  pick(index) {
    this.chosen = index;
    for (const it of this.list.querySelectorAll("[data-call]")) {
      const on = Number(it.dataset.call) === index;
      it.setAttribute("aria-selected", String(on));
      it.tabIndex = on ? 0 : -1;
    }
  }

  draw() {
    const rows = this.kind === "agent" ? byAgent(this.calls) : byPrefix(this.calls);
    fill(this.list, rows.length ? rows.map((it) => this.#row(it)) : h("p", { class: "soft" }, "No call."));
    this.pick(this.chosen);
  }

  #row({ call, depth, name, fork }) {
    const at = Math.min(depth, DEEPEST);
    if (!call)
      return h(
        "div",
        {
          class: `node d${at}`,
          role: "treeitem",
          "aria-level": depth + 1,
          "aria-expanded": "true",
          tabindex: -1,
          "data-item": true,
        },
        h("span", { class: "label" }, name),
      );
    const pick = () => {
      this.pick(call.index);
      this.choose(call);
    };
    const agent = this.kind === "prefix" && call.agent ? ` ${call.agent.split("/").pop()}` : "";
    return h(
      "div",
      {
        class: `d${at}`,
        role: "treeitem",
        "aria-level": depth + 1,
        tabindex: -1,
        "data-call": call.index,
        "data-item": true,
        onclick: pick,
        onfocus: pick,
      },
      h(
        "span",
        { class: "label" },
        fork !== undefined &&
          h(
            "span",
            {
              class: "fork",
              title: fork ? `Begins with ${fork} tokens of call ${call.parent}` : "Begins with other tokens",
            },
            `⑂ ${fork} `,
          ),
        `${call.index}${agent}`,
        h("span", { class: "faint" }, ` ${what(call)}`),
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

const what = (call) =>
  call.finish_reason === "tool_calls" ? "tool call" : call.finish_reason === "stop" ? "answer" : call.finish_reason;

// Every name on the path of `agent` is a level; the calls stand below the last one in the order in which they were answered.
function byAgent(calls) {
  const rows = [];
  let open = [];
  for (const call of calls) {
    const path = (call.agent ?? "").split("/").filter(Boolean);
    let same = 0;
    while (same < path.length && same < open.length && path[same] === open[same]) same += 1;
    for (let depth = same; depth < path.length; depth += 1) rows.push({ name: path[depth], depth });
    open = path;
    rows.push({ call, depth: path.length });
  }
  return rows;
}

// A call that goes on with all of its parent's tokens stays on the parent's level; another one starts a branch below it.
function byPrefix(calls) {
  const depths = new Map(),
    continued = new Set();
  return calls.map((call) => {
    const goesOn = call.parent !== null && call.continues && !continued.has(call.parent);
    if (goesOn) continued.add(call.parent);
    const above = call.parent === null ? -1 : (depths.get(call.parent) ?? -1);
    const depth = goesOn ? above : above + 1;
    depths.set(call.index, depth);
    return { call, depth, fork: goesOn || call.index === 0 ? undefined : call.shared_tokens };
  });
}
