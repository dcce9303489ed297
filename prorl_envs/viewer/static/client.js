// HTTP client for the page's server, with a bearer token if the server requires one. The browser stores the token
// until the tab is closed.
import { el } from "./dom.js";

const KEY = "prorl-token";

/** An error response of the server, with its message and hint. */
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

  /** Send a request, and return the response. Ask the user for the token if it is missing or wrong. */
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
      const error = await errorOf(response);
      if (error.status !== 401) throw error;
      if (sent && sent === this.token) {
        this.forget(); // the next attempt has no token, because the browser may have a cookie
        refused = true;
      } else if (!this.token) await this.#askToken(refused ? "That token is not the service's." : "");
    }
  }

  /** Ask the user for the token. Concurrent requests share one dialog. */
  #askToken(problem) {
    this.#asking ??= askToken(problem).then((token) => {
      sessionStorage.setItem(KEY, token);
      this.#asking = null;
    });
    return this.#asking;
  }
}

export const client = new Client();

async function errorOf(response) {
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
        el("p", { id: "token-help" }, "The command “prorl-envs dashboard” prints a link that signs this browser in. You can also enter the service's bearer token, which “prorl-envs token” prints. The browser stores the token until this tab is closed."),
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
