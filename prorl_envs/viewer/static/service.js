// The page of a running service: stages, results, model servers, sandboxes, nodes, and buttons for actions.
import { el, fill, middle, say } from "./dom.js";
import { axes, gauge, highest, ranking, sparkline, stacked } from "./charts.js";
import { client } from "./client.js";
import * as control from "./control.js";
import { emptyState } from "./first_job.js";
import { jobName, strip } from "./episodes.js";
import { bytes, count, number, over, percent, plural, seconds } from "./format.js";
import { VirtualList } from "./list.js";

const REMEMBERED = 300, STATE_MS = 1000, JOBS_MS = 2000;
const LOST_MS = 10_000; // a service that does not answer in this time counts as disconnected

export class Service {
  #now = null;
  #page = null;
  #past = [];
  #source;
  #onNews;

  /** `onNews()` is called when the source has new results. */
  constructor(source, onNews) {
    this.#source = source;
    this.#onNews = onNews;
    this.light = el("span", { class: "badge", role: "status" }, "connecting");
  }

  /** Request the state every second, without end. Resolves at the first answer. */
  start() {
    return new Promise((resolve) => {
      const look = async () => {
        await this.#ask(resolve);
        setTimeout(look, STATE_MS);
      };
      look();
    });
  }

  async #ask(onAnswer) {
    try {
      const response = await client.ask("GET", "/v1/dashboard", { signal: AbortSignal.timeout(LOST_MS) });
      this.#look(await response.json());
      this.#connected(true);
      onAnswer();
    } catch (error) {
      this.#connected(false);
      if (!error.status || error.status === 503 || error.status === 429) return;
      say(error.message);
      onAnswer();
    }
  }

  #connected(connected) {
    this.light.className = `badge ${connected ? "live" : "bad"}`;
    fill(this.light, connected ? "live" : "disconnected");
  }

  #look(view) {
    if (this.#now) this.#load(view, this.#now);
    this.#now = view;
    this.#past.push(Object.fromEntries(Object.entries(view.status.pools).map(([stage, pool]) => [stage, pool.active])));
    if (this.#past.length > REMEMBERED) this.#past.shift();
    if (document.visibilityState === "visible") this.#page?.update(view, this.#past);
  }

  /** Load the summaries of new results. A service that has started again may have another store. */
  #load(view, before) {
    if (Math.abs(startOf(view) - startOf(before)) > 1) this.#source.clear();
    if (view.status.newest_cursor > this.#source.next) this.#source.load(this.#onNews).catch((error) => say(error.message));
  }

  /** Buttons for one episode. */
  actions(result) {
    return over(result)
      ? el("button", { type: "button", on: { click: () => control.retryJob(result.job_id) } }, "Retry")
      : el("button", { type: "button", class: "danger", on: { click: () => control.cancelJob(result.job_id) } }, "Cancel");
  }

  page() {
    const page = dashboard();
    this.#page = page;
    if (this.#now) page.update(this.#now, this.#past);
    return { node: page.node, title: "Service", started: () => page.started(), end: () => { page.end(); this.#page = null; } };
  }
}

/** The time at which the service started, in seconds since 1970. */
function startOf({ time, status }) {
  return time - status.uptime_s;
}

function panel(title, ...children) {
  const place = el("div", { class: "panel-body" }, children);
  return { node: el("section", { class: "panel", "aria-label": title }, el("h2", {}, title), place), place };
}

function dashboard() {
  const bar = el("div", { class: "service-bar" });
  const stages = el("div", { class: "stages" });
  const panels = {
    throughput: panel("Throughput, last 10 minutes"), rewards: panel("Rewards"), latency: panel("Latency"), failures: panel("Failures"),
    servers: panel("Model servers"), sandboxes: panel("Sandboxes"), groups: panel("Groups"), batches: panel("Batches"), nodes: panel("Nodes"),
  };
  const jobs = jobsPanel();
  const empty = emptyState();
  const buttons = el("div", { class: "buttons" });
  let last = null, shownState = "";
  const node = el("div", { class: "dashboard" },
    el("h1", { class: "sr" }, "The service"), el("div", { class: "service-top" }, bar, buttons), empty.node, stages,
    el("div", { class: "panels" }, Object.values(panels).map(({ node }) => node)), jobs.node);

  function update(view, past) {
    last = view;
    const { status } = view;
    fill(bar, summary(view));
    empty.show(!status.unfinished && !Object.values(status.finished).some((n) => n > 0));
    const state = `${status.state} ${status.paused}`;
    if (state !== shownState) fill(buttons, controls(status, () => last)); // a replaced button loses the focus and the click
    shownState = state;
    fill(stages, stageCards(view, past));
    fill(panels.throughput.place, throughput(view));
    fill(panels.rewards.place, rewards(view));
    fill(panels.latency.place, latency(view.latency));
    fill(panels.failures.place, failures(status));
    refill(panels.servers, servers(view));
    fill(panels.sandboxes.place, sandboxes(view.sandboxes));
    fill(panels.groups.place, groups(view.groups));
    refill(panels.batches, batches(view.batches));
    refill(panels.nodes, nodes(view.nodes));
    panels.nodes.node.hidden = !view.nodes.length;
    panels.batches.node.hidden = !view.batches.length;
  }

  return { node, update, started: jobs.started, end: jobs.end };
}

let pressed = false;
addEventListener("pointerdown", () => { pressed = true; });
for (const name of ["pointerup", "pointercancel"]) addEventListener(name, () => setTimeout(() => { pressed = false; }, 50));

/** Replace a panel's table with buttons, but not while the pointer is pressed. The focus stays on the same button. */
function refill({ place }, node) {
  if (pressed) return;
  const focused = place.contains(document.activeElement) ? nameOf(document.activeElement) : "";
  fill(place, node);
  if (focused) [...place.querySelectorAll("button, [tabindex]")].find((button) => nameOf(button) === focused)?.focus({ preventScroll: true });
}

function nameOf(node) {
  return node.ariaLabel || node.textContent;
}

function summary({ status }) {
  const state = status.paused ? ["warn", `paused: ${status.paused}`] : [status.state === "serving" ? "good" : "warn", status.state];
  return [
    el("span", { class: `badge ${state[0]}` }, state[1]),
    el("span", {}, `${plural(status.unfinished, "unfinished job")}`),
    el("span", { class: "quiet" }, `up ${seconds(status.uptime_s)}`), el("span", { class: "quiet" }, `version ${status.version}`),
    status.internal_errors > 0 && el("span", { class: "badge bad" }, `${plural(status.internal_errors, "internal error")}: see the log`),
  ];
}

function controls(status, view) {
  const resumable = status.paused || status.state === "draining";
  const button = (name, action, kind = "") => el("button", { type: "button", class: kind, on: { click: action } }, name);
  return [
    resumable && button("Resume", control.resume, "primary"), !status.paused && button("Pause …", control.pause),
    status.state !== "draining" && button("Drain …", control.drain), button("Limits …", () => control.limits(view())),
  ];
}

const STAGES = { init: "Prepare (INIT)", run: "Run agents (RUN)", eval: "Evaluate (EVAL)" };

function stageCards({ status }, past) {
  const first = el("div", { class: "stage" }, el("h2", {}, "Queue"),
    el("p", { class: "stage-number" }, count(status.pools.init.waiting), el("span", { class: "quiet" }, " waiting")), gauge(status.unfinished, status.queue_limit, { label: "unfinished jobs" }),
    el("p", { class: "quiet" }, `jobs: ${count(status.unfinished)} unfinished, limit ${count(status.queue_limit)}; ${count(status.jobs_with_sandbox)} with a sandbox, limit ${count(status.max_jobs_with_sandbox)}`));
  return [first, ...Object.entries(status.pools).map(([stage, pool]) => el("div", { class: "stage" },
    el("h2", {}, el("span", { class: `dot ${stage === "run" ? "model" : stage}`, "aria-hidden": "true" }), ` ${STAGES[stage]}`),
    el("p", { class: "stage-number" }, count(pool.active), el("span", { class: "quiet" }, ` of ${count(pool.limit)} active`), stage !== "init" && pool.waiting > 0 && el("span", { class: "badge" }, `${count(pool.waiting)} waiting`)),
    gauge(pool.active, pool.limit, { label: `${stage} pool`, kind: stage === "run" ? "model" : stage }),
    sparkline(past.map((point) => point[stage]), { label: `${stage} over the last minutes`, most: pool.limit }),
    el("p", { class: "axis quiet" }, el("span", {}, past.length < 60 ? `${past.length} s ago` : `${seconds(past.length)} ago`), el("span", {}, "now"))))];
}

function throughput({ history, status }) {
  const rows = history.map((bucket) => [{ value: bucket.done, kind: "good" }, { value: bucket.failed, kind: "bad" }, { value: bucket.cancelled, kind: "none" }]);
  const minute = history.slice(-6), ended = minute.reduce((sum, bucket) => sum + bucket.done + bucket.failed + bucket.cancelled, 0);
  const sampled = minute.reduce((sum, bucket) => sum + bucket.sampled, 0);
  const minutes = Math.round(rows.length / 6);
  return [
    el("p", { class: "figures" }, figure(count(ended), "jobs in the last minute"), figure(count(Math.round(sampled / 60)), "sampled tokens/s")),
    stacked(rows, { label: `jobs that ended in each ten seconds; ${ended} in the last minute` }),
    axes({ from: `${minutes} min ago`, to: "now", top: `highest bar: ${plural(highest(rows), "job")} in 10 s` }),
    el("p", { class: "legend" }, [["good", "done"], ["bad", "failed"], ["none", "cancelled"]].map(([kind, name]) => el("span", {}, el("span", { class: `dot fill-${kind}` }), `${name} ${count(status.finished[name] ?? 0)} since the start`)), el("span", {}, plural(status.retries, "retry", "retries"))),
  ];
}

function figure(value, name) {
  return el("span", { class: "figure" }, el("strong", {}, value), el("span", { class: "quiet" }, name));
}

function rewards({ rewards: tenths, reward_mean: mean }) {
  const total = tenths.reduce((sum, n) => sum + n, 0);
  if (!total) return el("p", { class: "quiet" }, "No reward yet.");
  const rows = tenths.map((n, i) => [{ value: n, kind: i === 9 ? "good" : i ? "part" : "bad" }]);
  return [el("p", { class: "figures" }, figure(number(mean), `mean of the last ${plural(total, "result")}`)), stacked(rows, { label: `rewards in tenths from 0 to 1: ${tenths.join(", ")}` }),
    axes({ from: "0", middle: "reward", to: "1", top: `highest bar: ${plural(highest(rows), "result")}` })];
}

const NAMES = { queued: "waiting in the queue", init: "INIT", run: "RUN", eval: "EVAL", model_call: "one model call", tools: "tool calls of one turn" };
const SHARES = { p50: "median", p90: "90 %", p99: "99 %" };

function latency(measured) {
  const rows = Object.entries(NAMES).filter(([name]) => measured[name]);
  if (!rows.length) return el("p", { class: "quiet" }, "No job has finished yet.");
  return el("table", { class: "plain figures-table" },
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "time of"), Object.values(SHARES).map((name) => el("th", { scope: "col", class: "numeric" }, name)))),
    el("tbody", {}, rows.map(([name, label]) => el("tr", {}, el("th", { scope: "row" }, label), Object.keys(SHARES).map((share) => el("td", { class: "numeric" }, seconds(measured[name][share])))))));
}

function failures(status) {
  const counts = Object.entries(status.failures).filter(([, n]) => n > 0).sort(([, a], [, b]) => b - a);
  return counts.length ? ranking(counts) : el("p", { class: "quiet" }, "None since the start.");
}

const SERVER_BADGES = { healthy: "good", failing: "bad" };

function servers({ status }) {
  const { model_servers: list, router } = status;
  const rows = list.map((server) => el("tr", {},
    el("th", { scope: "row" }, el("span", { class: "url" }, server.url), el("span", { class: "quiet" }, [server.protocol, server.weight_version && `weights ${server.weight_version}`].filter(Boolean).join(", "))),
    el("td", {}, el("span", { class: `badge ${SERVER_BADGES[server.state] ?? "warn"}`, title: server.problem }, server.state)),
    el("td", { class: "numeric" }, server.limit ? `${count(server.in_flight)}/${count(server.limit)}` : count(server.in_flight)), el("td", { class: "numeric" }, count(server.sessions)), el("td", { class: "numeric" }, count(server.turns)),
    el("td", { class: "numeric" }, server.state !== "draining" && el("button", { type: "button", class: "link", "aria-label": `Drain ${server.url}`, on: { click: () => control.drainServer(server.url) } }, "drain"))));
  const hits = router && [router.reported_hit_rate ?? router.expected_hit_rate, router.reported_hit_rate === null ? "expected" : "reported by the servers"];
  return el("div", {},
    list.length ? table(["Server", "State", "In flight", "Sessions", "Turns", ""], rows) : el("p", { class: "quiet" }, "No model server."),
    el("p", { class: "legend" }, hits && hits[0] !== null && el("span", {}, `prefix cache hits ${percent(hits[0])} (${hits[1]})`), router && el("span", {}, `load imbalance ${number(router.load_imbalance)}`), router?.paused && el("span", { class: "badge warn" }, router.waiting ? "waiting for a model server" : "paused: weights are being updated"),
      el("button", { type: "button", on: { click: control.addServer } }, "Add …")));
}

function table(names, rows) {
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": names[0] }, el("table", { class: "plain wide-table" }, el("thead", {}, el("tr", {}, names.map((name, i) => el("th", { scope: "col", class: i ? "numeric" : "" }, name || el("span", { class: "sr" }, "actions"))))), el("tbody", {}, rows)));
}

function sandboxes(use) {
  return [
    el("p", { class: "figures" }, figure(count(use.busy), "busy"), figure(count(use.warm), "warm"), figure(count(use.starting), use.waiting ? `starting, ${count(use.waiting)} waiting` : "starting")),
    el("dl", { class: "facts-list" }, [
      ["start time", use.ready_s === null ? "–" : `${seconds(use.ready_s)} on average`], ["started", `${count(use.handed_out)}, ${count(use.from_pool)} of them from the warm pool`],
      ["failed", count(use.failed)],
      use.busy_bytes !== null && ["memory", `${bytes(use.busy_bytes)} in busy, ${bytes(use.warm_bytes)} in warm ones; largest ${bytes(use.largest_bytes)}`],
    ].filter(Boolean).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
    use.memory_bytes && el("div", {}, el("p", { class: "quiet" }, `machine memory ${bytes(use.memory_used_bytes)} of ${bytes(use.memory_bytes)}`), gauge(use.memory_used_bytes, use.memory_bytes, { label: "machine memory", kind: use.memory_used_bytes > 0.9 * use.memory_bytes ? "bad" : "" })),
  ];
}

function groups(list) {
  if (!list.length) return el("p", { class: "quiet" }, "No group has a result yet.");
  return [el("p", { class: "legend" }, "mean ± standard deviation; one mark per sample:", [["good", "1 or more"], ["part", "between 0 and 1"], ["bad", "0 or less"], ["none", "no reward"]].map(([kind, name]) => el("span", {}, el("span", { class: `mark ${kind}` }), name))), el("ul", { class: "group-list" }, list.slice(0, 12).map((group) => el("li", {},
    el("a", { href: `#/group/${encodeURIComponent(group.id)}`, title: group.id }, middle(group.task_id)), strip(group.rewards.map((reward) => ({ reward }))),
    el("span", { class: "quiet numeric" }, group.mean === null ? "–" : `${group.mean.toFixed(2)} ± ${group.std.toFixed(2)}`))))];
}

function batches(list) {
  const rows = [...list].reverse().slice(0, 20).map((batch) => el("tr", {},
    el("th", { scope: "row" }, batch.id), el("td", {}, el("span", { class: `badge ${batch.state === "running" ? "live" : ""}` }, batch.waiting_for_tasks ? "waiting for tasks" : batch.state)),
    el("td", { class: "batch-gauge" }, gauge(batch.informative, batch.wanted, { label: `informative groups of ${batch.id}`, kind: "good" }), el("span", { class: "quiet" }, `${count(batch.informative)} of ${count(batch.wanted)} informative`)),
    el("td", { class: "numeric" }, count(batch.in_flight)), el("td", { class: "numeric" }, count(batch.uninformative)), el("td", { class: "numeric" }, count(batch.failed)),
    el("td", { class: "numeric" }, batch.state === "running" && el("button", { type: "button", class: "link", "aria-label": `Cancel ${batch.id}`, on: { click: () => control.cancelBatch(batch.id) } }, "cancel"))));
  return table(["Batch", "State", "Groups", "In flight", "Equal rewards", "Failed", ""], rows);
}

function nodes(list) {
  const rows = list.map((node) => el("tr", {},
    el("th", { scope: "row" }, node.name), el("td", {}, el("span", { class: `badge ${node.state === "ready" ? "good" : node.state === "lost" ? "bad" : "warn"}`, title: node.reason }, node.state)),
    el("td", { class: "numeric" }, `${count(node.jobs_with_sandbox)}/${count(node.max_jobs_with_sandbox)}`), el("td", { class: "numeric" }, node.pools ? Object.values(node.pools).map((pool) => pool.active).join(" / ") : "–"), el("td", { class: "numeric" }, count(node.sandboxes)), el("td", { class: "numeric" }, count(node.attempts)),
    el("td", { class: "numeric" }, node.state !== "lost" && el("button", { type: "button", class: "link", on: { click: () => control.node(node.name, node.state === "draining" ? "resume" : "drain") } }, node.state === "draining" ? "resume" : "drain"))));
  return table(["Node", "State", "Jobs with a sandbox", "INIT / RUN / EVAL", "Sandboxes", "Attempts", ""], rows);
}

function jobsPanel() {
  const columns = [
    { id: "job", name: "Job", grow: 3, cell: (line) => el("a", { class: "job", href: `#/episode/${encodeURIComponent(line.id)}`, tabindex: "-1", title: line.id, "aria-label": line.id }, jobName(line.id, line.group_id)) },
    { id: "task", name: "Task", grow: 2, wide: true, cell: (line) => [el("span", { class: "main" }, line.task_id), el("span", { class: "quiet" }, line.environment)] },
    { id: "state", name: "State", width: "9rem", cell: (line) => el("span", { class: `badge ${line.active ? "live" : ""}` }, line.active ? line.state.toUpperCase() : line.state === "queued" ? "queued" : `waiting for ${line.state.toUpperCase()}`) },
    { id: "since", name: "Since", width: "5.5rem", numeric: true, wide: true, cell: (line) => seconds(line.since_s) },
    { id: "turns", name: "Turns", width: "4rem", numeric: true, wide: true, cell: (line) => count(line.turns) },
    { id: "tokens", name: "Tokens", width: "5rem", numeric: true, wide: true, cell: (line) => count(line.tokens) },
    { id: "memory", name: "Memory", width: "5.5rem", numeric: true, wide: true, cell: (line) => (line.memory_bytes === null ? "–" : bytes(line.memory_bytes)) },
    { id: "node", name: "Node", width: "6rem", wide: true, cell: (line) => line.node || "this one" },
    { id: "cancel", name: "", label: "actions", width: "4rem", numeric: true, cell: (line) => el("button", { type: "button", class: "link", tabindex: "-1", "aria-label": `Cancel ${line.id}`, on: { click: () => control.cancelJob(line.id) } }, "cancel") },
  ];
  const list = new VirtualList({ label: "Unfinished jobs", columns, rowHeight: 34, keyOf: (line) => line.id, onOpen: (line) => { location.hash = `#/episode/${encodeURIComponent(line.id)}`; }, empty: "No job is running or waiting." });
  const heading = el("span", { class: "quiet" });
  const node = el("section", { class: "panel jobs", "aria-label": "Unfinished jobs" }, el("h2", {}, "Unfinished jobs ", heading), el("div", { class: "list-place" }, list.node));
  let timer = 0, stopped = false;

  async function look() {
    try {
      if (document.visibilityState === "visible") {
        const page = await client.get("/v1/jobs?limit=1000");
        list.update(page.jobs);
        fill(heading, page.total > page.jobs.length ? `the first ${count(page.jobs.length)} of ${count(page.total)}` : count(page.total));
      }
    } catch (error) {
      fill(heading, error.message);
    }
    if (!stopped) timer = setTimeout(look, JOBS_MS);
  }

  return { node, started: look, end: () => { stopped = true; clearTimeout(timer); list.end(); } };
}
