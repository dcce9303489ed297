// The page with the runs of a folder.
import { el, fill, middle } from "./dom.js";
import { sorted } from "./filter.js";
import { count, date, plural } from "./format.js";
import { VirtualList, toList } from "./list.js";

const COLUMNS = [
  { id: "name", name: "Run", grow: 2, cell: (run) => el("a", { href: address(run), tabindex: "-1" }, middle(run.name, 10)) },
  { id: "environment", name: "Environment", grow: 1, wide: true, cell: (run) => run.description?.environment ?? "–" },
  { id: "model", name: "Model", grow: 1, wide: true, cell: (run) => run.description?.model || "–" },
  { id: "started", name: "Started", width: "13rem", wide: true, cell: (run) => date(run.description?.started) },
  { id: "episodes", name: "Episodes", width: "8rem", numeric: true, wide: true, cell: (run) => (run.expected === null ? count(run.results) : `${count(run.results)} of ${count(run.expected)}`) },
  { id: "reward", name: "Mean reward", width: "8rem", numeric: true, cell: reward },
  { id: "pass", name: "pass@1", width: "5rem", numeric: true, wide: true, cell: ({ overall }) => (overall?.pass_at[1] === undefined ? "–" : `${(overall.pass_at[1] * 100).toFixed(1)}%`) },
  { id: "state", name: "State", width: "7rem", cell: state },
];

/** Sort orders: the value of a run to sort by. The first order of a column with numbers or times is descending. */
const SORTS = {
  order: (_, index) => index, name: (run) => run.name, environment: (run) => run.description?.environment ?? "", model: (run) => run.description?.model ?? "",
  started: (run) => run.description?.started ?? "", episodes: (run) => run.results, reward: (run) => run.overall?.mean_reward ?? -Infinity,
  pass: (run) => run.overall?.pass_at[1] ?? -Infinity, state: (run) => state(run).textContent,
};
const DESCENDING = new Set(["started", "episodes", "reward", "pass"]);

/** The page. */
export function runsPage(source) {
  const shown = { sort: "order", descending: false };
  const list = new VirtualList({ label: "Runs", columns: COLUMNS, keyOf: (run) => run.name, onOpen: (run) => { location.href = address(run); }, onSort, empty: "No run." });
  const summary = el("p", { class: "quiet summary", role: "status" });
  const field = el("input", { type: "search", id: "filter", placeholder: "Filter by name, environment or model", "aria-label": "Filter", autocomplete: "off", spellcheck: "false", on: { input: news, keydown: (event) => toList(event, list) } });
  const node = el("div", { class: "runs" }, el("h1", {}, "Runs"), el("div", { class: "bar" }, field, summary), el("div", { class: "list-place" }, list.node));

  function onSort(id) {
    Object.assign(shown, { sort: id, descending: shown.sort === id ? !shown.descending : DESCENDING.has(id) });
    news();
  }

  function news() {
    const words = field.value.toLowerCase().split(/\s+/);
    const fits = source.entries.filter((run) => words.every((word) => [run.name, SORTS.environment(run), SORTS.model(run)].join(" ").toLowerCase().includes(word)));
    list.update(sorted(fits, shown, SORTS), shown);
    fill(summary, `${fits.length === source.entries.length ? "" : `${count(fits.length)} of `}${plural(source.entries.length, "run")} in ${source.title}`);
  }

  news();
  return { node, title: "Runs", news, started: () => list.focus(), end: () => list.end() };
}

function address(run) {
  return `run/${encodeURIComponent(run.name)}/`;
}

function reward({ overall }) {
  if (!overall || overall.mean_reward === null) return "–";
  return overall.standard_error === null ? overall.mean_reward.toFixed(3) : `${overall.mean_reward.toFixed(3)} ± ${overall.standard_error.toFixed(3)}`;
}

function state(run) {
  if (run.running) return el("span", { class: "badge live" }, "running");
  const complete = run.expected === null || run.results >= run.expected;
  return el("span", { class: complete ? "badge" : "badge warn" }, complete ? "finished" : "interrupted");
}
