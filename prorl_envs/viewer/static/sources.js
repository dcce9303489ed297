// Sources of results: a running service, a file behind a small server, or the data in the page.
import { client } from "./client.js";
import { over } from "./format.js";

/** The source of a kind. A source of kind `runs` has only load, and its entries are runs. Other sources have:
 *  - `kind`, and `texts`: whether the source can decode tokens;
 *  - load(onNews): load the summaries into `entries`, each with a `key`, and call onNews after each part;
 *  - episode(key): the complete result; tokens(key): the text of each token by row; markdown(key): the parsed texts of
 *    each message; request(key): the request of the episode's group, or null;
 *  - overview(): statistics and description of the run, or null; `runs`: whether the run is in a list of runs;
 *  - look(text, from): one step of a text search. `from` is null or the `next` of the last step. The result is
 *    {keys, next, share}: keys of episodes found in this step, and the share of data searched so far. The search is
 *    complete when `next` does not change. */
export function source(kind) {
  if (kind === "live") return new Live();
  if (kind === "runs") return new Runs();
  return kind === "file" ? new File() : new Embedded();
}

class Source {
  entries = [];
  problems = "";
  texts = false;
  hasOverview = false;
  runs = false;
  generation = 0; // number of times that other entries have replaced all entries

  entry(key) {
    return this.entries.find((entry) => entry.key === key);
  }

  async overview() {
    return null;
  }

  group(id) {
    return this.entries.filter((entry) => entry.group_id === id).sort((a, b) => a.sample - b.sample);
  }
}

class File extends Source {
  kind = "file";
  title = "";
  #timer = 0;

  async load(onNews) {
    clearTimeout(this.#timer);
    for (let request = this.#ask(); request; ) {
      const page = await request;
      const fresh = page.generation !== this.generation;
      if (fresh) this.entries = [];
      this.generation = page.generation;
      for (const values of page.entries) this.entries.push(entryOf(page.names, values, String(this.entries.length)));
      request = page.more ? this.#ask() : null; // the server answers while this part is drawn
      ({ file: this.title, texts: this.texts, overview: this.hasOverview, runs: this.runs } = page);
      this.progress = page.more ? page.read / page.size : 1;
      this.problems = page.bad_lines ? problems(page) : "";
      if (page.entries.length || fresh || !page.more) onNews();
    }
    this.#timer = setTimeout(() => this.load(onNews).catch(() => {}), 3000); // a run may still write to the file
  }

  #ask() {
    return client.get(`api/episodes?after=${this.entries.length}&generation=${this.generation}`);
  }

  episode(key) {
    return client.get(`api/episodes/${key}`);
  }

  async tokens(key) {
    return (await client.get(`api/episodes/${key}/tokens`)).rows;
  }

  async markdown(key) {
    return (await client.get(`api/episodes/${key}/markdown`)).messages;
  }

  async request(key) {
    return (await client.get(`api/episodes/${key}/request`)).request;
  }

  async overview() {
    return this.hasOverview ? client.get("api/overview") : null;
  }

  async look(text, from) {
    const found = await client.get(`api/search?text=${encodeURIComponent(text)}&after=${from ?? 0}`);
    return { keys: found.numbers.map(String), next: found.next, share: found.of ? found.next / found.of : 1 };
  }
}

function entryOf(names, values, key) {
  const entry = { key };
  for (let i = 0; i < names.length; i += 1) entry[names[i]] = values[i];
  return entry;
}

function problems({ bad, bad_lines: lines }) {
  return `${lines} ${lines === 1 ? "line is not a result" : "lines are not results"}; line ${bad[0][0]}: ${bad[0][1]}`;
}

const RUNS_MS = 3000;

class Runs extends Source {
  kind = "runs";
  title = "";

  async load(onNews) {
    ({ folder: this.title, runs: this.entries } = await client.get("api/runs"));
    onNews();
    setTimeout(() => this.load(onNews).catch(() => {}), RUNS_MS);
  }
}

class Embedded extends Source {
  kind = "embedded";

  constructor() {
    super();
    this.data = JSON.parse(document.getElementById("data").textContent);
    this.title = this.data.title;
    this.texts = this.data.tokens.some((rows) => rows !== null);
    this.hasOverview = Boolean(this.data.overview);
    this.entries = this.data.entries.map((entry, i) => ({ ...entry, key: String(i) }));
  }

  async load(onNews) {
    onNews();
  }

  async episode(key) {
    return this.data.results[Number(key)];
  }

  async tokens(key) {
    return this.data.tokens[Number(key)] ?? [];
  }

  async markdown(key) {
    return this.data.markdown[Number(key)] ?? [];
  }

  async request(key) {
    return this.data.requests[this.entry(key)?.group_id] ?? null;
  }

  async overview() {
    return this.data.overview;
  }

  async look(text, from) {
    const needle = JSON.stringify(text).slice(1, -1);
    const fits = ({ key }) => JSON.stringify(this.data.results[Number(key)]).includes(needle);
    return { keys: from === null ? this.entries.filter(fits).map(({ key }) => key) : [], next: this.entries.length, share: 1 };
  }
}

const PAGE = 500; // the service returns at most as many summaries

class Live extends Source {
  kind = "live";
  texts = true;
  title = "";
  next = 0; // cursor of the last loaded summary
  #loading = null;

  /** Load the summaries after the last loaded one. Calls during a load wait for it. */
  load(onNews) {
    return (this.#loading ??= this.#load(onNews).finally(() => { this.#loading = null; }));
  }

  async #load(onNews) {
    for (let more = true; more; ) {
      const page = await client.get(`/v1/summaries?after=${this.next}&limit=${PAGE}`);
      more = page.summaries.length === PAGE;
      for (const entry of page.summaries) this.entries.push({ ...entry, key: entry.job_id });
      this.next = page.next;
      onNews();
    }
  }

  /** Forget all summaries. */
  clear() {
    this.entries = [];
    this.next = 0;
    this.generation += 1;
  }

  async episode(key) {
    const job = `/v1/jobs/${encodeURIComponent(key)}`;
    const view = await client.get(job);
    return client.get(`${job}/${over(view) ? "result?acknowledge=false" : "partial"}`);
  }

  async tokens(key) {
    return (await client.get(`/v1/jobs/${encodeURIComponent(key)}/tokens`)).rows;
  }

  async markdown(key) {
    return (await client.get(`/v1/jobs/${encodeURIComponent(key)}/markdown`)).messages;
  }

  request(key) {
    return client.get(`/v1/jobs/${encodeURIComponent(key)}/request`);
  }

  async look(text, from) {
    await this.#loading; // the cursor of the oldest entry is needed
    const cursors = this.entries.map(({ cursor }) => cursor);
    const first = cursors.reduce((a, b) => Math.min(a, b), Infinity) - 1, last = cursors.reduce((a, b) => Math.max(a, b), 0);
    if (!cursors.length) return { keys: [], next: from, share: 1 };
    const found = await client.get(`/v1/search?text=${encodeURIComponent(text)}&after=${from ?? first}`);
    return { keys: found.jobs, next: found.next, share: Math.min(1, (found.next - first) / (last - first)) };
  }
}
