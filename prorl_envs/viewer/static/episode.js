// One episode: its conversation, tokens and JSON in tabs; its reward and its time beside them.
import { el, fill, say } from "./dom.js";
import { conversation } from "./conversation.js";
import { strip } from "./episodes.js";
import { tree, verdict } from "./evidence.js";
import { active, count, seconds } from "./format.js";
import { rowsOf } from "./result.js";
import { waterfall } from "./timing.js";
import { tokensView } from "./tokens.js";

const TABS = { conversation: "Conversation", tokens: "Tokens", json: "JSON" };
const AGAIN_MS = 2000;

/** The page. `actions(result)` gives further buttons, where the source can do something. */
export async function episodePage(source, key, { actions = () => null } = {}) {
  let result = await source.episode(key), tab = "conversation", timer = 0;
  const place = el("div", { id: "panel", role: "tabpanel", tabindex: "-1" });
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
    if (id === "conversation") fill(place, conversation(result, rowsOf(result).length ? (turn) => show("tokens", turn.number) : null));
    if (id === "json") fill(place, jsonView(result, key));
    if (id !== "tokens") return;
    fill(place, el("p", { class: "quiet pad" }, "reading …"));
    const view = await tokensView(result, () => (source.texts ? source.tokens(key) : null), focusTurn);
    if (tab === "tokens") fill(place, view);
    document.getElementById(`tokens-${focusTurn}`)?.scrollIntoView({ block: "start" });
  }

  async function goTo(turn) {
    if (tab !== "conversation") await show("conversation");
    const there = document.getElementById(`turn-${turn}`);
    there?.scrollIntoView({ block: "start" });
    there?.focus({ preventScroll: true });
  }

  function draw() {
    fill(top, heading(source, result, key, actions));
    fill(side,
      el("section", {}, el("h2", {}, "Reward"), verdict(result)),
      el("section", {}, el("h2", {}, "Time"), waterfall(result, goTo)),
      el("section", {}, el("h2", {}, "Details"), details(result)));
  }

  async function again() {
    try {
      const said = result.messages.length;
      result = await source.episode(key);
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
  return { node, title: String(result.task_id), end: () => clearTimeout(timer), key: (event) => onKey(event, source, key, goTo) };
}

function over(result) {
  return ["done", "failed", "cancelled"].includes(result.state);
}

/** Keys of the page: j and k go to the next and the last turn, n and p to the next and the last sample. */
function onKey(event, source, key, goTo) {
  if (event.key === "j" || event.key === "k") {
    const turns = [...document.querySelectorAll(".turn")];
    const at = turns.findLastIndex((turn) => turn.getBoundingClientRect().top < 140);
    goTo(Math.max(1, Math.min(turns.length, at + 1 + (event.key === "j" ? 1 : -1))));
  } else if (event.key === "n" || event.key === "p") {
    const group = source.group(source.entry(key)?.group_id), at = group.findIndex((entry) => entry.key === key);
    const next = group[at + (event.key === "n" ? 1 : -1)];
    if (next) location.hash = `#/episode/${encodeURIComponent(next.key)}`;
  }
}

function heading(source, result, key, actions) {
  const group = source.group(result.group_id);
  return [
    el("p", { class: "crumbs" }, el("a", { href: "#/episodes" }, "Episodes"), " / ", el("a", { href: `#/group/${encodeURIComponent(result.group_id)}` }, result.group_id), ` / sample ${result.sample}`),
    el("div", { class: "episode-title" }, el("h1", {}, result.task_id), el("span", { class: "badge" }, result.environment), !over(result) && el("span", { class: "badge live" }, `now in ${result.state.toUpperCase()}`), el("span", { class: "actions" }, actions(result))),
    group.length > 1 && el("nav", { class: "siblings", "aria-label": "Samples of the group" }, group.slice(0, 64).map((entry) =>
      el("a", { class: "sibling", href: `#/episode/${encodeURIComponent(entry.key)}`, "aria-current": entry.key === key ? "page" : null, title: entry.job_id }, strip([entry]), el("span", {}, String(entry.sample)))),
      el("a", { href: `#/group/${encodeURIComponent(result.group_id)}` }, "compare")),
  ];
}

function details(result) {
  const rows = rowsOf(result), ids = rows.reduce((sum, row) => sum + row.ids.length, 0);
  const sampled = rows.reduce((sum, row) => sum + row.turns.reduce((n, turn) => n + turn.end - turn.start, 0), 0);
  const servers = new Set(rows.flatMap((row) => row.turns.map((turn) => turn.server)));
  const versions = new Set(rows.flatMap((row) => row.turns.map((turn) => turn.weight_version)));
  const known = [
    ["job", result.job_id], ["task", `${result.environment}: ${result.task_id}`], result.batch_id && ["batch", result.batch_id],
    ["turns", count(rows.reduce((sum, row) => sum + row.turns.length, 0))], ["tokens", `${count(ids)}, ${count(sampled)} sampled`],
    rows.length > 1 && ["rows", `${rows.length}: ${rows.length - 1} before a rewrite of the history`],
    ["drift", count(rows.reduce((sum, row) => sum + (row.drift ?? 0), 0))], ["active", seconds(active(result.timings))], ["attempts", count(result.attempts)],
    versions.size > 0 && ["weights", [...versions].filter(Boolean).join(", ") || "not known"], servers.size > 0 && ["servers", [...servers].join(", ")],
  ];
  const metadata = Object.keys(result.metadata ?? {}).length > 0;
  return [el("dl", { class: "facts-list" }, known.filter(Boolean).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, String(value))))),
    metadata && el("div", {}, el("h3", {}, "Metadata"), tree(result.metadata))];
}

function jsonView(result, key) {
  const save = el("button", { type: "button", on: { click: () => copy(result) } }, "Copy as JSON");
  return el("div", { class: "json" }, el("p", {}, save, el("span", { class: "quiet" }, ` entry ${key}`)), tree(result));
}

async function copy(result) {
  try {
    await navigator.clipboard.writeText(JSON.stringify(result));
    say("Copied.");
  } catch {
    say("The browser does not let this page use the clipboard.");
  }
}
