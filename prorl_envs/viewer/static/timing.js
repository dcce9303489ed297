// Waterfall chart of an episode's time. A result has durations but no clock times, so each bar starts at the end of the
// previous bar. Waiting times have no bar.
import { el } from "./dom.js";
import { seconds } from "./format.js";
import { conversationOf } from "./result.js";

/** The bars {name, kind, start, length, turn} in seconds, and the `total` time. Without access to the page. */
export function bars(result) {
  const t = result.timings ?? {}, found = [];
  let at = 0;
  const add = (name, kind, length, turn = 0) => {
    if (!(length > 0)) return;
    found.push({ name, kind, start: at, length, turn });
    at += length;
  };
  if (t.queued_s > 0) found.push({ name: "queued", kind: "queue", start: 0, length: t.queued_s, turn: 0 }); // has no bar
  add("INIT", "init", t.init_s);
  const records = conversationOf(result).turns.filter((turn) => turn.record);
  let turnsTotal = 0;
  for (const { number, record } of records) {
    add(`turn ${number}, model`, "model", record.model_s, number);
    add(`turn ${number}, tools`, "tools", record.tools_s, number);
    turnsTotal += record.model_s + record.tools_s;
  }
  add(records.length ? "RUN, other" : "RUN", "run", (t.run_s ?? 0) - turnsTotal);
  if (t.held_s > 0) found.push({ name: "held for new weights", kind: "queue", start: at, length: t.held_s, turn: 0 });
  add("EVAL", "eval", t.eval_s);
  return { bars: found, total: at };
}

/** The chart. `onTurn(number)` goes to a turn. */
export function waterfall(result, onTurn) {
  const { bars: found, total } = bars(result);
  if (!total) return el("p", { class: "quiet" }, "No time was measured.");
  const share = new Map();
  for (const { kind, length } of found) share.set(kind, (share.get(kind) ?? 0) + length);
  return el("div", { class: "waterfall" },
    el("div", { class: "legend" }, [...share].map(([kind, length]) => el("span", {}, el("span", { class: `dot ${kind}`, "aria-hidden": "true" }), `${KINDS[kind]} ${seconds(length)}`))),
    el("div", { class: "bars", role: "table", "aria-label": "Time by step", tabindex: found.length > 14 ? "0" : null },
      found.map((bar) => el("div", { class: "bar-row", role: "row" },
        el("span", { class: "bar-name", role: "rowheader" }, bar.turn ? el("button", { type: "button", class: "link", on: { click: () => onTurn(bar.turn) } }, bar.name) : bar.name),
        el("span", { class: "bar-track", role: "presentation" }, bar.kind !== "queue" && el("span", { class: `bar-fill ${bar.kind}`, style: { left: `${(bar.start / total) * 100}%`, width: `max(2px, ${(bar.length / total) * 100}%)` } })),
        el("span", { class: "bar-time numeric", role: "cell" }, seconds(bar.length))))),
    result.attempts > 1 && el("p", { class: "quiet" }, `The stages include all ${result.attempts} attempts; the turns are those of the last attempt.`));
}

const KINDS = { queue: "waiting", init: "INIT", model: "model", tools: "tools", run: "RUN, other", eval: "EVAL" };
