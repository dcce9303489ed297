// Entry point of the pages: the header, the keys, and the view of the current address.
import { el, fill, say } from "./dom.js";
import { client } from "./client.js";
import { unfold } from "./conversation.js";
import { episodePage } from "./episode.js";
import { episodesPage } from "./episodes.js";
import { groupPage } from "./group.js";
import { showHelp } from "./help.js";
import { overviewPage } from "./overview.js";
import { runsPage } from "./runs.js";
import { Service } from "./service.js";
import { source as openSource } from "./sources.js";

const THEMES = ["light dark", "light", "dark"];
const kind = document.documentElement.dataset.source;
const live = kind === "live";
const source = openSource(kind);
const service = live ? new Service(source, news) : null;
const REDRAWN_MS = 250;
let shown = null;
let turn = 0;
let redraw = 0;
let toFilter = false;

/** Draw new data. If more data will follow, the page is drawn at intervals; otherwise immediately. */
function news(more = true) {
  if (redraw && more) return;
  clearTimeout(redraw);
  redraw = setTimeout(() => { redraw = 0; shown?.news?.(); }, more ? REDRAWN_MS : 0);
}

async function route() {
  const [, name = "", rest = ""] = /^#\/(\w*)[/?]?(.*)$/.exec(location.hash) ?? [];
  const view = name || first();
  if (view === "episode" && shown?.moved?.(episodeAddress(rest))) return;
  const mine = (turn += 1);
  let next;
  try {
    next = await open(view, rest);
  } catch (error) {
    next = { title: "Error", node: el("div", { class: "pad problem", role: "alert" }, error.message) };
  }
  if (mine !== turn) return next.end?.(); // the user has opened another view meanwhile
  shown?.end?.();
  shown = next;
  fill(document.getElementById("main"), next.node);
  document.title = `${next.title} · ${source.title || "prorl-envs"}`;
  mark(view);
  window.scrollTo(0, 0);
  if (toFilter) next.toFilter?.();
  else next.started?.();
  toFilter = false;
}

/** The view for an address without a view. */
function first() {
  if (live) return "service";
  if (kind === "runs") return "runs";
  return source.hasOverview ? "overview" : "episodes";
}

/** Parse the address of an episode: KEY or KEY?FILTER, optionally followed by #turn-N. */
function episodeAddress(rest) {
  const [, key, query = "", number = "0"] = /^([^?#]*)(?:\?([^#]*))?(?:#turn-(\d{1,9}))?/.exec(rest);
  return { key: decodeURIComponent(key), query, turn: Number(number) };
}

function open(view, rest) {
  if (kind === "runs") return runsPage(source);
  if (view === "episode") {
    const { key, ...asked } = episodeAddress(rest);
    return episodePage(source, key, { ...asked, ...(service && { actions: (result) => service.actions(result) }) });
  }
  if (view === "overview" && source.hasOverview) return overviewPage(source);
  if (view === "group") return groupPage(source, decodeURIComponent(rest));
  if (view === "service" && service) return service.page();
  return episodesPage(source, rest);
}

function mark(view) {
  fill(document.querySelector("#top nav"), links());
  const section = ["service", "overview", "runs"].includes(view) ? view : "episodes";
  for (const link of document.querySelectorAll("#top nav a")) {
    if (link.dataset.view === section) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

function links() {
  if (kind === "runs") return [el("a", { href: "#/", data: { view: "runs" } }, "Runs")];
  return [
    live && el("a", { href: "#/", data: { view: "service" } }, "Service"), source.runs && el("a", { href: "../../" }, "Runs"),
    source.hasOverview && el("a", { href: "#/overview", data: { view: "overview" } }, "Overview"), el("a", { href: "#/episodes", data: { view: "episodes" } }, "Episodes"),
  ];
}

function top() {
  const help = el("button", { type: "button", class: "icon", "aria-label": "Keys", title: "Keys (?)", on: { click: showHelp } }, "?");
  const theme = el("button", { type: "button", class: "icon", "aria-label": "Change between light and dark", title: "Light or dark", on: { click: () => nextTheme() } }, "◐");
  return [
    el("a", { class: "brand", href: "#/" }, el("span", { class: "logo", "aria-hidden": "true" }), "prorl-envs"),
    el("nav", { "aria-label": "Views" }, links()),
    el("span", { class: "where quiet", id: "where" }, source.title ?? ""),
    service?.light, live && client.token && el("button", { type: "button", class: "link", on: { click: () => { client.forget(); location.reload(); } } }, "Forget the token"), help, theme,
  ];
}

function nextTheme() {
  const now = document.documentElement.style.colorScheme || THEMES[0];
  document.documentElement.style.colorScheme = THEMES[(THEMES.indexOf(now) + 1) % THEMES.length];
  say(["As in your system settings", "Light", "Dark"][THEMES.indexOf(document.documentElement.style.colorScheme)]);
}

/** Show the folded texts of a conversation, which a printed page should contain. */
function unfoldAll() {
  unfold([document.getElementById("main")], (folded) => folded.matches(".conversation > details, .turn details"));
}

function onKey(event) {
  const within = (selector) => event.target instanceof Element && event.target.closest(selector);
  if (within("input:not([type=checkbox]), textarea, select, dialog") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "?") return void showHelp();
  if (event.key === "/") {
    const field = document.getElementById("filter");
    if (field) field.focus();
    else if (kind !== "runs") { toFilter = true; location.hash = "#/episodes"; }
    event.preventDefault();
  } else if (!within("[role=grid]")) {
    shown?.key?.(event);
  }
}

async function start() {
  fill(document.getElementById("top"), top());
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault();
    document.getElementById("main").focus();
  });
  window.addEventListener("hashchange", route);
  window.addEventListener("keydown", onKey);
  window.addEventListener("beforeprint", unfoldAll);
  try {
    if (live) await service.start();
    await source.load(() => {
      fill(document.getElementById("where"), source.title ?? "");
      if (!turn && /^(#\/?(episodes.*)?)?$/.test(location.hash)) route(); // the list is useful before all results are read
      news(source.progress < 1);
    });
  } catch (error) {
    say(error.message);
  }
  if (!turn) await route();
}

start();
