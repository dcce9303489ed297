// The overview page of a run: statistics from the server, and histograms of the episodes.
import { el, fill, say } from "./dom.js";
import { histogram, ranking } from "./charts.js";
import { active, count, date, number, outcome, plural, seconds } from "./format.js";

/** The histograms: the value of an episode, and the function that formats it. */
const HISTOGRAMS = [
  { name: "Reward", axis: "reward", of: (entry) => entry.reward, write: number },
  { name: "Turns", axis: "model calls per episode", of: (entry) => entry.turns, write: number, whole: true },
  { name: "Tokens", axis: "tokens per episode, prompts included", of: (entry) => entry.tokens, write: count, whole: true },
  { name: "Time", axis: "seconds per episode, without waiting", of: active, write: seconds },
];

/** The page. */
export async function overviewPage(source) {
  let view = await source.overview(), shown = source.entries.length, environment = "", asking = false;
  const facts = el("p", { class: "facts" }), tiles = el("div", { class: "tiles" }), place = el("div", { class: "panel-body" });
  const charts = el("div", { class: "histograms" }), failures = el("section", { class: "panel", "aria-label": "Failures" });
  const select = el("select", { id: "environment", on: { change: () => { environment = select.value; drawCharts(); } } });
  const title = view.description ? `Run ${view.description.name}` : source.title;
  const node = el("div", { class: "overview" },
    el("div", { class: "episode-title" }, el("h1", {}, title), el("span", { class: "badge live", hidden: true }, "running")), facts, tiles,
    el("section", { class: "panel", "aria-label": "Environments" }, el("h2", {}, "Environments"), place), failures,
    el("div", { class: "bar" }, el("h2", {}, "Episodes"), el("label", { class: "sr", for: "environment" }, "Environment of the histograms"), select), charts);

  function drawCharts() {
    const entries = environment ? source.entries.filter((entry) => entry.environment === environment) : source.entries;
    fill(charts, HISTOGRAMS.map((chart) => histogram(entries.map(chart.of).filter((value) => value !== null), chart)));
  }

  function draw() {
    const { overall, environments, running } = view;
    node.querySelector(".badge.live").hidden = !running;
    fill(facts, factsOf(view).map((text) => el("span", {}, text)));
    fill(tiles, tilesOf(overall));
    fill(place, table(environments, overall));
    failures.hidden = !Object.keys(overall.failures).length;
    fill(failures, el("h2", {}, "Failures by kind"), ranking(Object.entries(overall.failures).sort(([, a], [, b]) => b - a).map(([kind, n]) => [failed(kind), n])));
    const names = Object.keys(environments);
    if (select.options.length !== names.length + 1) fill(select, el("option", { value: "" }, "all environments"), names.map((name) => el("option", { value: name, selected: name === environment }, name)));
    select.hidden = names.length < 2;
    drawCharts();
  }

  async function news() {
    if (asking || (source.entries.length === shown && !view.running)) return;
    asking = true;
    try {
      const n = source.entries.length;
      view = await source.overview();
      shown = n;
      draw();
    } catch (error) {
      say(error.message);
    } finally {
      asking = false;
    }
  }

  draw();
  return { node, title, news };
}

/** The kind of a failure as a link to the episodes that failed so. */
function failed(kind) {
  return el("a", { href: `#/episodes?end=${encodeURIComponent(outcome({ failure: kind, state: kind }))}` }, kind);
}

function factsOf({ description, expected, running, wall_s: wall, sampled_tokens_per_s: speed, overall }) {
  return [
    description && `environment ${description.environment}`, description?.model && `model ${description.model}`, description && `started ${date(description.started)}`,
    expected === null ? plural(overall.results, "episode") : `${count(overall.results)} of ${plural(expected, "episode")}${running || overall.results >= expected ? "" : ": the run was interrupted"}`,
    wall !== null && `${seconds(wall)} of wall time`, speed > 0 && `${count(Math.round(speed))} sampled tokens/s`, description && `prorl-envs ${description.version}`,
  ].filter(Boolean);
}

function tilesOf(overall) {
  const ks = Object.keys(overall.pass_at).map(Number).sort((a, b) => a - b), last = ks.at(-1), failed = Object.values(overall.failures).reduce((sum, n) => sum + n, 0);
  return [
    tile("Mean reward", overall.standard_error === null ? mean(overall) : [overall.mean_reward.toFixed(3), el("span", { class: "quiet" }, `± ${overall.standard_error.toFixed(3)}`)], `${plural(overall.scored, "episode")} with a reward${overall.standard_error === null ? "" : "; ± standard error over tasks"}`),
    ks.includes(1) && tile("pass@1", share(overall.pass_at[1]), "reward 1 or more, mean over tasks"),
    last > 1 && tile(`pass@${last}`, share(overall.pass_at[last]), `at least one of ${last} samples`),
    tile("Tasks", count(overall.tasks), plural(overall.results, "episode")),
    tile("Failures", count(failed), failed ? `${share(failed / overall.results)} of episodes have no reward` : "every episode has a reward"),
    tile("Sampled tokens", count(overall.sampled_tokens), `of ${count(overall.tokens)} tokens`),
  ];
}

function tile(name, value, text) {
  return el("section", { class: "tile", "aria-label": name }, el("h2", {}, name), el("p", { class: "stage-number" }, value), el("p", { class: "quiet" }, text));
}

function mean({ mean_reward: value, standard_error: error }) {
  if (value === null) return "–";
  return error === null ? value.toFixed(3) : `${value.toFixed(3)} ± ${error.toFixed(3)}`;
}

function share(value) {
  return `${(value * 100).toFixed(1)}%`;
}

function table(environments, overall) {
  const ks = Object.keys(overall.pass_at).map(Number).sort((a, b) => a - b);
  const names = ["Environment", "Tasks", "Episodes", "Mean reward", ...ks.map((k) => `pass@${k}`), "Turns", "Tokens", "Sampled", "Failures"];
  const row = (name, stats) => el("tr", { class: name ? "" : "total" }, el("th", { scope: "row" }, name ? el("a", { href: `#/episodes?env=${encodeURIComponent(name)}` }, name) : "all"),
    [count(stats.tasks), count(stats.results), mean(stats), ...ks.map((k) => (stats.pass_at[k] === undefined ? "–" : share(stats.pass_at[k]))), stats.turns.toFixed(1), count(stats.tokens), count(stats.sampled_tokens), count(Object.values(stats.failures).reduce((sum, n) => sum + n, 0))].map((text) => el("td", { class: "numeric" }, text)));
  const rows = Object.entries(environments).map(([name, stats]) => row(name, stats));
  if (rows.length > 1) rows.push(row("", overall));
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Statistics by environment" }, el("table", { class: "plain statistics" },
    el("thead", {}, el("tr", {}, names.map((name, i) => el("th", { scope: "col", class: i ? "numeric" : "" }, name)))), el("tbody", {}, rows)));
}
