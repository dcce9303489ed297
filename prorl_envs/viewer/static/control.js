// Actions that change the service, one function each. Actions that cannot be undone ask the user first.
import { el, say } from "./dom.js";
import { client } from "./client.js";

/** Send a request, and show `message` or the error. Returns the response, or null after an error. */
export async function act(method, path, body, message) {
  try {
    const answer = await client.send(method, path, body);
    say(message);
    return answer;
  } catch (error) {
    say(error.message);
    return null;
  }
}

export function job(id, last = "") {
  return `/v1/jobs/${encodeURIComponent(id)}${last}`;
}

/** A dialog with fields. Resolves to the values by field name, or null if the user closes the dialog. */
export function ask(title, text, fields, doIt) {
  return new Promise((resolve) => {
    const inputs = fields.map((field) => [field, input(field)]);
    const dialog = el("dialog", { class: "dialog", "aria-labelledby": "ask-title" },
      el("form", { method: "dialog" },
        el("h2", { id: "ask-title" }, title), text && el("p", {}, text),
        inputs.map(([field, node]) => el("div", {}, el("label", { for: `ask-${field.name}` }, field.label), node, field.help && el("p", { class: "quiet" }, field.help))),
        el("div", { class: "buttons" },
          el("button", { type: "button", on: { click: () => dialog.close("") } }, "Close"),
          el("button", { class: "primary", type: "submit", value: "do" }, doIt))));
    dialog.addEventListener("close", () => {
      const values = dialog.returnValue === "do" ? Object.fromEntries(inputs.map(([field, node]) => [field.name, node.value])) : null;
      dialog.remove();
      resolve(values);
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}

function input({ name, type = "text", value = "", options, ...rest }) {
  if (!options) return el("input", { id: `ask-${name}`, name, type, value: String(value), autocomplete: "off", ...attributes(rest) });
  return el("select", { id: `ask-${name}`, name }, options.map(([key, label]) => el("option", { value: key, selected: key === value }, label)));
}

function attributes({ min, max, required, placeholder }) {
  return { min, max, required, placeholder };
}

export async function pause() {
  const asked = await ask("Pause", "Jobs are still accepted. Waiting does not count against any deadline.", [
    { name: "mode", label: "Hold back", value: "finish", options: [["finish", "New jobs: started jobs run to their results"], ["hold", "Every stage: running jobs wait at the end of their stage, with their sandboxes"]] },
  ], "Pause");
  return asked && act("POST", "/v1/pause", { mode: asked.mode }, "Paused.");
}

export function resume() {
  return act("POST", "/v1/resume", undefined, "Resumed.");
}

export async function drain() {
  const asked = await ask("Drain", "No more jobs are accepted; unfinished jobs run to their results. Resume undoes it.", [], "Drain");
  return asked && act("POST", "/v1/drain", undefined, "Draining.");
}

export async function limits(view) {
  const { pools, max_jobs_with_sandbox, queue_limit: queue } = view.status;
  const now = { init: pools.init.limit, run: pools.run.limit, eval: pools.eval.limit, max_jobs_with_sandbox, queue, attempts: view.attempts_limit };
  const names = { init: "Concurrent jobs in INIT", run: "Concurrent jobs in RUN", eval: "Concurrent jobs in EVAL", max_jobs_with_sandbox: "Jobs that hold a sandbox", queue: "Unfinished jobs", attempts: "Attempts per job" };
  const fields = Object.entries(names).map(([name, label]) => ({ name, label, type: "number", min: "1", required: true, value: now[name] }));
  const asked = await ask("Limits", "The limits apply to the service's machine until the service stops. Running jobs above a new limit are not stopped.", fields, "Set");
  if (!asked) return null;
  const changed = Object.fromEntries(Object.entries(asked).map(([name, value]) => [name, Number(value)]).filter(([name, value]) => value !== now[name]));
  return Object.keys(changed).length ? act("PATCH", "/v1/limits", changed, "Limits set.") : null;
}

export async function addServer() {
  const asked = await ask("Add a model server", "", [
    { name: "url", label: "Base URL", type: "url", required: true, placeholder: "http://host:8000/v1" },
    { name: "protocol", label: "Protocol", value: "auto", options: [["auto", "find out"], ["vllm", "vLLM"], ["sglang", "SGLang"], ["openai", "chat only, not for training"]] },
  ], "Add");
  return asked && act("POST", "/v1/model_servers", asked, "Added.");
}

export async function drainServer(url) {
  const asked = await ask("Drain a model server", `${url} gets no more turns, and is removed once its running turns have finished.`, [], "Drain");
  return asked && act("DELETE", `/v1/model_servers?url=${encodeURIComponent(url)}`, undefined, "Draining.");
}

export function node(name, action) {
  return act("POST", `/v1/nodes/${encodeURIComponent(name)}/${action}`, undefined, action === "drain" ? "Draining." : "The node accepts jobs again.");
}

export async function cancelJob(id) {
  const asked = await ask("Cancel a job", `${id} is stopped, and has no reward.`, [], "Cancel the job");
  return asked && act("DELETE", job(id), undefined, "Cancelled.");
}

export async function cancelBatch(id) {
  const asked = await ask("Cancel a batch", `Running jobs of ${id} are stopped.`, [], "Cancel the batch");
  return asked && act("DELETE", `/v1/batches/${encodeURIComponent(id)}`, undefined, "Cancelled.");
}

export async function retryJob(id) {
  const group = await act("POST", job(id, "/retry"), undefined, "Submitted again, as a group of its own.");
  if (group) location.hash = `#/episode/${encodeURIComponent(group.jobs[0].id)}`;
}
