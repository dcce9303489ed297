// The samples of one group side by side, turn by turn.
import { el, fill } from "./dom.js";
import { callCard } from "./conversation.js";
import { chip } from "./episodes.js";
import { spread } from "./filter.js";
import { active, count, number, outcome, plural, seconds } from "./format.js";
import { output } from "./output.js";
import { callsOf, conversationOf, partsOf, textOf, thoughts } from "./result.js";

/** Samples that are shown at first; the others can be ticked. */
const FIRST = 4;

/** The page. */
export async function groupPage(source, id) {
  const entries = source.group(id);
  if (!entries.length) return { node: el("p", { class: "quiet pad" }, `Nothing is known of the group ${id}.`), title: id };
  const { mean, std, informative } = spread(entries.map(({ reward }) => reward));
  const chosen = new Set(entries.slice(0, FIRST).map(({ key }) => key));
  const results = new Map();
  const table = el("div", { class: "compare", role: "region", "aria-label": "Samples side by side", tabindex: "0" });
  const ticks = el("div", { class: "samples" }, entries.map((entry) => {
    const box = el("input", { type: "checkbox", checked: chosen.has(entry.key), on: { change: () => { chosen[box.checked ? "add" : "delete"](entry.key); draw(); } } });
    return el("label", { class: "tick sample" }, box, `sample ${entry.sample}`, chip(entry));
  }));

  async function draw() {
    const shown = entries.filter(({ key }) => chosen.has(key));
    if (!shown.length) return fill(table, el("p", { class: "quiet pad" }, "Tick a sample."));
    await Promise.all(shown.map(async ({ key }) => { if (!results.has(key)) results.set(key, await source.episode(key)); }));
    const still = entries.filter(({ key }) => chosen.has(key) && results.has(key));
    return fill(table, sideBySide(still, results));
  }

  await draw();
  const node = el("div", { class: "group" },
    el("p", { class: "crumbs" }, el("a", { href: "#/episodes?view=groups" }, "Groups"), " / ", id),
    el("div", { class: "episode-title" }, el("h1", {}, entries[0].task_id), el("span", { class: "badge" }, entries[0].environment)),
    el("p", { class: "facts" }, el("span", {}, plural(entries.length, "sample")), el("span", {}, mean === null ? "no rewards" : `mean reward ${number(mean)}`), std !== null && el("span", {}, `std ${number(std)}`),
      el("span", {}, informative ? "rewards differ: it carries a gradient" : "rewards do not differ: it carries no gradient")),
    ticks, table);
  return { node, title: entries[0].task_id };
}

function sideBySide(entries, results) {
  const talks = entries.map(({ key }) => conversationOf(results.get(key)).turns);
  const longest = Math.max(...talks.map((turns) => turns.length));
  const heads = entries.map((entry) => el("div", { class: "compare-head" },
    el("a", { href: `#/episode/${encodeURIComponent(entry.key)}` }, `sample ${entry.sample}`), chip(entry),
    el("span", { class: "quiet" }, `${outcome(entry)}, ${plural(entry.turns, "turn")}, ${count(entry.tokens)} tokens, ${seconds(active(entry))}`)));
  const rows = Array.from({ length: longest }, (_, i) => {
    const said = talks.map((turns) => (turns[i] ? signature(turns[i].message) : null));
    const usual = mostCommon(said.filter((text) => text !== null));
    return talks.map((turns, column) => (turns[i] ? cell(turns[i], said[column] !== usual) : el("div", { class: "compare-cell over" }, i === turns.length ? el("p", { class: "quiet" }, `ended: ${outcome(entries[column])}`) : null)));
  });
  return el("div", { class: "compare-grid", style: { "grid-template-columns": `repeat(${entries.length}, minmax(19rem, 1fr))` } }, heads, rows);
}

/** What an answer does, to compare: its calls, or its text where it makes none. */
function signature(message) {
  const calls = callsOf(message);
  return JSON.stringify(calls.length ? calls.map(({ name, arguments: given }) => [name, given]) : textOf(message.content ?? ""));
}

function mostCommon(values) {
  const found = new Map();
  for (const value of values) found.set(value, (found.get(value) ?? 0) + 1);
  return [...found].reduce((best, one) => (one[1] > best[1] ? one : best), ["", 0])[0];
}

function cell(turn, differs) {
  const [reasoning, content] = thoughts(turn.message);
  const answers = new Map(turn.after.map((message) => [String(message?.tool_call_id), message]));
  return el("div", { class: differs ? "compare-cell differs" : "compare-cell" },
    el("p", { class: "quiet" }, `turn ${turn.number}`, differs && el("span", { class: "badge" }, "differs")),
    reasoning && el("details", { class: "thought" }, el("summary", {}, "Reasoning"), el("div", { class: "prose" }, reasoning)),
    partsOf(content).map((part) => (part.text === undefined ? null : el("div", { class: "prose" }, part.text))),
    callsOf(turn.message).map((call) => callCard(call, answers.get(call.id))),
    turn.after.filter((message) => !message?.tool_call_id).map((message) => output(textOf(message?.content ?? ""))));
}
