// The page of an episode: tabs with the conversation, evaluation, tokens and JSON; reward and time beside the tabs.
import { el, fill, say } from "./dom.js";
import { conversation, openTurns } from "./conversation.js";
import { addressOf, episodesOf, strip } from "./episodes.js";
import { parse } from "./filter.js";
import { finder } from "./find.js";
import { tree, verdict } from "./evidence.js";
import { active, count, date, over, seconds } from "./format.js";
import { gradeView } from "./grade.js";
import { parsedTexts } from "./markdown.js";
import { conversationOf, rowsOf, textIn, transcript } from "./result.js";
import { waterfall } from "./timing.js";
import { tokensView } from "./tokens.js";

const TABS = { conversation: "Conversation", grade: "Patch and tests", tokens: "Tokens", json: "JSON" };
const AGAIN_MS = 2000, SAVED_MS = 60_000;

// Switches of all episode pages of this browser tab: texts without Markdown, and one line per turn.
let raw = false, outlined = false;

/** The page of an episode.
 *  @param query filter of the list that the episode was opened from
 *  @param actions returns buttons for the actions of the source */
export async function episodePage(source, key, { query = "", turn: firstTurn = 0, actions = () => null } = {}) {
  let [result, trees, request, run] = await Promise.all([source.episode(key), parsedTexts(source, key), optional(source.request(key)), optional(source.overview())]);
  let tab = "conversation", timer = 0;
  const place = el("div", { id: "panel", role: "tabpanel", tabindex: "-1" });
  const find = finder(place, parse(query).inside, places), bar = el("div", { class: "conversation-bar" }, find.node, ...switches());
  const side = el("aside", { class: "side", "aria-label": "Reward, time and details" });
  const top = el("div", { class: "episode-top" });
  const tabs = el("div", { class: "tabs", role: "tablist", "aria-label": "Episode" }, Object.entries(TABS).map(([id, name]) =>
    el("button", { type: "button", role: "tab", id: `tab-${id}`, "aria-controls": "panel", data: { tab: id }, on: { click: () => show(id), keydown: onArrow } }, name)));
  const node = el("div", { class: "episode" }, top, tabs, el("div", { class: "episode-body" }, place, side));

  function onArrow(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const ids = Object.keys(TABS), next = ids[(ids.indexOf(tab) + step + ids.length) % ids.length];
    show(next);
    tabs.querySelector(`[data-tab=${next}]`).focus();
  }

  async function show(id, focusTurn = 0) {
    tab = id;
    for (const button of tabs.children) {
      button.setAttribute("aria-selected", String(button.dataset.tab === id));
      button.tabIndex = button.dataset.tab === id ? 0 : -1;
    }
    place.setAttribute("aria-labelledby", `tab-${id}`);
    place.parentNode.classList.toggle("whole", id === "grade");
    if (id === "conversation") showTalk();
    if (id === "grade") fill(place, gradeView(result));
    if (id === "json") fill(place, jsonView(result, key));
    if (id !== "tokens") return;
    fill(place, el("p", { class: "quiet pad" }, "reading …"));
    const view = await tokensView(result, () => (source.texts ? source.tokens(key) : null), focusTurn);
    if (tab === "tokens") fill(place, view);
    document.getElementById(`tokens-${focusTurn}`)?.scrollIntoView({ block: "start" });
  }

  function showTalk() {
    if (place.firstChild === bar) place.lastChild.replaceWith(talk()); // the field keeps its focus
    else fill(place, bar, talk());
    find.search();
  }

  /** The places of the conversation for a search: the prompt, and each turn. */
  function places() {
    const { before, turns } = conversationOf(result);
    const at = (name, messages, selector) => ({ name, text: messages.map(textIn).join("\n"), nodes: [...place.querySelectorAll(selector)] });
    return [at("prompt", before, ".conversation > .said"), ...turns.map((turn) => at(`turn ${turn.number}`, [turn.message, ...turn.after], `#turn-${turn.number}`))];
  }

  function talk() {
    const messages = result.messages ?? [];
    return conversation(result, {
      onTokens: rowsOf(result).length ? (turn) => show("tokens", turn.number) : null,
      trees: (message) => (raw ? [] : trees[messages.indexOf(message)] ?? []),
      outlined,
      linkTo: (turn) => `${address()}#turn-${turn}`,
    });
  }

  function switches() {
    const tick = (name, checked, change) => el("label", { class: "tick" }, el("input", { type: "checkbox", checked, on: { change } }), name);
    return [
      tick("One line per turn", outlined, () => { outlined = !outlined; showTalk(); }),
      tick("Show texts without Markdown", raw, () => { raw = !raw; showTalk(); }),
    ];
  }

  function address() {
    return `#/episode/${encodeURIComponent(key)}${query && `?${query}`}`;
  }

  async function goTo(turn) {
    if (tab !== "conversation") await show("conversation");
    const target = document.getElementById(`turn-${turn}`);
    if (!target) return;
    history.replaceState(null, "", `${address()}#turn-${turn}`);
    openTurns([target]);
    target.scrollIntoView({ block: "start" });
    target.focus({ preventScroll: true });
  }

  function draw() {
    fill(top, heading(source, result, key, query, actions));
    fill(side,
      el("section", {}, el("h2", {}, "Reward"), verdict(result)),
      el("section", {}, el("h2", {}, "Time"), waterfall(result, goTo)),
      el("section", {}, el("h2", {}, "Details"), details(result, request, run)));
  }

  async function again() {
    try {
      const said = result.messages.length;
      [result, trees] = await Promise.all([source.episode(key), parsedTexts(source, key)]);
      draw();
      if (tab === "conversation" && (result.messages.length !== said || over(result))) await show(tab);
    } catch (error) {
      say(error.message);
    }
    if (!over(result)) timer = setTimeout(again, AGAIN_MS);
  }

  draw();
  await show(tab);
  if (source.kind === "live" && !over(result)) timer = setTimeout(again, AGAIN_MS);
  return {
    node, title: String(result.task_id), end: () => clearTimeout(timer), key: (event) => onKey(event, source, key, query, goTo),
    started: () => (firstTurn ? goTo(firstTurn) : find.step()),
    /** Go to another turn if an address names this page. Returns whether it does. */
    moved: (other) => { if (other.key !== key || other.query !== query || !other.turn) return false; goTo(other.turn); return true; },
  };
}

async function optional(promise) {
  try {
    return await promise;
  } catch {
    return null;
  }
}

/** Handler of the page's keys; help.js lists them. */
function onKey(event, source, key, query, goTo) {
  if (event.key === "j" || event.key === "k") {
    const turns = [...document.querySelectorAll(".turn")];
    const focused = turns.indexOf(document.activeElement?.closest(".turn")); // a turn near the end cannot be scrolled to the top
    const at = focused >= 0 ? focused : turns.findLastIndex((turn) => turn.getBoundingClientRect().top < 140);
    goTo(Math.max(1, Math.min(turns.length, at + 1 + (event.key === "j" ? 1 : -1))));
  } else if (event.key === "n" || event.key === "p") {
    const group = source.group(source.entry(key)?.group_id), at = group.findIndex((entry) => entry.key === key);
    const next = group[at + (event.key === "n" ? 1 : -1)];
    if (next) location.hash = addressOf(next);
  } else if (event.key === "]" || event.key === "[") {
    const { before, after } = neighbours(source, key, query);
    const next = event.key === "]" ? after : before;
    if (next) location.hash = addressOf(next, parse(query));
  } else if (event.key === "f") {
    document.getElementById("find")?.focus();
    event.preventDefault();
  } else if (event.key === "u") location.hash = `#/episodes${query && `?${query}`}`;
}

/** The episodes before and after an episode in the list of a query, the episode's number, and the list's length. */
function neighbours(source, key, query) {
  const list = episodesOf(source, query), at = list.findIndex((entry) => entry.key === key);
  return at < 0 ? { at: 0, of: 0 } : { before: list[at - 1], after: list[at + 1], at: at + 1, of: list.length };
}

function stepper(source, key, query) {
  const { before, after, at, of } = neighbours(source, key, query), state = parse(query);
  if (!at) return null;
  const step = (entry, name, sign) => (entry ? el("a", { href: addressOf(entry, state), title: `${name} episode of the list`, "aria-label": `${name} episode` }, sign) : el("span", { class: "quiet", "aria-hidden": "true" }, sign));
  return el("nav", { class: "stepper", "aria-label": "Filtered episodes" }, step(before, "Previous", "‹ previous"), el("span", { class: "quiet" }, `${count(at)} of ${count(of)}`), step(after, "Next", "next ›"));
}

function heading(source, result, key, query, actions) {
  const group = source.group(result.group_id);
  return [
    stepper(source, key, query),
    el("p", { class: "crumbs" }, el("a", { href: `#/episodes${query && `?${query}`}` }, "Episodes"), " / ", el("a", { href: `#/group/${encodeURIComponent(result.group_id)}` }, result.group_id), ` / sample ${result.sample}`),
    el("div", { class: "episode-title" }, el("h1", {}, result.task_id), el("span", { class: "badge" }, result.environment), !over(result) && el("span", { class: "badge live" }, `now in ${result.state.toUpperCase()}`), el("span", { class: "actions" }, copies(result), actions(result))),
    group.length > 1 && el("nav", { class: "siblings", "aria-label": "Samples of the group" }, group.slice(0, 64).map((entry) =>
      el("a", { class: "sibling", href: `#/episode/${encodeURIComponent(entry.key)}`, "aria-current": entry.key === key ? "page" : null, title: entry.job_id }, strip([entry]), el("span", {}, String(entry.sample)))),
      el("a", { href: `#/group/${encodeURIComponent(result.group_id)}` }, "compare")),
  ];
}

function details(result, request, run) {
  const [, agent] = String(result.environment).split("@"), sampling = request?.sampling, description = run?.description;
  const rows = rowsOf(result), ids = rows.reduce((sum, row) => sum + row.ids.length, 0);
  const sampled = rows.reduce((sum, row) => sum + row.turns.reduce((n, turn) => n + turn.end - turn.start, 0), 0);
  const servers = new Set(rows.flatMap((row) => row.turns.map((turn) => turn.server)));
  const versions = new Set(rows.flatMap((row) => row.turns.flatMap((turn) => [turn.weight_version, ...(turn.version_spans ?? []).map((span) => span.version)])));
  const known = [
    ["job", result.job_id], ["environment", result.environment], ["task", result.task_id], agent && ["agent", agent],
    description?.model && ["model", description.model], description && ["run started", date(description.started)],
    sampling && ["sampling", `temperature ${sampling.temperature}, top-p ${sampling.top_p}, at most ${count(sampling.max_tokens)} tokens per turn${sampling.seed === null ? "" : `, seed ${sampling.seed}`}`], result.batch_id && ["batch", result.batch_id],
    ["turns", count(rows.reduce((sum, row) => sum + row.turns.length, 0))], ["tokens", `${count(ids)}, ${count(sampled)} sampled`],
    rows.length > 1 && ["rows", `${rows.length}: ${rows.length - 1} before a rewrite of the history`],
    ["drift", count(rows.reduce((sum, row) => sum + (row.drift ?? 0), 0))], ["active time", seconds(active(result.timings))], ["attempts", count(result.attempts)],
    versions.size > 0 && ["weights", [...versions].filter(Boolean).join(", ") || "not known"], servers.size > 0 && ["servers", [...servers].join(", ")],
  ];
  const metadata = Object.keys(result.metadata ?? {}).length > 0;
  return [el("dl", { class: "facts-list" }, known.filter(Boolean).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, String(value))))),
    metadata && el("div", {}, el("h3", {}, "Metadata"), tree(result.metadata)),
    request && el("details", { class: "evidence" }, el("summary", {}, el("h3", {}, "Task row")), tree(request.task)),
    request?.limits && el("details", { class: "evidence" }, el("summary", {}, el("h3", {}, "Limits")), tree(request.limits))];
}

function jsonView(result, key) {
  return el("div", { class: "json" }, el("p", {}, el("span", { class: "quiet" }, `entry ${key}`)), tree(result));
}

/** Buttons that copy or save the episode. */
function copies(result) {
  const button = (name, action) => el("button", { type: "button", on: { click: action } }, name);
  return [
    button("Copy text", () => copy(transcript(result))), button("Copy JSON", () => copy(JSON.stringify(result))),
    button("Save JSON", () => save(`${result.job_id}.json`.replaceAll("/", "-"), JSON.stringify(result, null, 2))), button("Print", () => window.print()),
  ];
}

/** Let the browser save a text as a file. */
function save(name, text) {
  const link = el("a", { download: name });
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), SAVED_MS);
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    say("Copied.");
  } catch {
    say("The browser does not let this page use the clipboard.");
  }
}
