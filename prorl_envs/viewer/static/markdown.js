// Elements for parsed Markdown. The server makes the trees (viewer/markdown.py); unknown elements become text.
import { el, link } from "./dom.js";
import { image } from "./output.js";

const PLAIN = new Set(["p", "ul", "li", "blockquote", "strong", "em", "s", "hr", "br", "thead", "tbody", "tr", "code"]);
const ALIGNMENTS = new Set(["left", "right", "center"]);

/** The parsed Markdown of a result's messages. If the request fails, the list is empty and the pages show raw text. */
export async function parsedTexts(source, key) {
  try {
    return await source.markdown(key);
  } catch {
    return [];
  }
}

/** The element for a tree. */
export function markdown(tree) {
  return el("div", { class: "markdown" }, tree.map(node));
}

function node(item) {
  if (!Array.isArray(item)) return String(item);
  const [name, inner, value] = item, children = inner.map(node);
  if (PLAIN.has(name)) return el(name, {}, children);
  if (name === "heading") return el("div", { class: `heading-${value}`, role: "heading", "aria-level": String(Math.min(6, value + 2)) }, children);
  if (name === "ol") return el("ol", { start: String(value) }, children);
  if (name === "pre") return el("pre", { class: "output code", tabindex: "0", "aria-label": value ? `code: ${value}` : "code" }, children);
  if (name === "table") return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "table" }, el("table", {}, children));
  if (name === "th" || name === "td") return el(name, ALIGNMENTS.has(value) ? { style: { "text-align": value } } : {}, children);
  if (name === "a") return link(value, children);
  if (name === "img") return value.startsWith("data:") ? image(value) : el("span", { class: "quiet" }, `[image, not loaded: ${[...children, value].filter(Boolean).join(", ")}]`);
  return children;
}
