// The weights that are kept.

import { get, runPath } from "../api.js";
import { empty, fill, h } from "../dom.js";
import { bytes, plural } from "../format.js";

export async function checkpoints(context) {
  const list = h("div", { class: "stacked" });
  let known = "";
  const load = async () => {
    const page = await get(runPath(context.run, "/checkpoints"), { limit: 200 }, context.signal);
    const now = JSON.stringify(page.items.map((it) => [it.name, it.size]));
    if (now === known) return;
    known = now;
    fill(
      list,
      page.items.length
        ? page.items.map(card)
        : empty(
            "No checkpoint yet",
            "Weights are saved after the first optimizer step; how many are kept is the setting keep_checkpoints.",
          ),
    );
  };
  await load();
  return {
    node: h(
      "section",
      {},
      h(
        "div",
        { class: "head" },
        h("h1", {}, "Checkpoints"),
        h("p", { class: "soft" }, "Every file's SHA-256 is in the manifest, learner.json."),
      ),
      list,
    ),
    update: load,
  };
}

const card = (it, index) =>
  h(
    "details",
    { class: "card", open: index === 0 },
    h(
      "summary",
      {},
      h("b", {}, it.name),
      ` · ${bytes(it.size)} · ${plural(it.files.length, "file")} · weights of version ${it.version ?? "–"}`,
    ),
    h(
      "div",
      { class: "scroll" },
      h(
        "table",
        {},
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            h("th", { scope: "col" }, "File"),
            h("th", { scope: "col", class: "num" }, "Size"),
            h("th", { scope: "col" }, "SHA-256"),
          ),
        ),
        h(
          "tbody",
          {},
          it.files.map((file) =>
            h(
              "tr",
              {},
              h("td", { class: "mono" }, file.name),
              h("td", { class: "num" }, bytes(file.size)),
              h("td", { class: "hash" }, file.sha256 ?? "–"),
            ),
          ),
        ),
      ),
    ),
  );
