// Construction of page elements. Text is added only as text nodes, so the browser never parses a string as markup.

const HIDDEN = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;
const SVG = "http://www.w3.org/2000/svg";

/** Text with escapes in place of invisible characters (controls, changes of direction). */
export function visible(text) {
  return String(text).replace(HIDDEN, (found) => `\\x${found.charCodeAt(0).toString(16).padStart(2, "0")}`);
}

/** A new HTML element. `props`: class, style (an object), data, on (listeners), and attributes. */
export function el(tag, props = {}, ...children) {
  return filled(document.createElement(tag), props, children);
}

/** A new SVG element; the arguments are those of `el`. */
export function svg(tag, props = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), props, children);
}

const EXTERNAL = /^(?:https?:\/\/|mailto:)\S+$/i;

/** A link in a text of a model or a task. It opens in a new tab, and the site does not get this page's address. */
export function link(address, ...children) {
  if (typeof address !== "string" || !EXTERNAL.test(address)) return el("span", {}, children);
  const node = el("a", { rel: "noopener noreferrer nofollow", target: "_blank", title: visible(address) }, children);
  node.setAttribute("href", address);
  return node;
}

/** An id on one line. The middle of a long id is omitted, because ids differ at their ends. */
export function middle(id, tail = 8) {
  const text = String(id);
  if (text.length <= tail * 3) return el("span", { title: text }, text);
  return el("span", { class: "middle", title: text }, el("span", { style: { "max-width": `calc(100% - ${tail + 4}ch)` } }, text.slice(0, -tail)), el("span", {}, text.slice(-tail)));
}

/** Replace the children of a node. */
export function fill(node, ...children) {
  node.replaceChildren(...nodes(children));
  return node;
}

function filled(node, { style = {}, data = {}, on = {}, ...attributes }, children) {
  for (const [name, value] of Object.entries(style)) node.style.setProperty(name, value);
  for (const [name, listener] of Object.entries(on)) node.addEventListener(name, listener);
  Object.assign(node.dataset, data);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    node.setAttribute(safe(name, value), value === true ? "" : value);
  }
  node.append(...nodes(children));
  return node;
}

// Addresses of the list of runs, and of a run in the list.
const RUN_PAGES = /^(?:\.\.\/\.\.\/|run\/[\w.%~!'()*-]+\/)$/;

/** The name of an attribute. Throws an error if the attribute could run code or load anything from a server. */
function safe(name, value) {
  const runs = name.startsWith("on") || name === "srcdoc" || name === "style";
  const loads = (name === "href" && !value.startsWith("#") && !RUN_PAGES.test(value)) || (name === "src" && !value.startsWith("data:image/"));
  if (runs || loads) throw new Error(`attribute ${name} is not allowed`);
  return name;
}

function nodes(children) {
  return children
    .flat(Infinity)
    .filter((child) => child !== null && child !== undefined && child !== false && child !== "")
    .map((child) => (child instanceof Node ? child : document.createTextNode(visible(child))));
}

/** Show a message for five seconds; screen readers read it aloud. */
export function say(text) {
  const place = document.getElementById("toast");
  fill(place, text);
  place.classList.add("shown");
  clearTimeout(say.timer);
  say.timer = setTimeout(() => place.classList.remove("shown"), 5000);
}
