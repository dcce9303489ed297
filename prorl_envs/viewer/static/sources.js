// Where results come from: a service that runs, a file behind a small server, or the page itself.
import { client } from "./client.js";

/** The source that the page names. Each has
 *  - kind, and what it can do: `texts` (reads tokens), `searches` (looks into what was said);
 *  - load(onNews): bring `entries`, summaries each with its `key`; calls onNews as more is there;
 *  - episode(key): the whole result; tokens(key): the text of each token by row; search(text): keys. */
export function source(kind) {
  if (kind === "live") return new Live();
  return kind === "file" ? new File() : new Embedded();
}

class Source {
  entries = [];
  problems = "";
  texts = false;
  searches = true;

  entry(key) {
    return this.entries.find((entry) => entry.key === key);
  }

  group(id) {
    return this.entries.filter((entry) => entry.group_id === id).sort((a, b) => a.sample - b.sample);
  }
}

class File extends Source {
  kind = "file";
  title = "";
  #generation = 0;
  #timer = 0;

  async load(onNews) {
    clearTimeout(this.#timer);
    let more = true;
    while (more) {
      const page = await client.get(`api/episodes?after=${this.entries.length}&generation=${this.#generation}`);
      const fresh = page.generation !== this.#generation;
      if (fresh) this.entries = [];
      this.#generation = page.generation;
      const first = this.entries.length;
      for (const [i, entry] of page.entries.entries()) this.entries.push({ ...entry, key: String(first + i) });
      ({ more, file: this.title, texts: this.texts } = page);
      this.progress = more ? page.read / page.size : 1;
      this.problems = page.bad_lines ? problems(page) : "";
      if (page.entries.length || fresh || !more) onNews();
    }
    this.#timer = setTimeout(() => this.load(onNews).catch(() => {}), 3000); // a run may be writing to it
  }

  episode(key) {
    return client.get(`api/episodes/${key}`);
  }

  async tokens(key) {
    return (await client.get(`api/episodes/${key}/tokens`)).rows;
  }

  async search(text) {
    const found = await client.get(`api/search?text=${encodeURIComponent(text)}`);
    return new Set(found.numbers.map(String));
  }
}

function problems({ bad, bad_lines: lines }) {
  return `${lines} ${lines === 1 ? "line is" : "lines are"} no result; line ${bad[0][0]}: ${bad[0][1]}`;
}

class Embedded extends Source {
  kind = "embedded";

  constructor() {
    super();
    this.data = JSON.parse(document.getElementById("data").textContent);
    this.title = this.data.title;
    this.texts = this.data.tokens.some((rows) => rows !== null);
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

  async search(text) {
    const needle = JSON.stringify(text).slice(1, -1);
    return new Set(this.entries.filter(({ key }) => JSON.stringify(this.data.results[Number(key)]).includes(needle)).map(({ key }) => key));
  }
}

class Live extends Source {
  kind = "live";
  texts = true;
  searches = false;
  title = "";
  #next = 0;
  #keys = new Set();

  async load(onNews) {
    for (let some = true; some; ) {
      const page = await client.get(`/v1/summaries?after=${this.#next}&limit=1000`);
      some = page.summaries.length > 0;
      this.add(page.summaries);
      this.#next = page.next;
      onNews();
    }
  }

  /** Summaries that the stream of events brought. */
  add(summaries) {
    for (const entry of summaries) {
      if (this.#keys.has(entry.job_id)) continue;
      this.#keys.add(entry.job_id);
      this.entries.push({ ...entry, key: entry.job_id });
    }
  }

  async episode(key) {
    const job = `/v1/jobs/${encodeURIComponent(key)}`;
    const view = await client.get(job);
    const over = ["done", "failed", "cancelled"].includes(view.state);
    return client.get(`${job}/${over ? "result" : "partial"}`);
  }

  async tokens(key) {
    return (await client.get(`/v1/jobs/${encodeURIComponent(key)}/tokens`)).rows;
  }

  async search() {
    return new Set();
  }
}
