// Keyboard shortcuts, their help dialog, and moving in lists.

import { byId, fill, h } from "./dom.js";

export const KEYS = [
  ["?", "show this help"],
  ["1 – 6", "switch to a page of the run"],
  ["j  k  or  ↓  ↑", "next and previous item in a list or tree"],
  ["Enter", "open the selected item"],
  ["[  ]", "previous and next trajectory in the group"],
  ["v", "switch between conversation and tokens"],
  ["c", "colour tokens by advantage or logprob"],
  ["←  →", "previous and next token"],
  ["x", "compare this trajectory with another one"],
  ["d", "toggle light and dark theme"],
  ["Esc", "close this help, or leave a field"],
];

const actions = new Map();
export const onKey = (key, action) => actions.set(key, action);
export const clearPageKeys = () =>
  [...actions.keys()].filter((key) => !GLOBAL.has(key)).forEach((key) => actions.delete(key));
const GLOBAL = new Set(["?", "d", "1", "2", "3", "4", "5", "6"]);

export function listen() {
  const dialog = byId("keys");
  fill(
    dialog,
    h("h2", { id: "keys-title" }, "Keyboard shortcuts"),
    h(
      "dl",
      {},
      KEYS.map(([keys, description]) => [
        h(
          "dt",
          {},
          keys
            .split("  ")
            .map((part) => [part === "or" || part === "–" ? ` ${part} ` : h("span", { class: "key" }, part), " "]),
        ),
        h("dd", {}, description),
      ]),
    ),
    h("button", { type: "button", onclick: () => dialog.close() }, "Close"),
  );
  const toggleHelp = () => (dialog.open ? dialog.close() : dialog.showModal());
  onKey("?", toggleHelp);
  byId("help").addEventListener("click", toggleHelp);
  document.addEventListener("keydown", (event) => {
    const target = event.target;
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape" && target.matches?.("input, select")) target.blur();
    if (target.matches?.("input, select, textarea") || (dialog.open && event.key !== "?")) return;
    if (moveInList(event, target)) return;
    const action = actions.get(event.key);
    if (action) {
      event.preventDefault();
      action();
    }
  });
}

// j, k and the arrow keys move between the [data-item] elements of the current [data-list]; j and k also enter the page's
// first list. Returns whether the key was handled.
function moveInList(event, target) {
  const step = { j: 1, ArrowDown: 1, k: -1, ArrowUp: -1, Home: -Infinity, End: Infinity }[event.key];
  if (!step) return false;
  const currentList = target.closest?.("[data-list]");
  const isLetter = event.key === "j" || event.key === "k";
  if (!currentList && !isLetter) return false;
  const list = currentList ?? document.querySelector("[data-list]");
  const items = list ? [...list.querySelectorAll("[data-item]")] : [];
  if (!items.length) return false;
  const index = items.findIndex((item) => item === target || item.contains(target));
  const next =
    index < 0
      ? 0
      : Math.max(
          0,
          Math.min(items.length - 1, step === Infinity ? items.length - 1 : step === -Infinity ? 0 : index + step),
        );
  event.preventDefault();
  items[next].focus();
  items[next].scrollIntoView({ block: "nearest" });
  return true;
}
