// Creates DOM elements. Text is only ever inserted as text nodes, because agents' output is untrusted.

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
  append(element, children);
  return element;
}

export function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

export function fill(element, ...children) {
  element.replaceChildren();
  return append(element, children);
}

export const byId = (id) => document.getElementById(id);

// Whether the element has the focus or is being clicked; then it must not be redrawn.
export const inUse = (element) => element.contains(document.activeElement) || element.matches(":active");

// A number with its name and a line below it; `share`, from 0 to 1, adds a progress bar.
export function tile(name, value, caption, share = null) {
  const bar = share === null ? null : h("div", { class: "bar", "aria-hidden": "true" }, h("i"));
  if (bar) bar.firstChild.style.width = `${Math.min(100, 100 * share)}%`;
  return h("div", { class: "card tile" }, h("dt", {}, name), h("dd", {}, value), h("p", {}, caption), bar);
}

// A row of buttons, of which one is pressed.
export function toggle(label, options, selected, onSelect) {
  const buttons = options.map(([value, text, title]) =>
    h(
      "button",
      {
        type: "button",
        "aria-pressed": String(value === selected),
        title,
        onclick: () => {
          buttons.forEach((button, index) => button.setAttribute("aria-pressed", String(options[index][0] === value)));
          onSelect(value);
        },
      },
      text,
    ),
  );
  return h("div", { class: "switch", role: "group", "aria-label": label }, buttons);
}

export const field = (label, control) => h("label", { class: "field" }, label, control);

export function select(options, selected, onSelect, attributes = {}) {
  const control = h(
    "select",
    { ...attributes, onchange: () => onSelect(control.value) },
    options.map(([value, text]) => h("option", { value, selected: value === selected }, text)),
  );
  return control;
}

export const emptyCard = (title, ...lines) =>
  h(
    "div",
    { class: "card empty" },
    h("h2", {}, title),
    lines.map((line) => h("p", {}, line)),
  );

export const errorCard = (title, message, retry) =>
  h(
    "div",
    { class: "card trouble", role: "alert" },
    h("h2", {}, title),
    h("p", {}, message),
    retry && h("button", { type: "button", onclick: retry }, "Try again"),
  );

export function pager(page, onOffset) {
  const { total, limit, offset } = page;
  if (total <= limit && !offset) return null;
  const end = Math.min(total, offset + page.items.length);
  return h(
    "div",
    { class: "pager" },
    h("span", {}, `${offset + 1}–${end} of ${total.toLocaleString("en")}`),
    h(
      "div",
      { class: "row" },
      h(
        "button",
        { type: "button", disabled: !offset, onclick: () => onOffset(Math.max(0, offset - limit)) },
        "← Previous",
      ),
      h("button", { type: "button", disabled: end >= total, onclick: () => onOffset(offset + limit) }, "Next →"),
    ),
  );
}
