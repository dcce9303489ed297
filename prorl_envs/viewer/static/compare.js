// Which samples of a group to compare, and where they differ. Pure.
import { callsOf, textOf, thoughts } from "./result.js";

/** Entries from the best to the worst reward; those without a reward come last. */
export function ranked(entries) {
  return [...entries].sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity) || a.sample - b.sample);
}

/** The best and the worst of these entries, `size` in all; those without a reward only if others are too few. */
export function extremes(entries, size) {
  const order = ranked(entries), scored = order.filter(({ reward }) => reward !== null);
  const from = scored.length >= size ? scored : order;
  const best = Math.ceil(size / 2);
  return from.length <= size ? from : [...from.slice(0, best), ...from.slice(best - size)];
}

/** Marks of one turn, one for each sample: "differs" if its action is not that of the majority, "output" if only the
 *  output of the action is not; else "". Without a majority every sample differs.
 *  @param turns the turn of each sample, or undefined for a sample that has ended. */
export function differences(turns) {
  const actions = turns.map((turn) => (turn ? action(turn.message) : ""));
  const usual = majority(actions);
  const outputs = turns.map((turn, i) => (turn && actions[i] === usual ? outputOf(turn) : null));
  const usualOutput = majority(outputs.filter((output) => output !== null));
  return actions.map((act, i) => {
    if (act !== usual) return "differs";
    return outputs[i] !== null && outputs[i] !== usualOutput ? "output" : "";
  });
}

/** The value that more than half of these have, or null. */
function majority(values) {
  const counts = new Map();
  for (const value of values) counts.set(value, (counts.get(value) ?? 0) + 1);
  for (const [value, n] of counts) if (n * 2 > values.length) return value;
  return null;
}

/** What a model did in a turn, as text: its calls, or what it said if it called nothing. */
function action(message) {
  const calls = callsOf(message);
  if (calls.length) return JSON.stringify(calls.map(({ name, arguments: given }) => [name, canonical(given)]));
  return `said ${textOf(thoughts(message)[1] ?? "").trim()}`;
}

function outputOf(turn) {
  return JSON.stringify(turn.after.map((message) => canonical(message?.content)));
}

/** JSON with the keys of each object in order: their order means nothing. */
function canonical(value) {
  if (Array.isArray(value)) return value.map(canonical);
  if (value === null || typeof value !== "object") return value;
  return Object.keys(value).sort().map((key) => [key, canonical(value[key])]);
}
