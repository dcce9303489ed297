// Filter, sorting and grouping of episodes. The page's address contains the state. Without access to the page.
import { active, outcome } from "./format.js";

const COMPARISON = /^(reward|turns|tokens|sampled|time|attempts|drift|rows)(<=|>=|<|>|=)(-?\d+(?:\.\d+)?)$/;
export const VALUES = {
  reward: (entry) => entry.reward, turns: (entry) => entry.turns, tokens: (entry) => entry.tokens,
  sampled: (entry) => entry.sampled, time: active, attempts: (entry) => entry.attempts,
  drift: (entry) => entry.drift, rows: (entry) => entry.rows,
};
const COMPARE = {
  "<": (a, b) => a < b, ">": (a, b) => a > b, "<=": (a, b) => a <= b, ">=": (a, b) => a >= b, "=": (a, b) => a === b,
};

/** Filters with check boxes: name, and the value of an episode. */
export const FACETS = [
  { id: "env", name: "Environment", of: (entry) => entry.environment },
  { id: "reward", name: "Reward", of: (entry) => bucket(entry.reward) },
  { id: "end", name: "Ended by", of: outcome },
];

/** Sort orders: the value of an episode to sort by. */
export const SORTS = {
  order: (entry, index) => index, reward: (entry) => entry.reward ?? -Infinity, task: (entry) => entry.task_id,
  job: (entry) => entry.job_id, end: outcome, turns: (entry) => entry.turns, tokens: (entry) => entry.tokens, time: active,
};

/** The state in the query of an address. */
export function parse(query) {
  const given = new URLSearchParams(query);
  const ticked = Object.fromEntries(FACETS.map(({ id }) => [id, new Set(given.getAll(id))]));
  return {
    text: given.get("q") ?? "", inside: given.get("inside") ?? "", ticked, view: given.get("view") === "groups" ? "groups" : "episodes",
    sort: given.get("sort") ?? "order", descending: given.get("desc") === "1",
  };
}

/** The query of an address with this state. */
export function written(state) {
  const made = new URLSearchParams();
  if (state.view !== "episodes") made.set("view", state.view);
  if (state.text) made.set("q", state.text);
  if (state.inside) made.set("inside", state.inside);
  for (const { id } of FACETS) for (const value of state.ticked[id]) made.append(id, value);
  if (state.sort !== "order") made.set("sort", state.sort);
  if (state.descending) made.set("desc", "1");
  return made.toString();
}

/** The entries that match the state, apart from the facet `except`. The list is not copied if there is no filter. */
export function fitting(entries, state, except = "") {
  const tests = testsOf(state, except);
  return tests.length ? entries.filter((entry) => tests.every((test) => test(entry))) : entries;
}

/** The words of a filter that look like a comparison but are searched as words, such as `turn>3`. */
export function misread(text) {
  return text.toLowerCase().split(/\s+/).filter((word) => /^\w+[<>=]/.test(word) && !COMPARISON.test(word));
}

/** The conditions of the state, as functions of an episode. */
function testsOf(state, except) {
  const words = state.text.toLowerCase().split(/\s+/).filter(Boolean);
  const tests = words.map((word) => {
    const found = COMPARISON.exec(word);
    if (!found) return (entry) => haystack(entry).includes(word);
    const [, name, operator, value] = found;
    return (entry) => VALUES[name](entry) !== null && COMPARE[operator](VALUES[name](entry), Number(value));
  });
  for (const { id, of } of FACETS) {
    if (id !== except && state.ticked[id].size) tests.push((entry) => state.ticked[id].has(of(entry)));
  }
  return tests;
}

/** For each value of a facet, the number of episodes that match the other filters. */
export function counts(entries, state, { id, of }) {
  const found = new Map([...state.ticked[id]].map((value) => [value, 0]));
  for (const entry of fitting(entries, state, id)) {
    const value = of(entry);
    found.set(value, (found.get(value) ?? 0) + 1);
  }
  return [...found].sort(([a], [b]) => (a < b ? -1 : 1));
}

/** The entries of the list for a state, in the list's order. `inside`: keys that the text search has found, or null. */
export function listed(entries, state, inside = null) {
  return sorted(fitting(inside ? entries.filter(({ key }) => inside.has(key)) : entries, state), state);
}

/** A sorted copy of the entries. */
export function sorted(entries, { sort, descending }, sorts = SORTS) {
  if (sort === "order" && !descending) return entries.slice();
  const value = sorts[sort] ?? sorts.order;
  const keyed = entries.map((entry, index) => [value(entry, index), index, entry]);
  const way = descending ? -1 : 1;
  keyed.sort(([a, i], [b, j]) => (a < b ? -way : a > b ? way : i - j));
  return keyed.map(([, , entry]) => entry);
}

/** The groups of the episodes with the statistics of their rewards, ordered by their first episodes. */
export function grouped(entries) {
  const groups = new Map();
  for (const entry of entries) {
    const group = groups.get(entry.group_id) ?? { key: entry.group_id, environment: entry.environment, task_id: entry.task_id, samples: [] };
    groups.set(entry.group_id, group);
    group.samples.push(entry);
  }
  for (const group of groups.values()) Object.assign(group, spread(group.samples.map(({ reward }) => reward)));
  return [...groups.values()];
}

/** Mean and standard deviation of the rewards that are not null, and whether these rewards differ. */
export function spread(rewards) {
  const given = rewards.filter((reward) => reward !== null && reward !== undefined);
  if (!given.length) return { mean: null, std: null, informative: false };
  const mean = given.reduce((sum, reward) => sum + reward, 0) / given.length;
  const std = Math.sqrt(given.reduce((sum, reward) => sum + (reward - mean) ** 2, 0) / given.length);
  return { mean, std, informative: Math.max(...given) - Math.min(...given) > 1e-9 };
}

function bucket(reward) {
  if (reward === null || reward === undefined) return "none";
  if (reward >= 1) return "1 or more";
  return reward > 0 ? "between 0 and 1" : "0 or less";
}

const haystacks = new WeakMap();

function haystack(entry) {
  let text = haystacks.get(entry);
  if (text === undefined) {
    text = [entry.job_id, entry.task_id, entry.environment, entry.batch_id ?? "", outcome(entry), entry.state, entry.problem ?? ""].join(" ").toLowerCase();
    haystacks.set(entry, text);
  }
  return text;
}
