// The shell: which page is shown, for which run, and that it stays up to date.

import { get, onMissingKey, runPath } from "./api.js";
import { byId, fill, h, select, trouble } from "./dom.js";
import { ago } from "./format.js";
import { forgetPageKeys, listen, onKey } from "./keys.js";
import { watchWorkers } from "./workers.js";
import { checkpoints } from "./pages/checkpoints.js";
import { compare } from "./pages/compare.js";
import { groups } from "./pages/groups.js";
import { overview } from "./pages/overview.js";
import { rollouts } from "./pages/rollouts.js";
import { runs } from "./pages/runs.js";
import { settings } from "./pages/settings.js";
import { trajectory } from "./pages/trajectory.js";

const TABS = [
  ["", "Overview"],
  ["groups", "Groups"],
  ["rollouts", "Trajectories"],
  ["compare", "Compare"],
  ["checkpoints", "Checkpoints"],
  ["settings", "Settings"],
];
const PAGES = { "": overview, groups, rollouts, rollout: trajectory, compare, checkpoints, settings };
const SOON = 2000,
  LATER = 10000,
  FRESH = 120;
let shown = { stop: () => {} };

export const link = (run, page = "", argument = "", parameters = {}) => {
  const query = new URLSearchParams(
    Object.entries(parameters).filter(([, value]) => value !== null && value !== undefined && value !== ""),
  );
  const path = ["run", run, page, argument]
    .filter((it) => it !== "")
    .map(encodeURIComponent)
    .join("/");
  return `#/${path}${query.size ? `?${query}` : ""}`;
};

function place() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [kind, run, page = "", argument = ""] = path.split("/").map(decoded);
  return { run: kind === "run" ? run : null, page, argument, parameters: new URLSearchParams(query) };
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

// Changes the address without a new page: what is chosen can be linked to.
export function keep(run, page, argument, parameters) {
  history.replaceState(null, "", link(run, page, argument, parameters));
}

async function show() {
  shown.stop();
  byId("notice").hidden = true;
  forgetPageKeys();
  const at = place(),
    stopping = new AbortController(),
    main = byId("main");
  const page = { stop: () => stopping.abort(), update: null };
  shown = page;
  const ended = () => stopping.signal.aborted;
  try {
    const known = await get("api/runs", { limit: 500 }, stopping.signal);
    if (at.run === null && known.items.length === 1) return void location.replace(link(known.items[0].name));
    const make = at.run === null ? runs : PAGES[at.page];
    header(known.items, at);
    if (!make) throw Object.assign(new Error("There is no such page."), { status: 404 });
    const run = at.run === null ? null : await get(runPath(at.run), {}, stopping.signal);
    const context = {
      ...at,
      known: known.items,
      info: run,
      signal: stopping.signal,
      link,
      onKey,
      again: show,
      onStop: (stop) => stopping.signal.addEventListener("abort", stop),
      keep: (parameters) => keep(at.run, at.page, at.argument, parameters),
    };
    state(run);
    const made = await make(context);
    if (ended()) return;
    fill(main, made.node);
    page.update = made.update;
    made.ready?.();
    if (document.activeElement === document.body) main.focus({ preventScroll: true });
    if (run) follow(at.run, page, stopping.signal, run);
  } catch (error) {
    if (error.name === "AbortError" || ended()) return;
    fill(main, trouble(error.status === 404 ? "Not found" : "This page cannot be shown", error.message, show));
    if (!(error.status >= 0)) throw error;
  }
}

// Asks how far the run is: often while somebody writes it, seldom otherwise, and not while nobody looks.
function follow(name, page, signal, run) {
  let timer = 0;
  const soon = () => (Date.now() / 1000 - (run?.written ?? 0) < FRESH ? SOON : LATER);
  const ask = async () => {
    if (signal.aborted) return;
    if (!document.hidden) {
      try {
        run = await get(runPath(name), {}, signal);
        state(run);
        await page.update?.(run);
      } catch (error) {
        if (error.name === "AbortError") return;
        byId("live").dataset.state = "lost";
        fill(byId("live"), error.status === 0 ? "no connection" : "cannot be read");
      }
    }
    if (!signal.aborted) timer = setTimeout(ask, soon());
  };
  timer = setTimeout(ask, soon());
  signal.addEventListener("abort", () => clearTimeout(timer));
}

function state(run) {
  const live = byId("live");
  if (!run) return void fill(live);
  const fresh = run.open && Date.now() / 1000 - run.written < FRESH;
  const next = fresh ? "live" : "still";
  const text = fresh
    ? ["live"]
    : [h("span", { class: "long" }, run.open ? "running, " : "not running, "), `last written ${ago(run.written)}`];
  live.dataset.state = next;
  const words = text.map((it) => it.textContent ?? it).join("");
  if (live.textContent !== words) fill(live, text);
}

function header(known, { run, page }) {
  const where = byId("where"),
    tabs = byId("tabs");
  document.title = run ? `${run} · art` : "art";
  const names = known.map((it) => it.name);
  const chosen =
    names.length > 1
      ? select(
          names.map((it) => [it, it]),
          run,
          (name) => {
            location.hash = link(name);
          },
          { "aria-label": "Run" },
        )
      : h("span", { class: "name" }, run ?? "");
  fill(where, run ? [h("span", { class: "slash", "aria-hidden": "true" }, "/"), chosen] : null);
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
  const say = () => {
    fill(button, isDark() ? "☾" : "☀");
    button.setAttribute("aria-label", `${isDark() ? "Dark" : "Light"} theme; change it`);
  };
  const change = () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try {
      localStorage.setItem("art-theme", root.dataset.theme);
    } catch {
      /* then it lasts for this page */
    }
    say();
    dispatchEvent(new Event("art-theme"));
  };
  button.addEventListener("click", change);
  onKey("d", change);
  dark.addEventListener("change", () => {
    say();
    dispatchEvent(new Event("art-theme"));
  });
  say();
}

let asking = null;
onMissingKey(() => {
  asking ??= new Promise((resolve) => {
    const key = h("input", { type: "password", autocomplete: "off", "aria-label": "Key" });
    const ask = h(
      "dialog",
      { "aria-label": "Key of the server" },
      h("h2", {}, "This server asks for a key"),
      h(
        "form",
        {
          class: "row",
          onsubmit: (event) => {
            event.preventDefault();
            asking = null;
            ask.close();
            ask.remove();
            resolve(key.value);
          },
        },
        key,
        h("button", {}, "Use it"),
      ),
    );
    document.body.append(ask);
    ask.showModal();
  });
  return asking;
});

byId("skip").addEventListener("click", (event) => {
  event.preventDefault();
  byId("main").focus();
});
// What fails in answer to a click or a key is said at the foot of the page; what a page gave up when it was left is not.
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
watchWorkers();
