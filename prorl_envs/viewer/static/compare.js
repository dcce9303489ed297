// Selection of a group's samples for a comparison, and their differences. Without access to the page.
import { callsOf, textOf, thoughts } from "./result.js";

/** Entries from the best to the worst reward; those without a reward come last. */
export function ranked(entries) {
  return [...entries].sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity) || a.sample - b.sample);
}

/** The `size` entries with the best and the worst rewards. Entries without a reward are included only if fewer than
 *  `size` entries have one. */
export function extremes(entries, size) {
  const order = ranked(entries), scored = order.filter(({ reward }) => reward !== null);
  const from = scored.length >= size ? scored : order;
  const best = Math.ceil(size / 2);
  return from.length <= size ? from : [...from.slice(0, best), ...from.slice(best - size)];
}

/** Marks of one turn, one per sample: "differs" if the sample's action is not the action of the majority, "output" if
 *  only the action's output differs from the output of the majority, else "". Without a majority every sample differs.
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

/** The value of more than half of the list, or null. */
function majority(values) {
  const counts = new Map();
  for (const value of values) counts.set(value, (counts.get(value) ?? 0) + 1);
  for (const [value, n] of counts) if (n * 2 > values.length) return value;
  return null;
}

/** The action of a turn as text: the tool calls, or the answer if there are none. */
function action(message) {
  const calls = callsOf(message);
  if (calls.length) return JSON.stringify(calls.map(({ name, arguments: given }) => [name, canonical(given)]));
  return `said ${textOf(thoughts(message)[1] ?? "").trim()}`;
}

function outputOf(turn) {
  return JSON.stringify(turn.after.map((message) => canonical(message?.content)));
}

/** A JSON value with the keys of each object sorted, so that values with another key order are equal. */
function canonical(value) {
  if (Array.isArray(value)) return value.map(canonical);
  if (value === null || typeof value !== "object") return value;
  return Object.keys(value).sort().map((key) => [key, canonical(value[key])]);
}
