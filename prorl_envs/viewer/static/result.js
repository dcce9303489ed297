// Parts of a result. The functions accept any values, because a result comes from a file and contains model output.

/** The rows of the trajectory, forks first. */
export function rowsOf(result) {
  return [...list(result.forks), ...(result.trajectory ? [result.trajectory] : [])];
}

/** The conversation: the messages before the first answer, and one turn per answer with the messages `after` it.
 *  `record` is the model call of a turn; it is missing if the numbers of turns and model calls differ. */
export function conversationOf(result) {
  const before = [], turns = [];
  for (const message of list(result.messages)) {
    if (message?.role === "assistant") turns.push({ number: turns.length + 1, message, after: [] });
    else (turns.at(-1)?.after ?? before).push(message);
  }
  const records = rowsOf(result).flatMap((row, i) => list(row.turns).map((turn) => ({ ...turn, row: i })));
  if (records.length === turns.length) turns.forEach((turn, i) => { turn.record = records[i]; });
  return { before, turns };
}

/** The parts of a message's content: {text}, {image}, {json}. */
export function partsOf(content) {
  if (content === null || content === undefined || content === "") return [];
  if (typeof content === "string") return [{ text: content }];
  if (!Array.isArray(content)) return [{ json: content }];
  return content.map((part) => {
    if (typeof part === "string") return { text: part };
    if (typeof part?.text === "string") return { text: part.text };
    const url = part?.image_url?.url ?? part?.image_url ?? part?.image;
    return typeof url === "string" ? { image: url } : { json: part };
  });
}

/** The tool calls of a message: {id, name, arguments}. If the arguments are not an object, it is {arguments: value}. */
export function callsOf(message) {
  return list(message?.tool_calls).map((call) => {
    const called = call?.function ?? call ?? {};
    let given = called.arguments ?? {};
    if (typeof given === "string") {
      try {
        given = JSON.parse(given);
      } catch {
        given = { arguments: given };
      }
    }
    const readable = given !== null && typeof given === "object" && !Array.isArray(given);
    return { id: String(call?.id ?? ""), name: String(called.name ?? "?"), arguments: readable ? given : { arguments: given } };
  });
}

/** The reasoning and the remaining content of a message: [reasoning, content]. */
export function thoughts(message) {
  const reasoning = message?.reasoning_content ?? message?.reasoning ?? message?.thinking;
  if (typeof reasoning === "string" && reasoning) return [reasoning, message.content];
  const found = typeof message?.content === "string" ? /^\s*<think>([\s\S]*?)<\/think>\s*/.exec(message.content) : null;
  return found ? [found[1].trim(), message.content.slice(found[0].length)] : ["", message?.content];
}

/** The texts of a message with its tool calls, one per line and without images. */
export function textIn(message) {
  return leaves([thoughts(message), callsOf(message).map(({ name, arguments: given }) => [name, Object.entries(given).map(([key, value]) => `${key}: ${textOf(value)}`)])]).join("\n");
}

function leaves(value) {
  if (value !== null && typeof value === "object") return Object.values(value).flatMap(leaves);
  const text = String(value ?? "");
  return text && !text.startsWith("data:") ? [text] : [];
}

/** The conversation as plain text. */
export function transcript(result) {
  const { before, turns } = conversationOf(result), reward = result.reward ?? "none";
  const part = (name, message) => `## ${name}\n\n${textIn(message)}`;
  return [
    `# ${result.job_id}: task ${result.task_id}, environment ${result.environment}, reward ${reward}`, result.failure && `${result.failure.kind} in ${result.failure.stage}: ${result.failure.message}`,
    before.map((message) => part(message?.role ?? "message", message)),
    turns.map((turn) => [part(`turn ${turn.number}`, turn.message), turn.after.map((message) => part(message?.role ?? "message", message))]),
  ].flat(Infinity).filter(Boolean).join("\n\n") + "\n";
}

/** Whether the ids of a row or turn are the ids that the model sampled. Results of format 1 call the field `exact`. */
export function tokenExact(part) {
  return (part.token_exact ?? part.exact) !== false;
}

/** The value if it is an array, otherwise an empty array. */
export function list(value) {
  return Array.isArray(value) ? value : [];
}

/** Any value as text. */
export function textOf(value) {
  return typeof value === "string" ? value : JSON.stringify(value, null, 2) ?? String(value);
}
