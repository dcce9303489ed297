// The event stream of a service (server-sent events). A broken connection is opened again.
// EventSource is not used, because it cannot send the bearer token, and a token in an address would be logged.
import { client } from "./client.js";

const FIRST_PAUSE_MS = 500, LONGEST_PAUSE_MS = 10_000;

/** Read the stream without end. Calls on.event(name, data) for each event, and on.state(connected) for each change. */
export async function follow(path, on) {
  for (let pause = FIRST_PAUSE_MS; ; pause = Math.min(pause * 2, LONGEST_PAUSE_MS)) {
    try {
      const response = await client.ask("GET", path);
      on.state(true);
      pause = FIRST_PAUSE_MS;
      await read(response.body, on.event);
    } catch (error) {
      if (error.status && error.status !== 503 && error.status !== 429) on.event("refused", error);
    }
    on.state(false);
    await new Promise((resolve) => setTimeout(resolve, pause));
  }
}

async function read(body, onEvent) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const lines = event.split("\n"); // in a multi-line pattern, U+2028 would also end a line
      const field = (name) => lines.find((line) => line.startsWith(`${name}: `))?.slice(name.length + 2);
      if (field("event") && field("data")) onEvent(field("event"), JSON.parse(field("data")));
    }
  }
}
