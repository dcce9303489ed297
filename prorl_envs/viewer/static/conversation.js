// The conversation of an episode: turns with their tool calls and results.
import { el } from "./dom.js";
import { markdown } from "./markdown.js";
import { count, seconds } from "./format.js";
import { image, output, replacement } from "./output.js";
import { callsOf, conversationOf, partsOf, textIn, textOf, thoughts, tokenExact } from "./result.js";

const CODE = new Set(["command", "code", "cmd", "script", "input", "patch", "diff", "file_text", "content", "query", "new_str", "old_str", "message", "thought"]);
const SHORT = 1000, GIST = 160; // characters of reasoning, and of each part of a gist

/** The conversation. `onTokens(turn)` shows the tokens of a turn, or is null if there are none; `trees(message)`
 *  returns the parsed Markdown of a message's parts; `linkTo(turn)` returns the address of a turn; `outlined` folds each
 *  turn into one line. */
export function conversation(result, { onTokens = null, trees = () => [], outlined = false, linkTo }) {
  const { before, turns } = conversationOf(result);
  return el("div", { class: outlined ? "conversation outline" : "conversation" },
    toolList(result.tools),
    before.map((message) => said(message, trees(message), { folded: message?.role === "system" })),
    turns.map((turn) => turnBlock(turn, turns.length, { onTokens, trees, outlined, linkTo })),
    !turns.length && el("p", { class: "quiet pad" }, before.length ? "The model has not answered." : "Nothing was said."));
}

function turnBlock(turn, last, { onTokens, trees, outlined, linkTo }) {
  const { message, record } = turn;
  const [reasoning, content] = thoughts(message);
  const calls = callsOf(message);
  const answers = new Map(turn.after.filter((m) => m?.tool_call_id).map((m) => [String(m.tool_call_id), m]));
  const matched = new Set(calls.map(({ id }) => answers.get(id)));
  return el("section", { class: "turn", id: `turn-${turn.number}`, tabindex: "-1", "aria-label": `Turn ${turn.number}` },
    el("header", { class: "turn-head" },
      el("h2", { class: "turn-name" }, el("a", { href: linkTo(turn.number), title: "Link to this turn" }, `Turn ${turn.number}`), el("span", { class: "quiet" }, ` of ${last}`)), outlined && gistButton(turn), record && facts(record),
      record && onTokens && el("button", { type: "button", class: "link", on: { click: () => onTokens(turn) } }, "tokens")),
    thought(reasoning),
    prose(content, trees(message)),
    !calls.length && !partsOf(content).length && !reasoning && el("p", { class: "quiet" }, "An empty answer."),
    calls.map((call) => callCard(call, answers.get(call.id))),
    turn.after.filter((m) => !matched.has(m)).map((m) => said(m, trees(m), {})));
}

/** The button of an outline that folds or opens a turn, with the turn in one line. */
function gistButton(turn) {
  const button = el("button", { type: "button", class: "gist", "aria-expanded": "false", on: { click: () => button.setAttribute("aria-expanded", String(button.getAttribute("aria-expanded") === "false")) } }, gist(turn));
  return button;
}

/** A turn in one line: its tool calls or its text, and the last line of the output. */
function gist({ message, after }) {
  const calls = callsOf(message).map(({ name, arguments: given }) => [name, ...Object.values(given).slice(0, 1).map(textOf)].join(" "));
  const did = calls.join("; ") || textOf(thoughts(message)[1] ?? "").trim() || "an empty answer";
  const output = after.map(textIn).join("\n").trim().split("\n").at(-1);
  return [el("span", {}, did.slice(0, GIST)), output && el("span", { class: "quiet" }, `→ ${output.slice(0, GIST)}`)];
}

/** Open the folded turns of an outline in elements. */
export function openTurns(elements) {
  for (const button of elements.flatMap((element) => [...element.querySelectorAll(".gist")])) button.setAttribute("aria-expanded", "true");
}

/** Open the folded texts in elements: turns of an outline, clipped outputs, and the details that `fits` accepts. */
export function unfold(elements, fits) {
  openTurns(elements);
  for (const more of elements.flatMap((element) => [...element.querySelectorAll(".more")])) more.click();
  for (const folded of elements.flatMap((element) => [element, ...element.querySelectorAll("details")])) if (fits(folded)) folded.open = true;
}

/** The reasoning of a turn, or null if there is none. Only short reasoning is open. */
export function thought(reasoning) {
  return reasoning && el("details", { class: "thought", open: reasoning.length <= SHORT }, el("summary", {}, `Reasoning, ${count(reasoning.length)} characters`), el("div", { class: "prose" }, reasoning));
}

function facts(record) {
  const items = [
    [`model ${seconds(record.model_s)}`, "time of the model call"],
    record.tools_s > 0 && [`tools ${seconds(record.tools_s)}`, "time of the tool calls"],
    [`${count(record.start)} tokens read`, "length of the prompt, with all earlier turns"],
    [`${count(record.end - record.start)} sampled`, "tokens that the model sampled"],
    record.cached_tokens > 0 && [`${count(record.cached_tokens)} cached`, "prompt tokens found in the server's prefix cache"],
    record.finish_reason !== "stop" && [record.finish_reason, "why the model stopped"],
    record.weight_version && [`weights ${record.weight_version}`, `sampled by ${record.server}`],
    !tokenExact(record) && ["not exact", "the server gave text; these ids are not for training"],
  ];
  return el("span", { class: "facts" }, items.filter(Boolean).map(([text, title]) => el("span", { title }, text)));
}

/** A tool call with its result. */
export function callCard(call, answer) {
  return el("div", { class: "call" },
    el("div", { class: "call-head" }, el("span", { class: "tool" }, call.name), el("span", { class: "sr" }, " called with")),
    argumentsOf(call.arguments),
    answer ? el("div", { class: "answer" }, el("span", { class: "sr" }, "Output:"), parts(answer.content, "no output")) : el("p", { class: "quiet answer" }, "no answer"));
}

function argumentsOf(given) {
  const names = Object.keys(given);
  if (!names.length) return null;
  const shown = names.filter((name) => name !== "new_str" || typeof given.old_str !== "string");
  return el("div", { class: "arguments" }, shown.map((name) => argument(given, name, shown.length === 1)));
}

function argument(given, name, alone) {
  const value = given[name];
  if (name === "old_str" && typeof value === "string") return replacement(value, textOf(given.new_str ?? ""));
  if (typeof value === "string" && (value.includes("\n") || CODE.has(name))) {
    return el("div", { class: "argument" }, !(alone && CODE.has(name)) && el("span", { class: "key" }, name), output(value, { kind: "code" }));
  }
  return el("div", { class: "argument inline" }, el("span", { class: "key" }, name), el("code", {}, textOf(value)));
}

function said(message, trees, { folded = false }) {
  const role = typeof message?.role === "string" ? message.role : "message";
  const body = ["user", "system"].includes(role) && partsOf(message?.content).length ? prose(message?.content, trees) : parts(message?.content, "nothing");
  const label = message?.name && role === "tool" ? `${role} ${message.name}` : role;
  if (folded) return el("details", { class: `said ${role}` }, el("summary", {}, el("span", { class: "role" }, label), el("span", { class: "quiet preview" }, textOf(message?.content ?? "").slice(0, 140))), body);
  return el("section", { class: `said ${["user", "tool", "system"].includes(role) ? role : ""}`, "aria-label": label }, el("span", { class: "role" }, label), body);
}

/** The parts of a message's content: parsed Markdown if there is a tree, otherwise the text. */
export function prose(content, trees) {
  return partsOf(content).map((part, i) => {
    if (part.text === undefined || part.text.includes("data:image/")) return partView(part);
    return trees[i] ? markdown(trees[i]) : el("div", { class: "prose" }, part.text);
  });
}

function parts(content, nothing) {
  const found = partsOf(content);
  return found.length ? found.map(partView) : el("p", { class: "quiet" }, nothing);
}

function partView({ text, image: url, json }) {
  if (url !== undefined) return image(url);
  return output(text ?? textOf(json));
}

function toolList(tools) {
  if (!Array.isArray(tools) || !tools.length) return null;
  const named = tools.map((tool) => tool?.function ?? tool ?? {});
  return el("details", { class: "said system" },
    el("summary", {}, el("span", { class: "role" }, "tools"), el("span", { class: "quiet preview" }, named.map(({ name }) => String(name)).join(", "))),
    named.map((tool) => el("div", { class: "offer" }, el("span", { class: "tool" }, String(tool.name)), el("p", {}, String(tool.description ?? "")),
      tool.parameters && el("details", {}, el("summary", { class: "quiet" }, "parameters"), output(textOf(tool.parameters), { kind: "plain" })))));
}
