// The reward with its components, checks and evidence; and any JSON value as a tree.
import { el } from "./dom.js";
import { number, tone } from "./format.js";
import { output } from "./output.js";
import { list, textOf } from "./result.js";

const OPEN_CHECKS = 3;

/** The reward of an episode with its components. Checks and evidence are included unless `brief` is set. */
export function verdict(result, { brief = false } = {}) {
  const { reward, failure, components = {}, evidence = {} } = result;
  const { checks, ...rest } = evidence ?? {};
  return el("div", { class: "verdict" },
    el("div", { class: `reward ${tone(reward)}` }, el("span", { class: "big" }, reward === null ? "no reward" : number(reward)), el("span", { class: "quiet" }, ended(result))),
    result.mask_sample && reward !== null && el("p", { class: "problem" }, "Not for training: mask_sample is set."),
    failure && el("div", { class: "problem" }, el("strong", {}, `${failure.kind} in ${failure.stage}`), el("p", {}, String(failure.message)), failure.hint && el("p", {}, `Hint: ${failure.hint}`)),
    Object.keys(components).length > 0 && el("table", { class: "plain" }, el("caption", {}, "Components"), el("tbody", {}, Object.entries(components).map(([name, value]) =>
      el("tr", {}, el("th", { scope: "row" }, name), el("td", { class: "meter-cell" }, el("span", { class: "meter", "aria-hidden": "true" }, el("span", { class: tone(value), style: { width: `${Math.max(0, Math.min(1, Number(value))) * 100}%` } }))), el("td", { class: "numeric" }, number(Number(value))))))),
    !brief && list(checks).length > 0 && el("div", {}, el("h3", {}, "Checks"), el("ul", { class: "checks" }, checkItems(checks))),
    !brief && Object.keys(rest).length > 0 && el("details", { class: "evidence", open: !rest.patch && matchMedia("(min-width: 1001px)").matches }, el("summary", {}, el("h3", {}, "Evidence")), tree(rest)));
}

function ended(result) {
  const why = result.stop_reason ? String(result.stop_reason).replaceAll("_", " ") : result.state;
  return result.attempts > 1 ? `${why}, ${result.attempts} attempts` : why;
}

/** The checks as list items; the first failed ones are open, because they say why the reward is not 1. */
function checkItems(checks) {
  const open = new Set(checks.filter((check) => check?.passed === false).slice(0, OPEN_CHECKS));
  return checks.map((check) => checkItem(check, open.has(check)));
}

function checkItem(check, open) {
  const { name, passed, ...rest } = check ?? {};
  const mark = passed === true ? ["good", "✓", "passed"] : passed === false ? ["bad", "✗", "failed"] : ["none", "·", "not judged"];
  return el("li", {}, el("details", { open }, el("summary", {}, el("span", { class: `verdict-mark ${mark[0]}`, "aria-hidden": "true" }, mark[1]), el("span", { class: "sr" }, mark[2]), String(name ?? "check")), tree(rest)));
}

/** A JSON value as a tree with folded branches. */
export function tree(value, depth = 0) {
  if (value === null || typeof value !== "object") return leaf(value);
  const entries = Array.isArray(value) ? value.map((item, i) => [String(i), item]) : Object.entries(value);
  if (!entries.length) return el("span", { class: "quiet" }, Array.isArray(value) ? "[]" : "{}");
  const shown = entries.slice(0, 200);
  return el("ul", { class: "tree" }, shown.map(([key, item]) => node(key, item, depth)), entries.length > shown.length && el("li", { class: "quiet" }, `and ${entries.length - shown.length} more`));
}

function node(key, item, depth) {
  const inner = item !== null && typeof item === "object" && Object.keys(item).length > 0;
  if (!inner) return el("li", { class: typeof item === "string" && (item.includes("\n") || item.length > 80) ? "leaf tall" : "leaf" }, el("div", { class: "key" }, key), el("div", { class: "value" }, leaf(item)));
  const size = Object.keys(item).length;
  const body = el("details", { open: depth < 1 && size < 30 }, el("summary", {}, key, el("span", { class: "quiet" }, ` ${size}`)));
  const unfold = () => { if (body.open && body.childElementCount === 1) body.append(tree(item, depth + 1)); };
  body.addEventListener("toggle", unfold); // the elements of a folded branch are created when it is opened
  unfold();
  return el("li", {}, body);
}

function leaf(value) {
  if (typeof value === "string") return value.includes("\n") || value.length > 200 ? output(value) : el("span", { class: "string" }, value || "“”");
  return el("span", { class: "literal" }, value === null ? "null" : textOf(value));
}
