// The page of a group: its samples in columns, one row per turn.
import { el, fill } from "./dom.js";
import { differences, extremes, ranked } from "./compare.js";
import { callCard, prose, thought } from "./conversation.js";
import { chip } from "./episodes.js";
import { spread } from "./filter.js";
import { active, count, number, outcome, plural, seconds } from "./format.js";
import { parsedTexts } from "./markdown.js";
import { output } from "./output.js";
import { callsOf, conversationOf, textOf, thoughts } from "./result.js";

/** Number of samples that are shown at first: the ones with the best and the worst rewards. */
const FIRST = 4;

/** The page. */
export async function groupPage(source, id) {
  const entries = source.group(id);
  if (!entries.length) return { node: el("p", { class: "quiet pad" }, `There is no group ${id}.`), title: id };
  const { mean, std, informative } = spread(entries.map(({ reward }) => reward));
  const chosen = new Set(extremes(entries, FIRST).map(({ key }) => key));
  const results = new Map(), parsed = new Map(); // of the shown samples, by key
  const table = el("div", { class: "compare", role: "region", "aria-label": "Samples side by side", tabindex: "0" });
  const ticks = el("div", { class: "samples" }, entries.map((entry) => {
    const box = el("input", { type: "checkbox", checked: chosen.has(entry.key), on: { change: () => { chosen[box.checked ? "add" : "delete"](entry.key); draw(); } } });
    return el("label", { class: "tick sample" }, box, `sample ${entry.sample}`, chip(entry));
  }));

  async function draw() {
    const shown = entries.filter(({ key }) => chosen.has(key));
    if (!shown.length) return fill(table, el("p", { class: "quiet pad" }, "Tick a sample."));
    await Promise.all(shown.map(async ({ key }) => {
      if (results.has(key)) return;
      const [result, trees] = await Promise.all([source.episode(key), parsedTexts(source, key)]);
      parsed.set(key, trees);
      results.set(key, result);
    }));
    const still = ranked(entries).filter(({ key }) => chosen.has(key) && results.has(key));
    return fill(table, sideBySide(still, results, parsed));
  }

  await draw();
  const node = el("div", { class: "group" },
    el("p", { class: "crumbs" }, el("a", { href: "#/episodes?view=groups" }, "Groups"), " / ", id),
    el("div", { class: "episode-title" }, el("h1", {}, entries[0].task_id), el("span", { class: "badge" }, entries[0].environment)),
    el("p", { class: "facts" }, el("span", {}, plural(entries.length, "sample")), el("span", {}, mean === null ? "no rewards" : `mean reward ${number(mean)}`), std !== null && el("span", {}, `standard deviation ${number(std)}`),
      el("span", {}, informative ? "rewards differ: the group contributes a gradient" : "rewards do not differ: the group contributes no gradient")),
    ticks, table);
  return { node, title: entries[0].task_id };
}

function sideBySide(entries, results, parsed) {
  const talks = entries.map(({ key }) => conversationOf(results.get(key)).turns);
  const longest = Math.max(...talks.map((turns) => turns.length));
  const heads = entries.map((entry) => el("div", { class: "compare-head" },
    el("a", { href: `#/episode/${encodeURIComponent(entry.key)}` }, `sample ${entry.sample}`), chip(entry),
    el("span", { class: "quiet" }, `${outcome(entry)}, ${plural(entry.turns, "turn")}, ${count(entry.tokens)} tokens, ${seconds(active(entry))}`)));
  const treesOf = (key, message) => parsed.get(key)[results.get(key).messages.indexOf(message)] ?? [];
  const rows = Array.from({ length: longest }, (_, i) => {
    const turns = talks.map((talk) => talk[i]), marks = differences(turns);
    return turns.map((turn, column) => (turn ? cell(turn, marks[column], treesOf(entries[column].key, turn.message)) : ended(marks[column], i === talks[column].length && outcome(entries[column]))));
  });
  return el("div", { class: "compare-grid", style: { "grid-template-columns": `repeat(${entries.length}, minmax(19rem, 1fr))` } }, heads, rows);
}

const MARKS = { differs: "differs", output: "output differs" };

function badge(mark) {
  return mark && el("span", { class: "badge" }, MARKS[mark]);
}

/** A cell after the end of a sample. `reason`: the reason of the end in the first of these cells, false in others. */
function ended(mark, reason) {
  const first = reason !== false;
  return el("div", { class: first && mark ? "compare-cell over differs" : "compare-cell over" }, first && el("p", { class: "quiet" }, `ended: ${reason}`, badge(mark)));
}

function cell(turn, mark, trees) {
  const [reasoning, content] = thoughts(turn.message);
  const answers = new Map(turn.after.map((message) => [String(message?.tool_call_id), message]));
  return el("div", { class: mark ? "compare-cell differs" : "compare-cell" },
    el("p", { class: "quiet" }, `turn ${turn.number}`, badge(mark)),
    thought(reasoning),
    prose(content, trees),
    callsOf(turn.message).map((call) => callCard(call, answers.get(call.id))),
    turn.after.filter((message) => !message?.tool_call_id).map((message) => output(textOf(message?.content ?? ""))));
}
