// Messages as a conversation. What agents and tools said is inserted as text, never as markup.

import { h } from "./dom.js";
import { contentText, json, num, signed } from "./format.js";

const LONG = 1800;
const NAMES = {
  system: "System",
  developer: "Developer",
  user: "User",
  assistant: "Agent",
  tool: "Tool",
  function: "Tool",
};

// `calls` maps a place in `messages` to the call that answered with it; `same` says how many of the first are as elsewhere.
export function conversation(messages, { calls = new Map(), same = null, tools = new Map() } = {}) {
  if (!messages.length) return h("p", { class: "soft" }, "No model call was recorded in this run.");
  for (const it of messages)
    for (const call of it?.tool_calls ?? []) if (call?.id) tools.set(call.id, call.function?.name ?? call.name);
  return h(
    "div",
    { class: "messages" },
    messages.map((it, index) => message(it, calls.get(it), index, same, tools)),
  );
}

function message(it, call, index, same, tools) {
  if (!it || typeof it !== "object") return h("article", { class: "message" }, said(json(it)));
  const role = NAMES[it.role] ? it.role : "";
  const from = it.role === "tool" ? (it.name ?? tools.get(it.tool_call_id)) : it.name;
  const text = contentText(it.content),
    thought = it.reasoning_content ?? it.reasoning;
  const kind = role === "function" ? "tool" : role === "developer" ? "system" : role;
  return h(
    "article",
    { class: `message ${kind}${same !== null && index < same ? " same" : ""}` },
    h(
      "div",
      { class: "who" },
      h("b", {}, NAMES[it.role] ?? it.role ?? "?"),
      from && h("span", { class: "mono" }, from),
      call && answered(call),
      same !== null && index === same && h("span", { class: "first" }, "differs from here on"),
    ),
    thought && h("div", { class: "thought" }, said(contentText(thought))),
    text && said(text),
    (it.tool_calls ?? []).map(toolCall),
    it.function_call && toolCall({ function: it.function_call }),
    !text && !it.tool_calls?.length && !it.function_call && !thought && h("p", { class: "faint small" }, "(empty)"),
  );
}

const answered = (call) => [
  h("span", {}, `call ${call.index}`),
  call.agent && h("span", { class: "mono" }, call.agent),
  call.advantage !== null && h("span", {}, `advantage ${signed(call.advantage)}`),
  call.reward !== null && h("span", {}, `reward ${num(call.reward)}`),
  call.finish_reason !== "stop" &&
    call.finish_reason !== "tool_calls" &&
    h("span", { class: "chip bad" }, call.finish_reason),
];

// Long texts are cut until somebody asks for the rest.
function said(text) {
  if (text.length <= LONG) return h("div", { class: "said" }, text);
  const body = h("div", { class: "said" }, `${text.slice(0, LONG)}…`);
  const more = h(
    "button",
    {
      type: "button",
      class: "more",
      onclick: () => {
        body.textContent = text;
        more.remove();
      },
    },
    `Show all ${num(text.length)} characters`,
  );
  return [body, more];
}

function toolCall(call) {
  const name = call?.function?.name ?? call?.name ?? "(no name)",
    given = call?.function?.arguments ?? call?.args;
  let values = given;
  if (typeof given === "string") {
    try {
      values = JSON.parse(given);
    } catch {
      /* shown as it was sampled */
    }
  }
  const fields = values && typeof values === "object" && !Array.isArray(values);
  return h(
    "div",
    { class: "toolcall" },
    h("b", {}, `${name}(${fields && Object.keys(values).length ? "" : fields ? ")" : ""}`),
    fields
      ? Object.keys(values).length > 0 && [
          h(
            "dl",
            {},
            Object.entries(values).map(([key, value]) => [h("dt", {}, key), h("dd", {}, json(value))]),
          ),
          h("b", {}, ")"),
        ]
      : [said(json(given ?? "")), h("b", {}, ")")],
  );
}

// What a message says, without the ids that differ in every run.
export const gist = (it) =>
  JSON.stringify([
    it?.role,
    contentText(it?.content),
    (it?.tool_calls ?? []).map((call) => [call.function?.name, call.function?.arguments]),
  ]);
