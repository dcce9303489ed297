// Texts of tools and models with terminal colours, diffs and images. All of these texts may be hostile.
import { el, visible } from "./dom.js";
import { count } from "./format.js";

const IMAGE = /data:image\/(?:png|jpeg|gif|webp);base64,[A-Za-z0-9+/]{16,}={0,2}/g;
// An unfinished sequence, such as a title without an end, does not match; it would hide all following text.
const ESCAPE = /\u001b(?:\[([0-9;:?]*)[ -/]*([@-~])|\][^\u0007\u001b\n]{0,500}(?:\u0007|\u001b\\)|[@-Z\\^_]|[ -/]+[0-~])/g;
const SHOWN_LINES = 40, SHOWN_CHARS = 6000;
const HEADER = /^(?:diff --git |index |--- |\+\+\+ |new file|deleted file|rename |similarity |Binary files )/;

/** An element for any text: image data as images, diffs with colours, other text as in a terminal. */
export function output(text, { kind = "" } = {}) {
  const parts = [];
  let at = 0;
  for (const found of text.matchAll(IMAGE)) {
    if (found.index > at) parts.push(block(text.slice(at, found.index), kind));
    parts.push(image(found[0]));
    at = found.index + found[0].length;
  }
  if (at < text.length || !parts.length) parts.push(block(text.slice(at), kind));
  return parts.length === 1 ? parts[0] : el("div", {}, parts);
}

/** An image from a data URL; any other URL is shown as text. */
export function image(url) {
  const dataUrl = new RegExp(`^(?:${IMAGE.source})$`);
  if (typeof url !== "string" || !dataUrl.test(url)) return el("p", { class: "quiet" }, `image that is not in the data: ${String(url).slice(0, 200)}`);
  return el("img", { class: "picture", src: url, alt: "image in the conversation" });
}

function block(text, kind) {
  const lines = text.split("\n");
  const long = lines.length > SHOWN_LINES + 10 || text.length > SHOWN_CHARS * 1.5;
  const render = kind !== "plain" && isDiff(lines) ? diffOf : terminal;
  const pre = el("pre", { class: `output ${kind}`, tabindex: long ? "0" : null });
  if (!long) {
    pre.append(render(text));
    return pre;
  }
  const head = lines.slice(0, SHOWN_LINES).join("\n").slice(0, SHOWN_CHARS);
  pre.append(render(head));
  const more = el("button", { class: "more", type: "button" }, `Show all ${count(lines.length)} lines, ${count(text.length)} characters`);
  more.addEventListener("click", () => {
    const focused = document.activeElement === more;
    pre.replaceChildren(render(text));
    more.remove();
    if (focused) pre.focus();
  });
  return el("div", { class: "clipped" }, pre, more);
}

function isDiff(lines) {
  let hunks = 0, files = 0;
  for (const line of lines.slice(0, 400)) {
    hunks += /^@@ -\d+(?:,\d+)? \+\d+(?:,\d+)? @@/.test(line);
    files += line.startsWith("diff --git ") || line.startsWith("+++ ");
  }
  return hunks > 0 && files > 0;
}

/** A unified diff with coloured lines. */
export function diffOf(text) {
  return fragment(text.split("\n").map((line) => {
    const kind = HEADER.test(line) ? "head" : line.startsWith("@@") ? "hunk" : line[0] === "+" ? "add" : line[0] === "-" ? "del" : "";
    return el("span", { class: `line ${kind}` }, visible(line), "\n");
  }));
}

/** A diff of an edit's old and new text; up to three common lines at each end are context. */
export function replacement(before, after) {
  const old = before.split("\n"), now = after.split("\n");
  let head = 0, tail = 0;
  while (head < old.length && head < now.length && old[head] === now[head]) head += 1;
  while (tail < old.length - head && tail < now.length - head && old.at(-1 - tail) === now.at(-1 - tail)) tail += 1;
  const lines = (list, sign, kind) => list.map((line) => el("span", { class: `line ${kind}` }, `${sign}${visible(line)}\n`));
  return el("pre", { class: "output diff" },
    lines(old.slice(0, head).slice(-3), " ", ""),
    lines(old.slice(head, old.length - tail), "-", "del"),
    lines(now.slice(head, now.length - tail), "+", "add"),
    lines(tail ? old.slice(-tail).slice(0, 3) : [], " ", ""));
}

/** A text as a terminal shows it: with colours, and with the last state of overwritten lines. */
export function terminal(text) {
  text = text.replaceAll("\r\n", "\n");
  if (text.includes("\r")) text = text.split("\n").map((line) => line.replace(/\r+$/, "").split("\r").at(-1)).join("\n");
  if (text.includes("\b")) text = withoutErased(text);
  const style = { fg: "", bg: "", flags: new Set() };
  const parts = [];
  let at = 0;
  const take = (part) => part && parts.push(styled(part, style));
  for (const found of text.matchAll(ESCAPE)) {
    take(text.slice(at, found.index));
    at = found.index + found[0].length;
    if (found[2] === "m") colour(style, found[1]);
  }
  take(text.slice(at));
  return fragment(parts);
}

function withoutErased(text) {
  const visibleChars = [];
  for (const char of text) {
    if (char !== "\b") visibleChars.push(char);
    else if (visibleChars.length && visibleChars.at(-1) !== "\n") visibleChars.pop();
  }
  return visibleChars.join("");
}

function styled(text, { fg, bg, flags }) {
  if (!fg && !bg && !flags.size) return document.createTextNode(visible(text));
  const classes = [...flags].map((flag) => `ansi-${flag}`), style = {};
  if (fg.startsWith("#")) style.color = fg; else if (fg) classes.push(`ansi-fg-${fg}`);
  if (bg.startsWith("#")) style["background-color"] = bg; else if (bg) classes.push(`ansi-bg-${bg}`);
  return el("span", { class: classes.join(" "), style }, visible(text));
}

const FLAGS = { 1: "bold", 2: "dim", 3: "italic", 4: "underline", 7: "inverse", 9: "strike" };

function colour(style, codes) {
  const list = (codes || "0").split(/[;:]/).map((code) => Number(code) || 0);
  for (let i = 0; i < list.length; i += 1) {
    const code = list[i];
    if (code === 0) { style.fg = style.bg = ""; style.flags.clear(); }
    else if (FLAGS[code]) style.flags.add(FLAGS[code]);
    else if (code === 22) { style.flags.delete("bold"); style.flags.delete("dim"); }
    else if (FLAGS[code - 20]) style.flags.delete(FLAGS[code - 20]);
    else if (code === 39) style.fg = "";
    else if (code === 49) style.bg = "";
    else if (code >= 30 && code <= 37) style.fg = String(code - 30);
    else if (code >= 90 && code <= 97) style.fg = String(code - 82);
    else if (code >= 40 && code <= 47) style.bg = String(code - 40);
    else if (code >= 100 && code <= 107) style.bg = String(code - 92);
    else if (code === 38 || code === 48) {
      const wide = list[i + 1] === 2;
      const value = wide ? hex(list.slice(i + 2, i + 5)) : palette(list[i + 2]);
      style[code === 38 ? "fg" : "bg"] = value;
      i += wide ? 4 : 2;
    }
  }
}

function palette(index = 0) {
  if (index < 16) return String(index);
  if (index > 231) return hex(Array(3).fill(8 + (index - 232) * 10));
  const steps = [0, 95, 135, 175, 215, 255], n = index - 16;
  return hex([steps[Math.floor(n / 36) % 6], steps[Math.floor(n / 6) % 6], steps[n % 6]]);
}

function hex(channels) {
  return `#${[0, 1, 2].map((i) => Math.min(255, Math.max(0, channels[i] ?? 0)).toString(16).padStart(2, "0")).join("")}`;
}

function fragment(children) {
  const made = document.createDocumentFragment();
  made.append(...children);
  return made;
}
