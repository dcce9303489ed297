// The list of episodes or groups, with filters beside it.
import { el, fill, middle, say } from "./dom.js";
import { FACETS, VALUES, counts, fitting, grouped, listed, misread, parse, sorted, written } from "./filter.js";
import { active, count, number, outcome, percent, plural, seconds, tone } from "./format.js";
import { VirtualList, toList } from "./list.js";

/** A reward as a coloured chip; its text is "none" if there is no reward. */
export function chip(entry) {
  const kind = tone(entry.reward);
  return el("span", { class: `chip ${kind}` }, kind === "none" ? "none" : number(entry.reward));
}

/** The rewards of a group's samples as marks, one per sample. */
export function strip(samples) {
  const marks = samples.slice(0, 64).map((entry) => el("span", { class: `mark ${tone(entry.reward)}` }));
  const rewards = samples.map(({ reward }) => (reward === null ? "none" : number(reward))).slice(0, 64).join(", ");
  return el("span", { class: "strip", role: "img", "aria-label": `rewards: ${rewards}` }, marks);
}

/** The columns of the list of episodes. Links to episodes contain the filter in `state`. */
const episodeColumns = (state) => [
  { id: "reward", name: "Reward", width: "5.5rem", cell: chip },
  { id: "task", name: "Task", grow: 2, cell: (entry) => [el("span", { class: "main" }, middle(entry.task_id)), el("span", { class: "quiet wide" }, entry.environment)] },
  { id: "job", name: "Job", grow: 2, wide: true, cell: (entry) => jobLink(entry, state) },
  { id: "end", name: "Ended by", grow: 2, cell: (entry) => [el("span", { class: entry.failure ? "failure" : "" }, outcome(entry)), entry.problem && el("span", { class: "quiet wide problem-text", title: entry.problem }, entry.problem)] },
  { id: "turns", name: "Turns", width: "4.5rem", numeric: true, wide: true, cell: (entry) => count(entry.turns) },
  { id: "tokens", name: "Tokens", width: "5.5rem", numeric: true, wide: true, cell: (entry) => count(entry.tokens) },
  { id: "time", name: "Time", width: "6rem", numeric: true, wide: true, cell: (entry) => seconds(active(entry)) },
];

const GROUPS = [
  { id: "task", name: "Task", grow: 2, cell: (group) => [el("span", { class: "main" }, middle(group.task_id)), el("span", { class: "quiet wide" }, group.environment)] },
  { id: "group", name: "Group", grow: 2, wide: true, cell: (group) => el("a", { href: `#/group/${encodeURIComponent(group.key)}`, tabindex: "-1" }, middle(group.key)) },
  { id: "rewards", name: "Rewards", grow: 1, cell: (group) => strip(group.samples) },
  { id: "mean", name: "Mean", width: "5rem", numeric: true, cell: (group) => (group.mean === null ? "–" : number(group.mean)) },
  { id: "std", name: "Std. dev.", width: "5rem", numeric: true, wide: true, cell: (group) => (group.std === null ? "–" : number(group.std)) },
  { id: "spread", name: "Informative", width: "7rem", wide: true, cell: (group) => (group.informative ? "yes" : el("span", { class: "quiet" }, "no")) },
];

function jobLink(entry, state) {
  return el("a", { class: "job", href: addressOf(entry, state), tabindex: "-1", title: entry.job_id, "aria-label": entry.job_id }, jobName(entry.job_id, entry.group_id));
}

/** The name of a job. A long group id is cut, so that the sample number at the end is always visible. */
export function jobName(job, group) {
  return job.startsWith(`${group}/`) ? [el("span", {}, group), el("span", {}, job.slice(group.length))] : job;
}

/** The address of an episode, with the filter of a list in `state`, if there is one. */
export function addressOf(entry, state) {
  const filter = state ? written({ ...state, view: "episodes" }) : "";
  return `#/episode/${encodeURIComponent(entry.key)}${filter && `?${filter}`}`;
}

let searched = null; // the last text search of any list

/** The episodes in the list of a query, in the list's order; none if the query contains a text search that is not the
 *  last one. */
export function episodesOf(source, query) {
  const state = parse(query);
  if (state.inside && searched?.text !== state.inside) return [];
  return listed(source.entries, state, state.inside ? searched.keys : null);
}

/** The page. Returns {node, news, end}. */
export function episodesPage(source, query) {
  const state = parse(query);
  let inside = null; // state of the text search: {text, generation, keys, next, share, busy}
  const facets = el("div", {});
  const wide = matchMedia("(min-width: 721px)").matches;
  const summary = el("p", { class: "quiet summary", role: "status" });
  const problem = el("p", { class: "problem", hidden: true });
  const field = el("input", {
    type: "search", id: "filter", value: state.text, placeholder: "words", autocomplete: "off", spellcheck: "false", "aria-describedby": "filter-help",
    on: { input: () => change({ text: field.value }), keydown: (event) => toList(event, lists[state.view]) },
  });
  const deep = el("form", { class: "field", on: { submit: (event) => { event.preventDefault(); change({ inside: deepField.value }); lookInside(); } } });
  const deepField = el("input", { type: "search", id: "inside", value: state.inside, placeholder: "exact text, then Enter", autocomplete: "off", maxlength: "1000", spellcheck: "false" });
  deepField.addEventListener("search", () => { if (!deepField.value) { change({ inside: "" }); lookInside(); } });
  deep.append(el("label", { for: "inside" }, "Text in messages"), deepField);
  const lists = {
    episodes: new VirtualList({ label: "Episodes", columns: episodeColumns(state), onOpen: (entry) => { location.hash = addressOf(entry, state); }, onSort, empty: "No episode matches the filter." }),
    groups: new VirtualList({ label: "Groups", columns: GROUPS.map((column) => ({ ...column, sortable: false })), onOpen: (group) => { location.hash = `#/group/${encodeURIComponent(group.key)}`; }, empty: "No group matches the filter." }),
  };
  const tabs = el("div", { class: "tabs", role: "group", "aria-label": "Show" }, ["episodes", "groups"].map((view) =>
    el("button", { type: "button", data: { view }, on: { click: () => change({ view }) } }, view === "groups" ? "Groups" : "Episodes")));
  const place = el("div", { class: "list-place" });
  const node = el("div", { class: "browse" }, el("h1", { class: "sr" }, "Episodes"),
    el("aside", { class: "filters", "aria-label": "Filters" },
      el("div", { class: "field" }, el("label", { for: "filter" }, "Filter"), field, el("p", { class: "help", id: "filter-help" }, "also turns>10 reward<1 time>60 tokens>5000")), deep,
      el("details", { class: "facets", open: wide }, el("summary", {}, "More filters"), facets)),
    el("section", { class: "results", "aria-label": "Results" }, el("div", { class: "bar" }, tabs, summary), problem, place));

  function change(changes) {
    Object.assign(state, changes);
    history.replaceState(null, "", `#/episodes?${written(state)}`);
    draw();
  }

  function onSort(id) {
    change({ sort: id, descending: state.sort === id ? !state.descending : id !== "task" && id !== "job" && id !== "end" });
  }

  /** Search in the messages. A search for the same text continues at the end of the previous search. */
  async function lookInside() {
    const { generation } = source;
    if (!state.inside) inside = null;
    else if (inside?.text !== state.inside || inside.generation !== generation) inside = { text: state.inside, generation, keys: new Set(), next: null, share: 0, busy: false };
    searched = inside;
    draw();
    const mine = inside;
    if (!mine || mine.busy) return;
    mine.busy = true;
    try {
      for (let more = true; more && mine === inside; ) {
        const { keys, next, share } = await source.look(mine.text, mine.next);
        for (const key of keys) mine.keys.add(key);
        more = next !== mine.next;
        Object.assign(mine, { next, share });
        if (more) draw();
      }
    } catch (error) {
      say(error.message);
    } finally {
      mine.busy = false;
      draw();
    }
  }

  function news() {
    draw();
    if (inside && !inside.busy) lookInside();
  }

  function draw() {
    const pool = inside ? source.entries.filter((entry) => inside.keys.has(entry.key)) : source.entries;
    const fits = fitting(pool, state);
    const focused = facets.contains(document.activeElement) ? { ...document.activeElement.dataset } : null;
    fill(facets, FACETS.map((facet) => ticks(facet, counts(pool, state, facet))));
    if (focused) refocus(focused.facet, focused.value);
    for (const button of tabs.children) button.setAttribute("aria-pressed", String(button.dataset.view === state.view));
    const list = lists[state.view];
    if (place.firstChild !== list.node) fill(place, list.node);
    const shown = state.view === "groups" ? grouped(fits) : sorted(fits, state);
    list.update(shown, state);
    const all = source.entries.length === fits.length ? "" : ` of ${count(source.entries.length)}`;
    const rewards = fits.filter(({ reward }) => reward !== null);
    const mean = rewards.length ? `, mean reward ${number(rewards.reduce((sum, { reward }) => sum + reward, 0) / rewards.length)}` : "";
    const reading = source.progress < 1 ? `, ${percent(source.progress)} read` : "";
    const looking = inside?.busy && inside.share < 1 ? `, ${percent(inside.share)} searched …` : "";
    fill(summary, `${plural(fits.length, "episode")}${all}${mean}${reading}${looking}`);
    const [odd] = fits.length ? [] : misread(state.text);
    const problems = odd ? `“${odd}” is not a comparison. Fields: ${Object.keys(VALUES).join(", ")}; for example turns>=10` : source.problems;
    problem.hidden = !problems;
    fill(problem, problems);
  }

  function ticks(facet, values) {
    if (values.length < 2 && !state.ticked[facet.id].size) return null;
    const ticked = state.ticked[facet.id];
    return el("fieldset", {}, el("legend", {}, facet.name), values.slice(0, 30).map(([value, n]) => {
      const box = el("input", { type: "checkbox", checked: ticked.has(value), on: { change: () => { ticked[box.checked ? "add" : "delete"](value); change({}); } }, data: { facet: facet.id, value } });
      return el("label", { class: "tick" }, box, el("span", { class: "name" }, value.replaceAll("_", " ")), el("span", { class: "quiet" }, count(n)));
    }));
  }

  function refocus(facet, value) {
    for (const box of facets.querySelectorAll("input")) if (box.dataset.facet === facet && box.dataset.value === value) box.focus();
  }

  draw();
  if (state.inside) lookInside();
  return { node, title: "Episodes", news, started: () => lists[state.view].focus(), toFilter: () => field.focus(), end: () => Object.values(lists).forEach((list) => list.end()) };
}
