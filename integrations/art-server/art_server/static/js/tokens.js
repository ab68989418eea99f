// Sampled tokens, coloured by advantage or by logprob, with a line that says all about the one that is looked at.

import { get, rolloutPath } from "./api.js";
import { fill, h, toggle } from "./dom.js";
import { num, plural, signed } from "./format.js";

const AT_FIRST = 12,
  CONTEXT = 24,
  STEPS = 5,
  CHOICE = "art-token-colour";
const SURPRISING = 3; // nats, at which the scale ends: a token of probability 5 %

export class TokenView {
  constructor(run, trajectory, signal) {
    Object.assign(this, { run, trajectory, signal });
    this.colour = localStorage.getItem(CHOICE) ?? "advantage";
    this.blocks = h("div", { class: "blocks" });
    this.scale = h("div", { class: "legend" });
    this.readout = h(
      "div",
      { class: "readout", role: "status", "aria-live": "polite" },
      "Point at a token, or focus one and use ← →.",
    );
    this.switch = h("div");
    this.node = h("div", {}, h("div", { class: "head" }, this.switch, this.scale), this.blocks, this.readout);
    this.loaded = [];
    this.most = Math.max(1e-9, ...trajectory.call_list.map((it) => Math.abs(it.advantage ?? 0)));
    this.#show();
  }

  async open(first = 0) {
    const calls = this.trajectory.call_list;
    if (!calls.length)
      return void fill(this.blocks, h("p", { class: "soft" }, "No model call was recorded in this run."));
    this.waiting = calls.filter((it) => it.index >= first);
    this.loaded = [];
    fill(this.blocks);
    await this.#more();
  }

  change() {
    this.#choose(this.colour === "advantage" ? "logprob" : "advantage");
    this.#show();
  }

  #choose(colour) {
    this.colour = colour;
    localStorage.setItem(CHOICE, colour);
    for (const { span, token, advantage } of this.loaded) span.className = this.#classes(token, advantage);
    this.#legend();
  }

  #show() {
    fill(
      this.switch,
      toggle(
        "Colour tokens by",
        [
          ["advantage", "Advantage", "What training does with the token"],
          ["logprob", "Logprob", "How sure the policy was"],
        ],
        this.colour,
        (it) => this.#choose(it),
      ),
    );
    this.#legend();
  }

  #legend() {
    const advantage = this.colour === "advantage";
    fill(
      this.scale,
      h(
        "span",
        { class: `scale ${this.colour}` },
        advantage ? `less likely −${num(this.most, 2)}` : "sure",
        h("i", { "aria-hidden": "true" }),
        advantage ? `+${num(this.most, 2)} more likely` : `surprising, −${SURPRISING} nats`,
      ),
      h("span", { class: "small soft" }, "dotted line: forced by a grammar, not trained"),
    );
  }

  async #more() {
    const { waiting } = this;
    const blocks = await Promise.all(waiting.splice(0, AT_FIRST).map((call) => this.#block(call)));
    if (waiting !== this.waiting) return; // another call was chosen meanwhile
    this.blocks.querySelector(".more")?.remove();
    this.blocks.append(...blocks);
    if (!waiting.length) return;
    const text = `Show ${plural(waiting.length, "more call")}`;
    this.blocks.append(h("button", { type: "button", class: "more", onclick: () => this.#more() }, text));
  }

  async #block(call) {
    const found = await get(
      rolloutPath(this.run, this.trajectory.rollout_id, `/calls/${call.index}/tokens`),
      { prompt: CONTEXT },
      this.signal,
    );
    const text = h("div", { class: "tokens", "data-list": true });
    if (found.prompt_total > found.prompt.length)
      text.append(h("span", { class: "shown" }, `… ${num(found.prompt_total - found.prompt.length)} tokens before `));
    for (const token of found.prompt) text.append(h("span", { class: "shown" }, shownText(token)));
    found.sampled.forEach((token, place) => text.append(this.#token(token, place, found.advantage, call)));
    if (found.total > found.sampled.length)
      text.append(h("span", { class: "shown" }, ` … ${num(found.total - found.sampled.length)} more`));
    text.addEventListener("keydown", (event) => walk(event, text));
    return h(
      "section",
      { class: "call-block", "aria-label": `call ${call.index}` },
      h(
        "div",
        { class: "row small soft" },
        h("b", {}, `Call ${call.index}`),
        call.agent && h("span", { class: "mono" }, call.agent),
        h("span", {}, plural(found.total, "token")),
        found.advantage !== null && h("span", {}, `advantage ${signed(found.advantage)}`),
        h("span", {}, `weights of version ${found.policy_version}`),
        !found.tokenizer && found.total > 0 && h("span", { class: "chip bad" }, "no tokenizer found: ids"),
      ),
      text,
    );
  }

  #token(token, place, advantage, call) {
    const told = () => this.#tell(token, advantage, call, place);
    const span = h(
      "span",
      {
        class: this.#classes(token, advantage),
        tabindex: place ? -1 : 0,
        onfocus: told,
        onpointerenter: told,
        "data-token": true,
      },
      shownText(token),
    );
    this.loaded.push({ span, token, advantage });
    return span;
  }

  #classes(token, advantage) {
    const marks = [token.text === "" ? "blank" : "", token.forced ? "forced" : ""];
    if (this.colour === "logprob") marks.push(level("s", token.logprob === null ? 0 : -token.logprob / SURPRISING));
    else if (advantage !== null && !token.forced)
      marks.push(level(advantage < 0 ? "n" : "p", Math.abs(advantage) / this.most));
    return marks.filter(Boolean).join(" ");
  }

  #tell(token, advantage, call, place) {
    const known = token.logprob !== null;
    fill(
      this.readout,
      h("b", {}, token.text === null ? `#${token.id}` : JSON.stringify(token.text)),
      h("span", {}, `id ${token.id}`),
      h("span", {}, `call ${call.index}, place ${place}`),
      h("span", {}, `logprob ${num(token.logprob)}`),
      known && h("span", {}, `probability ${(100 * Math.exp(token.logprob)).toFixed(1)} %`),
      h("span", {}, advantage === null ? "no advantage" : `advantage ${signed(advantage)}`),
      token.forced && h("span", {}, "forced, not trained"),
    );
  }
}

const level = (kind, share) => {
  const step = Math.min(STEPS, Math.ceil(share * STEPS - 1e-9));
  return step > 0 && Number.isFinite(step) ? `${kind}${step}` : "";
};

const shownText = (token) =>
  token.text === null ? ` ${token.id}` : token.text === "" ? "·" : token.text.replace(/\n/g, "↵\n");

function walk(event, text) {
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const from = event.target.closest("[data-token]");
  if (!by || !from) return;
  const all = [...text.querySelectorAll("[data-token]")],
    next = all[all.indexOf(from) + by];
  if (!next) return;
  event.preventDefault();
  from.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}
