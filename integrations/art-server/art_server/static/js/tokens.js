// Sampled tokens, coloured by advantage or logprob, with a line of details about the focused or hovered token.

import { get, rolloutPath } from "./api.js";
import { fill, h, toggle } from "./dom.js";
import { num, plural, signed } from "./format.js";

const CALLS_PER_PAGE = 12,
  PROMPT_TOKENS = 24, // shown before each call's sampled tokens
  COLOUR_LEVELS = 5,
  COLOUR_KEY = "art-token-colour";
const MAX_SURPRISE = 3; // nats: the end of the scale, a token of probability 5 %

export class TokenView {
  constructor(run, trajectory, signal) {
    Object.assign(this, { run, trajectory, signal });
    this.colour = localStorage.getItem(COLOUR_KEY) ?? "advantage";
    this.blocks = h("div", { class: "blocks" });
    this.scale = h("div", { class: "legend" });
    this.readout = h(
      "div",
      { class: "readout", role: "status", "aria-live": "polite" },
      "Hover over a token, or focus one and press ← or →.",
    );
    this.switch = h("div");
    this.node = h("div", {}, h("div", { class: "head" }, this.switch, this.scale), this.blocks, this.readout);
    this.tokens = [];
    this.maxAdvantage = Math.max(1e-9, ...trajectory.call_list.map((call) => Math.abs(call.advantage ?? 0)));
    this.#drawSwitch();
  }

  async open(first = 0) {
    const calls = this.trajectory.call_list;
    if (!calls.length)
      return void fill(this.blocks, h("p", { class: "soft" }, "No model calls were recorded in this rollout."));
    this.remaining = calls.filter((call) => call.index >= first);
    this.tokens = [];
    fill(this.blocks);
    await this.#loadMore();
  }

  switchColour() {
    this.#setColour(this.colour === "advantage" ? "logprob" : "advantage");
    this.#drawSwitch();
  }

  #setColour(colour) {
    this.colour = colour;
    localStorage.setItem(COLOUR_KEY, colour);
    for (const { span, token, advantage } of this.tokens) span.className = this.#classes(token, advantage);
    this.#drawLegend();
  }

  #drawSwitch() {
    fill(
      this.switch,
      toggle(
        "Colour tokens by",
        [
          ["advantage", "Advantage", "Whether training makes the token more or less likely"],
          ["logprob", "Logprob", "How confident the policy was"],
        ],
        this.colour,
        (colour) => this.#setColour(colour),
      ),
    );
    this.#drawLegend();
  }

  #drawLegend() {
    const advantage = this.colour === "advantage";
    fill(
      this.scale,
      h(
        "span",
        { class: `scale ${this.colour}` },
        advantage ? `less likely −${num(this.maxAdvantage, 2)}` : "confident",
        h("i", { "aria-hidden": "true" }),
        advantage ? `+${num(this.maxAdvantage, 2)} more likely` : `surprising, −${MAX_SURPRISE} nats`,
      ),
      h("span", { class: "small soft" }, "dotted underline: forced by a grammar, not trained"),
    );
  }

  async #loadMore() {
    const { remaining } = this;
    const blocks = await Promise.all(remaining.splice(0, CALLS_PER_PAGE).map((call) => this.#block(call)));
    if (remaining !== this.remaining) return; // another call was selected meanwhile
    this.blocks.querySelector(".more")?.remove();
    this.blocks.append(...blocks);
    if (!remaining.length) return;
    const label = `Show ${plural(remaining.length, "more call")}`;
    this.blocks.append(h("button", { type: "button", class: "more", onclick: () => this.#loadMore() }, label));
  }

  async #block(call) {
    const page = await get(
      rolloutPath(this.run, this.trajectory.rollout_id, `/calls/${call.index}/tokens`),
      { prompt: PROMPT_TOKENS },
      this.signal,
    );
    const text = h("div", { class: "tokens", "data-list": true });
    if (page.prompt_total > page.prompt.length)
      text.append(h("span", { class: "context" }, `… ${num(page.prompt_total - page.prompt.length)} earlier tokens `));
    for (const token of page.prompt) text.append(h("span", { class: "context" }, displayText(token)));
    page.sampled.forEach((token, position) => text.append(this.#token(token, position, page.advantage, call)));
    if (page.total > page.sampled.length)
      text.append(h("span", { class: "context" }, ` … ${num(page.total - page.sampled.length)} more`));
    text.addEventListener("keydown", (event) => moveFocus(event, text));
    return h(
      "section",
      { class: "call-block", "aria-label": `call ${call.index}` },
      h(
        "div",
        { class: "row small soft" },
        h("b", {}, `Call ${call.index}`),
        call.agent && h("span", { class: "mono" }, call.agent),
        h("span", {}, plural(page.total, "token")),
        page.advantage !== null && h("span", {}, `advantage ${signed(page.advantage)}`),
        h("span", {}, `policy version ${page.policy_version}`),
        !page.tokenizer && page.total > 0 && h("span", { class: "chip bad" }, "no tokenizer, showing ids"),
      ),
      text,
    );
  }

  #token(token, position, advantage, call) {
    const showDetails = () => this.#showDetails(token, advantage, call, position);
    const span = h(
      "span",
      {
        class: this.#classes(token, advantage),
        tabindex: position ? -1 : 0,
        onfocus: showDetails,
        onpointerenter: showDetails,
        "data-token": true,
      },
      displayText(token),
    );
    this.tokens.push({ span, token, advantage });
    return span;
  }

  #classes(token, advantage) {
    const marks = [token.text === "" ? "blank" : "", token.forced ? "forced" : ""];
    if (this.colour === "logprob")
      marks.push(levelClass("s", token.logprob === null ? 0 : -token.logprob / MAX_SURPRISE));
    else if (advantage !== null && !token.forced)
      marks.push(levelClass(advantage < 0 ? "n" : "p", Math.abs(advantage) / this.maxAdvantage));
    return marks.filter(Boolean).join(" ");
  }

  #showDetails(token, advantage, call, position) {
    const hasLogprob = token.logprob !== null;
    fill(
      this.readout,
      h("b", {}, token.text === null ? `#${token.id}` : JSON.stringify(token.text)),
      h("span", {}, `id ${token.id}`),
      h("span", {}, `call ${call.index}, position ${position}`),
      h("span", {}, `logprob ${num(token.logprob)}`),
      hasLogprob && h("span", {}, `probability ${(100 * Math.exp(token.logprob)).toFixed(1)} %`),
      h("span", {}, advantage === null ? "no advantage" : `advantage ${signed(advantage)}`),
      token.forced && h("span", {}, "forced, not trained"),
    );
  }
}

const levelClass = (kind, share) => {
  const level = Math.min(COLOUR_LEVELS, Math.ceil(share * COLOUR_LEVELS - 1e-9));
  return level > 0 && Number.isFinite(level) ? `${kind}${level}` : "";
};

const displayText = (token) =>
  token.text === null ? ` ${token.id}` : token.text === "" ? "·" : token.text.replace(/\n/g, "↵\n");

function moveFocus(event, text) {
  const offset = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const current = event.target.closest("[data-token]");
  if (!offset || !current) return;
  const all = [...text.querySelectorAll("[data-token]")],
    next = all[all.indexOf(current) + offset];
  if (!next) return;
  event.preventDefault();
  current.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}
