// The panel with a server's workers and queues; hidden in art view, which has no server.

import { get } from "./api.js";
import { append, byId, fill, h } from "./dom.js";
import { ago } from "./format.js";

const INTERVAL = 2000; // milliseconds between polls

export async function pollWorkers() {
  // Checked first, so that a page without a server logs no errors to the browser's console.
  const schema = await get("openapi.json").catch(() => null);
  if (schema && !schema.paths?.["/status"]) return;
  const refresh = async () => {
    try {
      const [status, workers] = await Promise.all([get("status"), get("api/workers")]);
      draw(status, workers);
    } catch (error) {
      if (error.status === 404) {
        byId("workers").hidden = true;
        return;
      }
      byId("workers").dataset.state = "lost";
    }
    setTimeout(refresh, INTERVAL);
  };
  refresh();
}

function draw(status, workers) {
  byId("workers").hidden = false;
  byId("workers").dataset.state = "live";
  byId("client-count").textContent = status.active_clients ?? 0;
  byId("episode-count").textContent = status.episodes_queued ?? 0;
  byId("result-count").textContent = status.results_available ?? 0;
  const clients = byId("clients");
  if (!workers.length) {
    fill(
      clients,
      h(
        "p",
        { class: "soft small" },
        "No workers yet. Start one on any machine: ",
        h("code", {}, "art worker ws://HOST:PORT --id client_1 --agent app.py:agent"),
      ),
    );
    return;
  }
  fill(
    clients,
    h(
      "div",
      { class: "scroll" },
      h(
        "table",
        { class: "stack" },
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            h("th", {}, "Worker"),
            h("th", {}, "State"),
            ["Running", "Finished", "Lost", "Weights", "Last seen"].map((name) => h("th", { class: "num" }, name)),
          ),
        ),
        append(h("tbody"), workers.map(row)),
      ),
    ),
  );
}

const row = (worker) =>
  h(
    "tr",
    {},
    h("td", { class: "mono wide" }, worker.id),
    h("td", {}, h("span", { class: `chip ${/lost|gone|dead/.test(worker.state) ? "bad" : ""}` }, worker.state)),
    [
      ["Running", worker.running],
      ["Finished", worker.finished],
      ["Lost", worker.lost],
      ["Weights", worker.version ?? "–"],
      ["Last seen", lastSeen(worker.last_seen)],
    ].map(([name, value]) => h("td", { class: "num", "data-name": name }, value)),
  );

const lastSeen = (time) => (typeof time === "number" ? ago(time) : (time ?? "–"));
