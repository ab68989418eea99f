// The app shell: routing, live updates, header and theme.

import { get, onMissingToken, runPath } from "./api.js";
import { byId, errorCard, fill, h, select } from "./dom.js";
import { ago } from "./format.js";
import { clearPageKeys, listen, onKey } from "./keys.js";
import { pollWorkers } from "./workers.js";
import { checkpoints } from "./pages/checkpoints.js";
import { compare } from "./pages/compare.js";
import { groups } from "./pages/groups.js";
import { overview } from "./pages/overview.js";
import { rollouts } from "./pages/rollouts.js";
import { runs } from "./pages/runs.js";
import { settings } from "./pages/settings.js";
import { trajectory } from "./pages/trajectory.js";
import { versus } from "./pages/versus.js";

const TABS = [
  ["", "Overview"],
  ["groups", "Groups"],
  ["rollouts", "Trajectories"],
  ["compare", "Compare"],
  ["checkpoints", "Checkpoints"],
  ["settings", "Settings"],
];
const PAGES = { "": overview, groups, rollouts, rollout: trajectory, compare, checkpoints, settings, versus };
const LIVE_INTERVAL = 2000, // milliseconds between polls of a live run
  IDLE_INTERVAL = 10000,
  LIVE_SECONDS = 120; // a run that was written this recently is live
let currentPage = { stop: () => {} };

export const link = (run, page = "", argument = "", parameters = {}) => {
  const query = new URLSearchParams(
    Object.entries(parameters).filter(([, value]) => value !== null && value !== undefined && value !== ""),
  );
  const path = ["run", run, page, argument]
    .filter((part) => part !== "")
    .map(encodeURIComponent)
    .join("/");
  return `#/${path}${query.size ? `?${query}` : ""}`;
};

function currentRoute() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [kind, run, page = "", argument = ""] = path.split("/").map(decode);
  return { run: kind === "run" ? run : null, page, argument, parameters: new URLSearchParams(query) };
}

function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

// Updates the address without loading a page, so that selections can be linked to.
export function replaceRoute(run, page, argument, parameters) {
  history.replaceState(null, "", link(run, page, argument, parameters));
}

async function show() {
  currentPage.stop();
  byId("notice").hidden = true;
  clearPageKeys();
  const route = currentRoute(),
    controller = new AbortController(),
    main = byId("main");
  const page = { stop: () => controller.abort(), update: null };
  currentPage = page;
  const stopped = () => controller.signal.aborted;
  try {
    const runPage = await get("api/runs", { limit: 500 }, controller.signal);
    if (route.run === null && runPage.items.length === 1 && !runPage.rounds.length)
      return void location.replace(link(runPage.items[0].name));
    const createPage = route.run === null ? runs : PAGES[route.page];
    drawHeader(runPage.items, route);
    if (!createPage) throw Object.assign(new Error("No such page."), { status: 404 });
    const run = route.run === null ? null : await get(runPath(route.run), {}, controller.signal);
    const context = {
      ...route,
      runs: runPage.items,
      totalRuns: runPage.total,
      rounds: runPage.rounds,
      info: run,
      signal: controller.signal,
      link,
      onKey,
      reload: show,
      onStop: (stop) => controller.signal.addEventListener("abort", stop),
      saveParameters: (parameters) => replaceRoute(route.run, route.page, route.argument, parameters),
    };
    drawLiveState(run);
    const created = await createPage(context);
    if (stopped()) return;
    fill(main, created.node);
    page.update = created.update;
    created.ready?.();
    if (document.activeElement === document.body) main.focus({ preventScroll: true });
    if (run) poll(route.run, page, controller.signal, run);
  } catch (error) {
    if (error.name === "AbortError" || stopped()) return;
    fill(main, errorCard(error.status === 404 ? "Not found" : "Can't show this page", error.message, show));
    if (!(error.status >= 0)) throw error;
  }
}

// Polls the run's state: often while it is live, rarely otherwise, and not while the tab is hidden.
function poll(name, page, signal, run) {
  let timer = 0;
  const interval = () => (Date.now() / 1000 - (run?.written ?? 0) < LIVE_SECONDS ? LIVE_INTERVAL : IDLE_INTERVAL);
  const refresh = async () => {
    if (signal.aborted) return;
    if (!document.hidden) {
      try {
        run = await get(runPath(name), {}, signal);
        drawLiveState(run);
        await page.update?.(run);
      } catch (error) {
        if (error.name === "AbortError") return;
        byId("live").dataset.state = "lost";
        fill(byId("live"), error.status === 0 ? "disconnected" : "unreadable");
      }
    }
    if (!signal.aborted) timer = setTimeout(refresh, interval());
  };
  timer = setTimeout(refresh, interval());
  signal.addEventListener("abort", () => clearTimeout(timer));
}

function drawLiveState(run) {
  const live = byId("live");
  if (!run) return void fill(live);
  const recent = run.open && Date.now() / 1000 - run.written < LIVE_SECONDS;
  const state = recent ? "live" : "still";
  const text = recent
    ? ["live"]
    : [h("span", { class: "long" }, run.open ? "running, " : "not running, "), `last updated ${ago(run.written)}`];
  live.dataset.state = state;
  const plainText = text.map((part) => part.textContent ?? part).join("");
  if (live.textContent !== plainText) fill(live, text);
}

function drawHeader(runList, { run, page }) {
  const breadcrumb = byId("breadcrumb"),
    tabs = byId("tabs");
  document.title = run ? `${run} · art` : "art";
  const names = runList.map((each) => each.name);
  if (run && !names.includes(run)) names.unshift(run); // an older run than those listed
  const runName =
    names.length > 1
      ? select(
          names.map((name) => [name, name]),
          run,
          (name) => {
            location.hash = link(name);
          },
          { "aria-label": "Run" },
        )
      : h("span", { class: "name" }, run ?? "");
  fill(breadcrumb, run ? [h("span", { class: "slash", "aria-hidden": "true" }, "/"), runName] : null);
  tabs.hidden = !run;
  const current = page === "rollout" ? "rollouts" : page;
  fill(
    tabs,
    run
      ? TABS.map(([key, name], index) =>
          h(
            "a",
            { href: link(run, key), "aria-current": key === current ? "page" : null, "aria-keyshortcuts": index + 1 },
            name,
          ),
        )
      : null,
  );
  tabs.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" });
  TABS.forEach(([key], index) =>
    onKey(String(index + 1), () => {
      if (run) location.hash = link(run, key);
    }),
  );
}

function themeSwitch() {
  const button = byId("theme"),
    dark = matchMedia("(prefers-color-scheme: dark)"),
    root = document.documentElement;
  const isDark = () => (root.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark";
  const updateButton = () => {
    fill(button, isDark() ? "☾" : "☀");
    button.setAttribute("aria-label", `${isDark() ? "Dark" : "Light"} theme; click to switch`);
  };
  const toggleTheme = () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try {
      localStorage.setItem("art-theme", root.dataset.theme);
    } catch {
      /* storage may be disabled; the choice lasts until the page is closed */
    }
    updateButton();
    dispatchEvent(new Event("art-theme"));
  };
  button.addEventListener("click", toggleTheme);
  onKey("d", toggleTheme);
  dark.addEventListener("change", () => {
    updateButton();
    dispatchEvent(new Event("art-theme"));
  });
  updateButton();
}

let pendingToken = null;
onMissingToken(() => {
  pendingToken ??= new Promise((resolve) => {
    const token = h("input", { type: "password", autocomplete: "off", "aria-label": "Token" });
    const dialog = h(
      "dialog",
      { "aria-label": "Server token" },
      h("h2", {}, "This server requires a token"),
      h(
        "form",
        {
          class: "row",
          onsubmit: (event) => {
            event.preventDefault();
            pendingToken = null;
            dialog.close();
            dialog.remove();
            resolve(token.value);
          },
        },
        token,
        h("button", {}, "Continue"),
      ),
    );
    document.body.append(dialog);
    dialog.showModal();
  });
  return pendingToken;
});

byId("skip").addEventListener("click", (event) => {
  event.preventDefault();
  byId("main").focus();
});
// Shows errors of clicks and key presses at the bottom of the page, but not requests that were aborted by leaving a page.
addEventListener("unhandledrejection", (event) => {
  const error = event.reason;
  if (error?.name !== "AbortError" && !(error?.status >= 0)) return;
  event.preventDefault();
  if (error.name === "AbortError") return;
  const notice = byId("notice");
  fill(
    notice,
    h("span", {}, error.message),
    h("button", { type: "button", onclick: () => (notice.hidden = true) }, "Close"),
  );
  notice.hidden = false;
});
addEventListener("hashchange", show);
listen();
themeSwitch();
show();
pollWorkers();
