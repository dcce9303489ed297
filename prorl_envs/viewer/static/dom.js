// Builds the page. Text reaches it as text nodes alone: no string is ever read as markup.

const HIDDEN = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;
const SVG = "http://www.w3.org/2000/svg";

/** Text with what cannot be seen (controls, changes of direction) written out. */
export function visible(text) {
  return String(text).replace(HIDDEN, (found) => `\\x${found.charCodeAt(0).toString(16).padStart(2, "0")}`);
}

/** An element. `props`: class, style (an object), data, on (listeners), and attributes. */
export function el(tag, props = {}, ...children) {
  return filled(document.createElement(tag), props, children);
}

/** The same for SVG. */
export function svg(tag, props = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), props, children);
}

const EXTERNAL = /^(?:https?:\/\/|mailto:)\S+$/i;

/** A link that text of a model or a task holds. It opens apart, and learns nothing of this page. */
export function link(address, ...children) {
  if (typeof address !== "string" || !EXTERNAL.test(address)) return el("span", {}, children);
  const node = el("a", { rel: "noopener noreferrer nofollow", target: "_blank", title: visible(address) }, children);
  node.setAttribute("href", address);
  return node;
}

/** An id on one line: if it is too long, its middle is left out, as ids differ at their ends. */
export function middle(id, tail = 8) {
  const text = String(id);
  if (text.length <= tail * 3) return el("span", { title: text }, text);
  return el("span", { class: "middle", title: text }, el("span", { style: { "max-width": `calc(100% - ${tail + 4}ch)` } }, text.slice(0, -tail)), el("span", {}, text.slice(-tail)));
}

/** Put these, and nothing else, into a node. */
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

// The list of runs, and a run of it.
const OWN = /^(?:\.\.\/\.\.\/|run\/[\w.%~!'()*-]+\/)$/;

/** The name of an attribute, once it is certain that it runs nothing and asks nobody. */
function safe(name, value) {
  const runs = name.startsWith("on") || name === "srcdoc" || name === "style";
  const asks = (name === "href" && !value.startsWith("#") && !OWN.test(value)) || (name === "src" && !value.startsWith("data:image/"));
  if (runs || asks) throw new Error(`attribute ${name} is not set here`);
  return name;
}

function nodes(children) {
  return children
    .flat(Infinity)
    .filter((child) => child !== null && child !== undefined && child !== false && child !== "")
    .map((child) => (child instanceof Node ? child : document.createTextNode(visible(child))));
}

/** Say something to everybody, those who only hear it included. */
export function say(text) {
  const place = document.getElementById("toast");
  fill(place, text);
  place.classList.add("shown");
  clearTimeout(say.timer);
  say.timer = setTimeout(() => place.classList.remove("shown"), 5000);
}
