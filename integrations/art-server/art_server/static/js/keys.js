// The keyboard: help, single keys, and moving in lists.

import { byId, fill, h } from "./dom.js";

export const KEYS = [
  ["?", "this help"],
  ["1 – 6", "the pages of a run, in their order"],
  ["j  k  or  ↓  ↑", "next and previous in a list or tree"],
  ["Enter", "open what is chosen"],
  ["[  ]", "trajectory before and after, in its group"],
  ["v", "conversation or tokens"],
  ["c", "colour tokens by advantage or by logprob"],
  ["←  →", "from token to token"],
  ["x", "compare this trajectory with another"],
  ["d", "light or dark"],
  ["Esc", "close this, or leave a field"],
];

const actions = new Map();
export const onKey = (key, action) => actions.set(key, action);
export const forgetPageKeys = () =>
  [...actions.keys()].filter((it) => !LASTING.has(it)).forEach((it) => actions.delete(it));
const LASTING = new Set(["?", "d", "1", "2", "3", "4", "5", "6"]);

export function listen() {
  const help = byId("keys");
  fill(
    help,
    h("h2", { id: "keys-title" }, "Keyboard"),
    h(
      "dl",
      {},
      KEYS.map(([keys, about]) => [
        h(
          "dt",
          {},
          keys
            .split("  ")
            .map((it) => [it === "or" || it === "–" ? ` ${it} ` : h("span", { class: "key" }, it), " "]),
        ),
        h("dd", {}, about),
      ]),
    ),
    h("button", { type: "button", onclick: () => help.close() }, "Close"),
  );
  const show = () => (help.open ? help.close() : help.showModal());
  onKey("?", show);
  byId("help").addEventListener("click", show);
  document.addEventListener("keydown", (event) => {
    const target = event.target;
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape" && target.matches?.("input, select")) target.blur();
    if (target.matches?.("input, select, textarea") || (help.open && event.key !== "?")) return;
    if (moved(event, target)) return;
    const action = actions.get(event.key);
    if (action) {
      event.preventDefault();
      action();
    }
  });
}

// j, k and the arrows go through what is marked [data-item] in the same [data-list], or in the first one of the page.
function moved(event, target) {
  const step = { j: 1, ArrowDown: 1, k: -1, ArrowUp: -1, Home: -Infinity, End: Infinity }[event.key];
  if (!step) return false;
  const inside = target.closest?.("[data-list]");
  const plain = event.key === "j" || event.key === "k";
  if (!inside && !plain) return false;
  const list = inside ?? document.querySelector("[data-list]");
  const items = list ? [...list.querySelectorAll("[data-item]")] : [];
  if (!items.length) return false;
  const at = items.findIndex((it) => it === target || it.contains(target));
  const next =
    at < 0
      ? 0
      : Math.max(
          0,
          Math.min(items.length - 1, step === Infinity ? items.length - 1 : step === -Infinity ? 0 : at + step),
        );
  event.preventDefault();
  items[next].focus();
  items[next].scrollIntoView({ block: "nearest" });
  return true;
}
