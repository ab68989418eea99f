// One rollout: its conversation, the reasons for its reward, and its tokens with advantages and logprobs.

import { get, rolloutPath, runPath } from "../api.js";
import { CallTree } from "../calltree.js";
import { conversation } from "../conversation.js";
import { fill, h, toggle } from "../dom.js";
import { ago, duration, json, num, plural, signed, stateOf, taskText } from "../format.js";
import { TokenView } from "../tokens.js";

export async function trajectory(context) {
  const rollout = await get(rolloutPath(context.run, context.argument), {}, context.signal);
  const body = h("div", { class: "body" });
  const selection = { view: context.parameters.get("view") ?? "messages", call: context.parameters.get("call") };
  const tokens = new TokenView(context.run, rollout, context.signal);
  const tree = new CallTree(rollout.call_list, (call) => {
    selection.call = String(call.index);
    context.saveParameters(selection);
    draw();
  });
  const selectedCall = () =>
    rollout.call_list.find((call) => String(call.index) === selection.call) ??
    rollout.call_list[rollout.call_list.length - 1];
  if (selection.call !== null && selectedCall()) tree.select(selectedCall().index);
  const views = {
    messages: () => callConversation(rollout, selectedCall()),
    tokens: () => {
      tokens.open(selection.call === null ? 0 : selectedCall().index);
      return tokens.node;
    },
    request: () => request(rollout, selectedCall()),
  };
  if (!views[selection.view]) selection.view = "messages";
  const draw = () => fill(body, views[selection.view]());
  const tabs = h("div");
  const show = (view) => {
    selection.view = view;
    context.saveParameters(selection);
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
      selection.view,
      show,
    );
  fill(tabs, switches());
  draw();
  context.onKey("v", () => show(selection.view === "messages" ? "tokens" : "messages"));
  context.onKey("c", () => {
    if (selection.view === "tokens") tokens.switchColour();
    else show("tokens");
  });
  context.onKey("x", () => {
    location.hash = compareLink(context, rollout);
  });
  const neighbours = await findNeighbours(context, rollout);
  for (const [key, other] of [
    ["[", neighbours.previous],
    ["]", neighbours.next],
  ])
    context.onKey(key, () => {
      if (other) location.hash = context.link(context.run, "rollout", other, { view: selection.view });
    });
  const refresh = async () => {
    const current = await get(rolloutPath(context.run, rollout.rollout_id), {}, context.signal);
    if (current.calls !== rollout.calls || current.state !== rollout.state) context.reload();
  };
  return {
    update: rollout.state === "running" ? refresh : null,
    node: h(
      "section",
      { class: "trajectory" },
      head(context, rollout, neighbours),
      reasons(rollout),
      h(
        "div",
        { class: "split" },
        h(
          "aside",
          { class: "card side" },
          tree.node,
          rollout.omitted_calls
            ? h("p", { class: "small soft" }, `${plural(rollout.omitted_calls, "later call")} not shown`)
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
              selectedCall() ? `${plural(rollout.calls, "call")}, ${num(rollout.sampled_tokens)} sampled tokens` : "",
            ),
          ),
          body,
        ),
      ),
    ),
  };
}

const compareLink = (context, rollout) =>
  context.link(context.run, "compare", "", { task_id: rollout.task_id, a: rollout.rollout_id });

function head(context, rollout, { previous, next, index, count }) {
  const [name, kind] = stateOf(rollout.state, context.info);
  const navigation = (id, text, label) =>
    id
      ? h(
          "a",
          { class: "button", href: context.link(context.run, "rollout", id), title: label, "aria-label": label },
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
        [rollout.split, rollout.step !== null && `step ${rollout.step}`].filter(Boolean).join(" · "),
        rollout.group &&
          h(
            "a",
            { href: context.link(context.run, "rollouts", "", { group: rollout.group }) },
            count > 1 ? `rollout ${index + 1} of ${count} in its group` : "its group",
          ),
        h("span", {}, ago(rollout.started)),
      ),
      h(
        "div",
        { class: "row" },
        navigation(previous, "←", "Previous rollout in the group"),
        navigation(next, "→", "Next rollout in the group"),
        rollout.task_id && h("a", { class: "button", href: compareLink(context, rollout) }, "Compare"),
      ),
    ),
    h("h1", {}, taskText(rollout.task)),
    h(
      "dl",
      { class: "facts" },
      fact("Reward", num(rollout.reward)),
      fact("Advantage", rollout.advantage === null ? "–" : signed(rollout.advantage)),
      fact("Time", duration(rollout.seconds)),
      Object.entries(rollout.metrics).map(([metric, value]) => fact(metric, num(value))),
    ),
    rollout.error && h("p", { class: "chip bad" }, rollout.error),
    h(
      "details",
      {},
      h("summary", {}, "Full task and output"),
      h("h3", {}, "Task"),
      h("pre", {}, json(rollout.task)),
      h("h3", {}, "Output"),
      h("pre", {}, json(rollout.output) ?? "null"),
      h("p", { class: "hash" }, rollout.rollout_id),
    ),
  );
}

const fact = (name, value) => h("div", {}, h("dt", {}, name), h("dd", {}, value));

// The explanations of the reward. Second opinions are shown separately, because they never count.
export function reasons(rollout) {
  const notes = Object.entries(rollout.notes).map(([name, text]) =>
    h("div", { class: "note" }, h("p", { class: "who" }, name), h("p", {}, text)),
  );
  const counted = rollout.scores.filter((score) => !score.aside).pop();
  const opinions = rollout.scores
    .filter((score) => score.aside)
    .map((score) =>
      h(
        "div",
        { class: "note" },
        h(
          "p",
          { class: "who" },
          `second opinion${score.by ? ` by ${score.by}` : ""}, doesn't count: ${num(score.reward)}`,
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
      `Why ${rollout.reward === null ? "there is no reward" : `the reward is ${num(rollout.reward)}`}`,
      counted?.by && h("span", { class: "soft small" }, ` by ${counted.by}`),
    ),
    notes,
    opinions,
  );
}

// A call's prompt and answer; messages that earlier calls of the rollout sampled have their call's details.
export function callConversation(rollout, call, { shared } = {}) {
  if (!call) return conversation([]);
  const shown = [...call.messages, call.answer];
  const messages = shown.map((index) => rollout.messages[index]);
  return conversation(messages, { calls: callsAt(shown, rollout.call_list, call), shared });
}

// The calls that sampled the messages `shown`, by position: equal messages have the same index, so it doesn't tell them apart.
function callsAt(shown, callList, last) {
  const calls = new Map();
  for (const other of callList) {
    const position = other.messages.length;
    if (other.index > last.index || shown[position] !== other.answer) continue;
    // Another agent's call may have the same answer at this position, after other messages.
    if (!calls.has(position) || other.messages.every((index, place) => shown[place] === index))
      calls.set(position, other);
  }
  return calls;
}

function request(rollout, call) {
  if (!call) return conversation([]);
  const { messages, answer, tools, request: settings, ...facts } = call;
  return h(
    "div",
    {},
    h("h3", {}, "Answer"),
    h("pre", {}, json(rollout.messages[answer])),
    h("h3", {}, "Settings"),
    h("pre", {}, json(settings)),
    h("h3", {}, "Tools"),
    h("pre", {}, tools === null ? "none" : json(rollout.tools[tools])),
    h("h3", {}, "Call"),
    h("pre", {}, json(facts)),
    h("h3", {}, plural(messages.length, "message")),
    h("pre", {}, json(messages.map((index) => rollout.messages[index]))),
  );
}

async function findNeighbours(context, rollout) {
  if (!rollout.group) return { count: 1, index: 0 };
  const page = await get(
    runPath(context.run, "/trajectories"),
    { group: rollout.group, order: "oldest", limit: 200 },
    context.signal,
  );
  const ids = page.items
      .filter((other) => other.state !== "lost" || other.rollout_id === rollout.rollout_id)
      .map((other) => other.rollout_id),
    index = ids.indexOf(rollout.rollout_id);
  return { previous: ids[index - 1], next: ids[index + 1], index, count: ids.length };
}
