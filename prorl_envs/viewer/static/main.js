// The page as a whole: what stands at its top, and which view the address names.
import { el, fill, say } from "./dom.js";
import { client } from "./client.js";
import { episodePage } from "./episode.js";
import { episodesPage } from "./episodes.js";
import { groupPage } from "./group.js";
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

/** There is more to show. While more comes, it is drawn now and then; the last of it at once. */
function news(more = true) {
  if (redraw && more) return;
  clearTimeout(redraw);
  redraw = setTimeout(() => { redraw = 0; shown?.news?.(); }, more ? REDRAWN_MS : 0);
}

async function route() {
  const [, name = "", rest = ""] = /^#\/(\w*)[/?]?(.*)$/.exec(location.hash) ?? [];
  const mine = (turn += 1);
  const view = name || (live ? "service" : "episodes");
  let next;
  try {
    next = await open(view, rest);
  } catch (error) {
    next = { title: "Error", node: el("div", { class: "pad problem", role: "alert" }, error.message) };
  }
  if (mine !== turn) return next.end?.(); // the user has gone on meanwhile
  shown?.end?.();
  shown = next;
  fill(document.getElementById("main"), next.node);
  document.title = `${next.title} · ${source.title || "prorl-envs"}`;
  mark(view);
  window.scrollTo(0, 0);
  return next.started?.();
}

function open(view, rest) {
  if (view === "episode") return episodePage(source, decodeURIComponent(rest), service ? { actions: (result) => service.actions(result) } : {});
  if (view === "group") return groupPage(source, decodeURIComponent(rest));
  if (view === "service" && service) return service.page();
  return episodesPage(source, rest);
}

function mark(view) {
  const section = view === "service" ? "service" : "episodes";
  for (const link of document.querySelectorAll("#top nav a")) {
    if (link.dataset.view === section) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

function top() {
  const theme = el("button", { type: "button", class: "icon", "aria-label": "Change between light and dark", title: "Light or dark", on: { click: () => nextTheme() } }, "◐");
  return [
    el("a", { class: "brand", href: "#/" }, el("span", { class: "logo", "aria-hidden": "true" }), "prorl-envs"),
    el("nav", { "aria-label": "Views" }, live && el("a", { href: "#/", data: { view: "service" } }, "Service"), el("a", { href: live ? "#/episodes" : "#/", data: { view: "episodes" } }, "Episodes")),
    el("span", { class: "where quiet", id: "where" }, source.title ?? ""),
    service?.light, live && client.token && el("button", { type: "button", class: "link", on: { click: () => { client.forget(); location.reload(); } } }, "Forget the token"), theme,
  ];
}

function nextTheme() {
  const now = document.documentElement.style.colorScheme || THEMES[0];
  document.documentElement.style.colorScheme = THEMES[(THEMES.indexOf(now) + 1) % THEMES.length];
  say(["As your system has it", "Light", "Dark"][THEMES.indexOf(document.documentElement.style.colorScheme)]);
}

function onKey(event) {
  const typing = event.target.closest("input, textarea, select, dialog, [role=grid]") || event.ctrlKey || event.metaKey || event.altKey;
  if (typing) return;
  if (event.key === "/") {
    const field = document.getElementById("filter");
    if (field) field.focus(); else location.hash = "#/episodes";
    event.preventDefault();
  } else {
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
  try {
    if (live) await service.start();
    await source.load(() => {
      fill(document.getElementById("where"), source.title ?? "");
      if (!turn && /^(#\/?(episodes.*)?)?$/.test(location.hash)) route(); // a list is of use before all is read
      news(source.progress < 1);
    });
  } catch (error) {
    say(error.message);
  }
  if (!turn) await route();
}

start();
