// One run of the agent: what was said, why it got its reward, and what training made of every token.

import { get, rolloutPath, runPath } from "../api.js";
import { CallTree } from "../calltree.js";
import { conversation } from "../conversation.js";
import { fill, h, toggle } from "../dom.js";
import { ago, duration, json, num, plural, signed, stateOf, taskText } from "../format.js";
import { TokenView } from "../tokens.js";

export async function trajectory(context) {
  const it = await get(rolloutPath(context.run, context.argument), {}, context.signal);
  const body = h("div", { class: "body" });
  const asked = { view: context.parameters.get("view") ?? "messages", call: context.parameters.get("call") };
  const tokens = new TokenView(context.run, it, context.signal);
  const tree = new CallTree(it.call_list, (call) => {
    asked.call = String(call.index);
    context.keep(asked);
    draw();
  });
  const chosen = () =>
    it.call_list.find((call) => String(call.index) === asked.call) ?? it.call_list[it.call_list.length - 1];
  if (asked.call !== null && chosen()) tree.pick(chosen().index);
  const views = {
    messages: () => said(it, chosen()),
    tokens: () => {
      tokens.open(asked.call === null ? 0 : chosen().index);
      return tokens.node;
    },
    request: () => request(it, chosen()),
  };
  if (!views[asked.view]) asked.view = "messages";
  const draw = () => fill(body, views[asked.view]());
  const tabs = h("div");
  const show = (view) => {
    asked.view = view;
    context.keep(asked);
    fill(tabs, switches());
    draw();
  };
  const switches = () =>
    toggle(
      "View",
      [
        ["messages", "Conversation"],
        ["tokens", "Tokens"],
        ["request", "Request"],
      ],
      asked.view,
      show,
    );
  fill(tabs, switches());
  draw();
  context.onKey("v", () => show(asked.view === "messages" ? "tokens" : "messages"));
  context.onKey("c", () => {
    if (asked.view === "tokens") tokens.change();
    else show("tokens");
  });
  context.onKey("x", () => {
    location.hash = compareLink(context, it);
  });
  const beside = await neighbours(context, it);
  for (const [key, other] of [
    ["[", beside.before],
    ["]", beside.after],
  ])
    context.onKey(key, () => {
      if (other) location.hash = context.link(context.run, "rollout", other, { view: asked.view });
    });
  const grown = async () => {
    const now = await get(rolloutPath(context.run, it.rollout_id), {}, context.signal);
    if (now.calls !== it.calls || now.state !== it.state) context.again();
  };
  return {
    update: it.state === "running" ? grown : null,
    node: h(
      "section",
      { class: "trajectory" },
      head(context, it, beside),
      reasons(it),
      h(
        "div",
        { class: "split" },
        h(
          "aside",
          { class: "card side" },
          tree.node,
          it.omitted_calls
            ? h("p", { class: "small soft" }, `${plural(it.omitted_calls, "later call")} left out`)
            : null,
        ),
        h(
          "div",
          { class: "card" },
          h(
            "div",
            { class: "head" },
            tabs,
            h(
              "span",
              { class: "small soft" },
              chosen() ? `${plural(it.calls, "call")}, ${num(it.sampled_tokens)} sampled tokens` : "",
            ),
          ),
          body,
        ),
      ),
    ),
  };
}

const compareLink = (context, it) =>
  context.link(context.run, "compare", "", { task_id: it.task_id, a: it.rollout_id });

function head(context, it, { before, after, at, of }) {
  const [name, kind] = stateOf(it.state, context.info);
  const go = (id, text, about) =>
    id
      ? h(
          "a",
          { class: "button", href: context.link(context.run, "rollout", id), title: about, "aria-label": about },
          text,
        )
      : null;
  return h(
    "div",
    { class: "card" },
    h(
      "div",
      { class: "head" },
      h(
        "div",
        { class: "row small soft" },
        h("span", { class: `chip ${kind}` }, name),
        [it.split, it.step !== null && `step ${it.step}`].filter(Boolean).join(" · "),
        it.group &&
          h(
            "a",
            { href: context.link(context.run, "rollouts", "", { group: it.group }) },
            of > 1 ? `run ${at + 1} of ${of} in its group` : "its group",
          ),
        h("span", {}, ago(it.started)),
      ),
      h(
        "div",
        { class: "row" },
        go(before, "←", "The run before in its group"),
        go(after, "→", "The run after in its group"),
        it.task_id && h("a", { class: "button", href: compareLink(context, it) }, "Compare"),
      ),
    ),
    h("h1", {}, taskText(it.task)),
    h(
      "dl",
      { class: "facts" },
      fact("Reward", num(it.reward)),
      fact("Advantage", it.advantage === null ? "–" : signed(it.advantage)),
      fact("Time", duration(it.seconds)),
      Object.entries(it.metrics).map(([metric, value]) => fact(metric, num(value))),
    ),
    it.error && h("p", { class: "chip bad" }, it.error),
    h(
      "details",
      {},
      h("summary", {}, "Task and output in full"),
      h("h3", {}, "Task"),
      h("pre", {}, json(it.task)),
      h("h3", {}, "Output"),
      h("pre", {}, json(it.output) ?? "null"),
      h("p", { class: "hash" }, it.rollout_id),
    ),
  );
}

const fact = (name, value) => h("div", {}, h("dt", {}, name), h("dd", {}, value));

// Why the reward is what it is; second opinions stand apart, because they never count.
export function reasons(it) {
  const notes = Object.entries(it.notes).map(([name, text]) =>
    h("div", { class: "note" }, h("p", { class: "who" }, name), h("p", {}, text)),
  );
  const counted = it.scores.filter((score) => !score.aside).pop();
  const opinions = it.scores
    .filter((score) => score.aside)
    .map((score) =>
      h(
        "div",
        { class: "note" },
        h(
          "p",
          { class: "who" },
          `second opinion${score.by ? ` of ${score.by}` : ""}, does not count: ${num(score.reward)}`,
        ),
        Object.values(score.notes).map((text) => h("p", {}, text)),
      ),
    );
  if (!notes.length && !opinions.length) return null;
  return h(
    "div",
    { class: "card" },
    h(
      "h2",
      {},
      `Why ${it.reward === null ? "there is no reward" : `the reward is ${num(it.reward)}`}`,
      counted?.by && h("span", { class: "soft small" }, ` by ${counted.by}`),
    ),
    notes,
    opinions,
  );
}

// The conversation of one call with its answer; who answered what is known where another call of the run did.
export function said(it, call) {
  if (!call) return conversation([]);
  const messages = [...call.messages, call.answer].map((place) => it.messages[place]);
  const calls = new Map();
  for (const other of it.call_list) {
    if (other.index <= call.index) calls.set(it.messages[other.answer], other);
  }
  return conversation(messages, { calls });
}

function request(it, call) {
  if (!call) return conversation([]);
  const { messages, answer, tools, request: settings, ...facts } = call;
  return h(
    "div",
    {},
    h("h3", {}, "Answer"),
    h("pre", {}, json(it.messages[answer])),
    h("h3", {}, "Settings"),
    h("pre", {}, json(settings)),
    h("h3", {}, "Tools"),
    h("pre", {}, tools === null ? "none" : json(it.tools[tools])),
    h("h3", {}, "Call"),
    h("pre", {}, json(facts)),
    h("h3", {}, plural(messages.length, "message")),
    h("pre", {}, json(messages.map((place) => it.messages[place]))),
  );
}

async function neighbours(context, it) {
  if (!it.group) return { of: 1, at: 0 };
  const page = await get(
    runPath(context.run, "/trajectories"),
    { group: it.group, order: "oldest", limit: 200 },
    context.signal,
  );
  const ids = page.items
      .filter((other) => other.state !== "lost" || other.rollout_id === it.rollout_id)
      .map((other) => other.rollout_id),
    at = ids.indexOf(it.rollout_id);
  return { before: ids[at - 1], after: ids[at + 1], at, of: ids.length };
}
