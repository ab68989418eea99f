// The run's checkpoints.

import { get, runPath } from "../api.js";
import { emptyCard, fill, h } from "../dom.js";
import { bytes, plural } from "../format.js";

export async function checkpoints(context) {
  const list = h("div", { class: "stacked" });
  let drawn = "";
  const load = async () => {
    const page = await get(runPath(context.run, "/checkpoints"), { limit: 200 }, context.signal);
    const current = JSON.stringify(page.items.map((checkpoint) => [checkpoint.name, checkpoint.size]));
    if (current === drawn) return;
    drawn = current;
    fill(
      list,
      page.items.length
        ? page.items.map(card)
        : emptyCard(
            "No checkpoints yet",
            "The first one is saved after the first optimizer step. The setting keep_checkpoints limits how many are kept.",
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
        h("p", { class: "soft" }, "The manifest, learner.json, has the SHA-256 of every file."),
      ),
      list,
    ),
    update: load,
  };
}

const card = (checkpoint, index) =>
  h(
    "details",
    { class: "card", open: index === 0 },
    h(
      "summary",
      {},
      h("b", {}, checkpoint.name),
      ` · ${bytes(checkpoint.size)} · ${plural(checkpoint.files.length, "file")} · policy version ${checkpoint.version ?? "–"}`,
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
          checkpoint.files.map((file) =>
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
