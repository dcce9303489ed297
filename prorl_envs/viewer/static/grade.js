// The tab with the evaluation of an episode: patch, test results, checks, logs.
import { el } from "./dom.js";
import { tree, verdict } from "./evidence.js";
import { count } from "./format.js";
import { output } from "./output.js";
import { list } from "./result.js";

const STATUS = /^(?:PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS|MISSING|TIMEOUT)$/i;
const GOOD = /^(?:PASSED|XFAIL)$/i;
const LONG = 200;

/** The content of the tab. */
export function gradeView(result) {
  const { checks, patch, ...rest } = result.evidence ?? {};
  const tests = [], texts = [], other = {};
  for (const [name, value] of Object.entries(rest)) {
    if (isTests(value)) tests.push([name, value]);
    else if (typeof value === "string" && (value.length > LONG || value.includes("\n"))) texts.push([name, value]);
    else other[name] = value;
  }
  return el("div", { class: "grade" },
    el("section", {}, verdict(result, { brief: true })),
    patch !== undefined && el("section", {}, el("h2", {}, "Patch"), typeof patch === "string" && patch ? output(patch) : el("p", { class: "quiet" }, "The patch is empty: the agent changed nothing.")),
    tests.map(([name, results]) => testTable(name, results)),
    list(checks).length > 0 && el("section", {}, el("h2", {}, "Checks"), list(checks).map((check) => checkBlock(check))),
    texts.map(([name, text]) => el("section", {}, el("h2", {}, title(name)), output(text))),
    Object.keys(other).length > 0 && el("section", {}, el("h2", {}, "Further evidence"), tree(other)));
}

function title(name) {
  return String(name).replaceAll("_", " ");
}

function isTests(value) {
  if (value === null || typeof value !== "object" || Array.isArray(value)) return false;
  const results = Object.values(value);
  return results.length > 0 && results.every((status) => typeof status === "string" && STATUS.test(status));
}

/** A table of test results; tests that did not pass come first. */
function testTable(name, results) {
  const rows = Object.entries(results).sort(([, a], [, b]) => Number(GOOD.test(a)) - Number(GOOD.test(b)));
  const passed = rows.filter(([, status]) => GOOD.test(status)).length;
  return el("section", {}, el("h2", {}, `${title(name)}: ${count(passed)} of ${count(rows.length)} passed`),
    el("table", { class: "plain tests" }, el("tbody", {}, rows.map(([test, status]) => el("tr", {},
      el("td", {}, el("span", { class: `badge ${GOOD.test(status) ? "good" : "bad"}` }, status)), el("th", { scope: "row" }, test))))));
}

function checkBlock(check) {
  const { name, passed, ...rest } = check ?? {};
  const mark = passed === true ? ["good", "passed"] : passed === false ? ["bad", "failed"] : ["", "not judged"];
  return el("div", { class: "check" }, el("h3", {}, el("span", { class: `badge ${mark[0]}` }, mark[1]), ` ${String(name ?? "check")}`), tree(rest));
}
