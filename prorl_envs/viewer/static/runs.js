// The page with the runs of a folder.
import { el, fill, middle } from "./dom.js";
import { count, date, plural } from "./format.js";
import { VirtualList } from "./list.js";

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

/** The page. */
export function runsPage(source) {
  const list = new VirtualList({ label: "Runs", columns: COLUMNS, keyOf: (run) => run.name, onOpen: (run) => { location.href = address(run); }, empty: "There is no run in this folder." });
  const summary = el("p", { class: "quiet summary", role: "status" });
  const node = el("div", { class: "runs" }, el("h1", {}, "Runs"), summary, el("div", { class: "list-place" }, list.node));
  function news() {
    list.update(source.entries);
    fill(summary, `${plural(source.entries.length, "run")} in ${source.title}`);
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
