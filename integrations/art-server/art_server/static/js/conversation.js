// Messages as a conversation. Output of agents and tools is inserted as text, never as markup.

import { h } from "./dom.js";
import { contentText, json, num, signed } from "./format.js";

const MAX_CHARACTERS = 1800; // of a text, until it is expanded
const ROLE_NAMES = {
  system: "System",
  developer: "Developer",
  user: "User",
  assistant: "Agent",
  tool: "Tool",
  function: "Tool",
};

// `calls` maps an index in `messages` to the call that sampled the message. `shared`: in a comparison, the number of leading
// messages that both conversations have in common.
export function conversation(messages, { calls = new Map(), shared = null, tools = new Map() } = {}) {
  if (!messages.length) return h("p", { class: "soft" }, "No model calls were recorded in this rollout.");
  for (const each of messages)
    for (const call of each?.tool_calls ?? []) if (call?.id) tools.set(call.id, call.function?.name ?? call.name);
  return h(
    "div",
    { class: "messages" },
    messages.map((each, index) => drawMessage(each, calls.get(index), index, shared, tools)),
  );
}

function drawMessage(message, call, index, shared, tools) {
  if (!message || typeof message !== "object") return h("article", { class: "message" }, expandable(json(message)));
  const role = ROLE_NAMES[message.role] ? message.role : "";
  const name = message.role === "tool" ? (message.name ?? tools.get(message.tool_call_id)) : message.name;
  const text = contentText(message.content),
    reasoning = message.reasoning_content ?? message.reasoning;
  const roleClass = role === "function" ? "tool" : role === "developer" ? "system" : role;
  return h(
    "article",
    { class: `message ${roleClass}${shared !== null && index < shared ? " shared" : ""}` },
    h(
      "div",
      { class: "who" },
      h("b", {}, ROLE_NAMES[message.role] ?? message.role ?? "?"),
      name && h("span", { class: "mono" }, name),
      call && callDetails(call),
      shared !== null && index === shared && h("span", { class: "first" }, "differs from here on"),
    ),
    reasoning && h("div", { class: "reasoning" }, expandable(contentText(reasoning))),
    text && expandable(text),
    (message.tool_calls ?? []).map(toolCall),
    message.function_call && toolCall({ function: message.function_call }),
    !text &&
      !message.tool_calls?.length &&
      !message.function_call &&
      !reasoning &&
      h("p", { class: "faint small" }, "(empty)"),
  );
}

const callDetails = (call) => [
  h("span", {}, `call ${call.index}`),
  call.agent && h("span", { class: "mono" }, call.agent),
  call.advantage !== null && h("span", {}, `advantage ${signed(call.advantage)}`),
  call.reward !== null && h("span", {}, `reward ${num(call.reward)}`),
  call.finish_reason !== "stop" &&
    call.finish_reason !== "tool_calls" &&
    h("span", { class: "chip bad" }, call.finish_reason),
];

// A text, truncated until it is expanded.
function expandable(text) {
  if (text.length <= MAX_CHARACTERS) return h("div", { class: "text" }, text);
  const body = h("div", { class: "text" }, `${text.slice(0, MAX_CHARACTERS)}…`);
  const button = h(
    "button",
    {
      type: "button",
      class: "more",
      onclick: () => {
        body.textContent = text;
        button.remove();
      },
    },
    `Show all ${num(text.length)} characters`,
  );
  return [body, button];
}

function toolCall(call) {
  const name = call?.function?.name ?? call?.name ?? "(unnamed)",
    input = call?.function?.arguments ?? call?.args;
  let args = input;
  if (typeof input === "string") {
    try {
      args = JSON.parse(input);
    } catch {
      /* shown as sampled */
    }
  }
  const isObject = args && typeof args === "object" && !Array.isArray(args);
  return h(
    "div",
    { class: "toolcall" },
    h("b", {}, `${name}(${isObject && Object.keys(args).length ? "" : isObject ? ")" : ""}`),
    isObject
      ? Object.keys(args).length > 0 && [
          h(
            "dl",
            {},
            Object.entries(args).map(([key, value]) => [h("dt", {}, key), h("dd", {}, json(value))]),
          ),
          h("b", {}, ")"),
        ]
      : [expandable(json(input ?? "")), h("b", {}, ")")],
  );
}

// Identifies a message's content in comparisons, without the ids that differ in every rollout.
export const contentKey = (message) =>
  JSON.stringify([
    message?.role,
    contentText(message?.content),
    (message?.tool_calls ?? []).map((call) => [call.function?.name, call.function?.arguments]),
  ]);
