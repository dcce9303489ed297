// Panel of a service without jobs. It shows commands that submit a job from a shell and over HTTP.
import { el, fill, say } from "./dom.js";
import { client } from "./client.js";

const TASK = { id: "greeting", instruction: "Create the file /workspace/greeting.txt with exactly one line: hello, world", checks: [{ type: "file_equals", path: "greeting.txt", text: "hello, world\n" }] };

/** The two commands. @param origin address of the service @param names environments of the service */
export function commands(origin, names) {
  const environment = names.includes("bash") ? "bash" : names[0] ?? "bash";
  const group = JSON.stringify({ id: "first", environment, task: TASK, samples: 2 });
  return [
    `prorl-envs run ${environment} --service ${origin} --limit 1`,
    `curl -H "Authorization: Bearer $(prorl-envs token --service ${origin})" -H "Content-Type: application/json" -d '${group}' ${origin}/v1/groups`,
  ];
}

/** A panel that is visible while the service has no jobs. */
export function emptyState() {
  const place = el("div", { class: "commands" });
  const node = el("section", { class: "panel empty", "aria-label": "No jobs yet", hidden: true },
    el("h2", {}, "No jobs yet"), el("p", {}, "Submit the first job from a shell, with a command of this package or over HTTP. It then appears here."), place);
  let loaded = false;

  async function load() {
    const { environments } = await client.get("/v1/environments");
    fill(place, commands(location.origin, environments.map(({ name }) => name)).map(command));
  }

  return {
    node,
    show(empty) {
      node.hidden = !empty;
      if (!empty || loaded) return;
      loaded = true;
      load().catch((error) => say(error.message));
    },
  };
}

function command(text) {
  return el("div", { class: "command" }, el("pre", { class: "output" }, text), el("button", { type: "button", on: { click: () => copy(text) } }, "Copy"));
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    say("Copied.");
  } catch {
    say("The browser does not let this page use the clipboard.");
  }
}
