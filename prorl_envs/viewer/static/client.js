// Asks the page's own server, with the bearer token where it wants one. The token lives as long as the tab.
import { el } from "./dom.js";

const KEY = "prorl-token";

/** An answer that is no success, with the service's own words. */
export class Refused extends Error {
  constructor(status, message, hint) {
    super(hint ? `${message} (${hint})` : message);
    this.status = status;
  }
}

class Client {
  #asking = null;

  get token() {
    return sessionStorage.getItem(KEY) ?? "";
  }

  forget() {
    sessionStorage.removeItem(KEY);
  }

  async get(path) {
    return (await this.ask("GET", path)).json();
  }

  async send(method, path, body) {
    return (await this.ask(method, path, { body })).json();
  }

  /** The response; asks the user for the token where it is missing or wrong. */
  async ask(method, path, { body, signal } = {}) {
    for (let refused = false; ;) {
      const headers = {};
      if (this.token) headers.Authorization = `Bearer ${this.token}`;
      if (body !== undefined) headers["Content-Type"] = "application/json";
      const sent = this.token;
      const response = await fetch(path, {
        method, headers, signal, cache: "no-store", credentials: "same-origin",
        body: body === undefined ? undefined : JSON.stringify(body),
      });
      if (response.ok) return response;
      const error = await told(response);
      if (error.status !== 401) throw error;
      if (sent && sent === this.token) {
        this.forget(); // the browser may be signed in by its cookie
        refused = true;
      } else if (!this.token) await this.#askToken(refused ? "That token is not the service's." : "");
    }
  }

  /** Ask once, however many wait for it. */
  #askToken(problem) {
    this.#asking ??= askToken(problem).then((token) => {
      sessionStorage.setItem(KEY, token);
      this.#asking = null;
    });
    return this.#asking;
  }
}

export const client = new Client();

async function told(response) {
  try {
    const { message, hint } = (await response.json()).error;
    return new Refused(response.status, message, hint);
  } catch {
    return new Refused(response.status, `the server answered ${response.status}`, "");
  }
}

function askToken(problem) {
  return new Promise((resolve) => {
    const field = el("input", { type: "password", id: "token", autocomplete: "off", required: true, minlength: "16", "aria-describedby": "token-help" });
    const dialog = el("dialog", { class: "dialog", "aria-labelledby": "token-title" },
      el("form", { method: "dialog" },
        el("h2", { id: "token-title" }, "Token"),
        el("p", { id: "token-help" }, "The command “prorl-envs dashboard” prints a link that signs this browser in. Or enter the service's bearer token, which “prorl-envs token” prints: it stays in this tab and is forgotten with it."),
        problem && el("p", { class: "problem", role: "alert" }, problem),
        el("label", { for: "token" }, "Bearer token"), field,
        el("div", { class: "buttons" }, el("button", { class: "primary", type: "submit" }, "Sign in"))));
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    dialog.addEventListener("close", () => {
      const token = field.value.trim();
      dialog.remove();
      resolve(token);
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}
