// A trajectory as one of two columns: its result, then the conversation or the tokens.

import { contentKey } from "../conversation.js";
import { h, toggle } from "../dom.js";
import { num, plural, signed, STATES } from "../format.js";
import { TokenView } from "../tokens.js";
import { callConversation, reasons } from "./trajectory.js";

const VIEWS = [
  ["messages", "Conversation"],
  ["tokens", "Tokens"],
];

export const viewSwitch = (view, onSelect) => toggle("View", VIEWS, view, onSelect);

const messagesOf = (trajectory) => {
  const last = trajectory.call_list[trajectory.call_list.length - 1];
  return last ? [...last.messages, last.answer].map((index) => trajectory.messages[index]) : [];
};

// How many messages two trajectories have in common, from the first on.
export function sharedMessages(first, second) {
  const [a, b] = [messagesOf(first), messagesOf(second)];
  let length = 0;
  while (length < a.length && length < b.length && contentKey(a[length]) === contentKey(b[length])) length += 1;
  return length;
}

// `label` names the column, `head` is above the result; the first `shared` messages are the same in both columns.
export function transcript(context, run, trajectory, { label, head, shared, view }) {
  const [state, kind] = STATES[trajectory.state];
  const last = trajectory.call_list[trajectory.call_list.length - 1];
  const tokens = view === "tokens" ? new TokenView(run, trajectory, context.signal) : null;
  tokens?.open();
  return h(
    "section",
    { class: "side-by-side", "aria-label": label },
    h(
      "div",
      { class: "side-head" },
      head,
      h(
        "div",
        { class: "row small soft" },
        h("b", {}, `reward ${num(trajectory.reward)}`),
        h("span", {}, `advantage ${trajectory.advantage === null ? "–" : signed(trajectory.advantage)}`),
        h("span", { class: `chip ${kind}` }, state),
        h("span", {}, plural(trajectory.calls, "call")),
        h("a", { href: context.link(run, "rollout", trajectory.rollout_id) }, "open"),
      ),
    ),
    tokens ? tokens.node : callConversation(trajectory, last, { shared }),
    reasons(trajectory),
  );
}
