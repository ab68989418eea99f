// Workers and queues of a server. Where there is none, as in art view, the panel stays away.

import { get } from "./api.js";
import { add, byId, fill, h } from "./dom.js";
import { ago } from "./format.js";

const EVERY = 2000;

export async function watchWorkers() {
  // Asked first, so that a page without a server causes no errors in the browser's console.
  const schema = await get("openapi.json").catch(() => null);
  if (schema && !schema.paths?.["/status"]) return;
  const ask = async () => {
    try {
      const [status, workers] = await Promise.all([get("status"), get("api/workers")]);
      show(status, workers);
    } catch (error) {
      if (error.status === 404) {
        byId("workers").hidden = true;
        return;
      }
      byId("workers").dataset.state = "lost";
    }
    setTimeout(ask, EVERY);
  };
  ask();
}

function show(status, workers) {
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
        "No worker yet. On any machine: ",
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
            ["Running", "Finished", "Lost", "Weights", "Last seen"].map((it) => h("th", { class: "num" }, it)),
          ),
        ),
        add(h("tbody"), workers.map(row)),
      ),
    ),
  );
}

const row = (it) =>
  h(
    "tr",
    {},
    h("td", { class: "mono wide" }, it.id),
    h("td", {}, h("span", { class: `chip ${/lost|gone|dead/.test(it.state) ? "bad" : ""}` }, it.state)),
    [
      ["Running", it.running],
      ["Finished", it.finished],
      ["Lost", it.lost],
      ["Weights", it.version ?? "–"],
      ["Seen", seen(it.last_seen)],
    ].map(([name, value]) => h("td", { class: "num", "data-name": name }, value)),
  );

const seen = (at) => (typeof at === "number" ? ago(at) : (at ?? "–"));
