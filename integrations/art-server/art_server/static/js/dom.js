// Elements from plain calls. Text is only ever inserted as text: what agents say is hostile until shown otherwise.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "g", "line", "rect", "circle", "path", "text", "title"]);

export function h(tag, attributes = {}, ...children) {
  const inSvg = SVG_TAGS.has(tag) || attributes.svg;
  const element = inSvg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false || name === "svg") continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "disabled" || name === "selected")
      element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  add(element, children);
  return element;
}

export function add(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

export function fill(element, ...children) {
  element.replaceChildren();
  return add(element, children);
}

export const byId = (id) => document.getElementById(id);

// Whether somebody is in it, with the keyboard or with a click that has begun: then it is not drawn anew.
export const inUse = (element) => element.contains(document.activeElement) || element.matches(":active");

// A number with its name and a line about it; `share` draws how far it is.
export function tile(name, value, about, share = null) {
  const bar = share === null ? null : h("div", { class: "bar", "aria-hidden": "true" }, h("i"));
  if (bar) bar.firstChild.style.width = `${Math.min(100, 100 * share)}%`;
  return h("div", { class: "card tile" }, h("dt", {}, name), h("dd", {}, value), h("p", {}, about), bar);
}

// A row of buttons of which one is on.
export function toggle(label, options, chosen, choose) {
  const buttons = options.map(([value, text, about]) =>
    h(
      "button",
      {
        type: "button",
        "aria-pressed": String(value === chosen),
        title: about,
        onclick: () => {
          buttons.forEach((it, index) => it.setAttribute("aria-pressed", String(options[index][0] === value)));
          choose(value);
        },
      },
      text,
    ),
  );
  return h("div", { class: "switch", role: "group", "aria-label": label }, buttons);
}

export const field = (label, control) => h("label", { class: "field" }, label, control);

export function select(options, chosen, choose, attributes = {}) {
  const control = h(
    "select",
    { ...attributes, onchange: () => choose(control.value) },
    options.map(([value, text]) => h("option", { value, selected: value === chosen }, text)),
  );
  return control;
}

export const empty = (title, ...said) =>
  h(
    "div",
    { class: "card empty" },
    h("h2", {}, title),
    said.map((it) => h("p", {}, it)),
  );

export const trouble = (title, said, again) =>
  h(
    "div",
    { class: "card trouble", role: "alert" },
    h("h2", {}, title),
    h("p", {}, said),
    again && h("button", { type: "button", onclick: again }, "Try again"),
  );

export function pager(page, go) {
  const { total, limit, offset } = page;
  if (total <= limit && !offset) return null;
  const to = Math.min(total, offset + page.items.length);
  return h(
    "div",
    { class: "pager" },
    h("span", {}, `${offset + 1}–${to} of ${total.toLocaleString("en")}`),
    h(
      "div",
      { class: "row" },
      h("button", { type: "button", disabled: !offset, onclick: () => go(Math.max(0, offset - limit)) }, "← Back"),
      h("button", { type: "button", disabled: to >= total, onclick: () => go(offset + limit) }, "More →"),
    ),
  );
}
