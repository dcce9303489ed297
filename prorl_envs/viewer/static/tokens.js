// The tab with the tokens of a trajectory: sampled tokens with their log-probabilities, and tokens that were only read.
// The tokens are in segments whose elements are created when they are opened, because a row may have 100,000 tokens.
import { el, fill, svg, visible } from "./dom.js";
import { count, number, plural } from "./format.js";
import { list, rowsOf, tokenExact } from "./result.js";

const CHUNK = 1000;
/** Lowest probability of each of the six shades. */
const SHADES = [0, 0.05, 0.2, 0.5, 0.8, 0.95];

/** Segments of tokens with the same mask and turn: {start, end, mask, turn}. Without access to the page. */
export function segments(row) {
  const found = [], starts = new Set(list(row.turns).flatMap(({ start, end }) => [start, end]));
  for (let i = 0; i < row.ids.length; i += 1) {
    const mask = row.loss_mask[i] ?? 0;
    if (!found.length || found.at(-1).mask !== mask || starts.has(i)) found.push({ start: i, end: i, mask, turn: 0 });
    found.at(-1).end = i + 1;
  }
  list(row.turns).forEach(({ start, end }, i) => {
    for (const segment of found) if (segment.start >= start && segment.end <= end) segment.turn = i + 1;
  });
  return found;
}

/** The content of the tab. `load()` returns the text of each token by row, or null. */
export async function tokensView(result, load, focusTurn = 0) {
  const rows = rowsOf(result);
  if (!rows.length) return el("p", { class: "quiet pad" }, "There are no tokens: the episode ended before its prompt was created.");
  let texts = null, why = "";
  try {
    texts = await load();
  } catch (error) {
    why = error.message;
  }
  const info = el("output", { class: "token-info" }, "Point at a token, or move to it with the arrow keys.");
  let before = 0;
  const blocks = rows.map((row, i) => {
    const first = before;
    before += list(row.turns).length;
    return rowView(row, texts?.[i] ?? null, i, rows.length, first, focusTurn, info);
  });
  return el("div", { class: "tokens" },
    !texts && el("p", { class: "quiet" }, `The tokens are shown as ids${why ? `: ${why}` : "."}`),
    el("div", { class: "legend" }, el("span", {}, el("span", { class: "token observed" }, "read"), "loss mask 0"), el("span", {}, "probability of sampled tokens:"),
      SHADES.map((bound, i) => el("span", {}, el("span", { class: `token p${i}` }, i ? `≥ ${bound}` : `< ${SHADES[1]}`)))),
    info, blocks);
}

function rowView(row, texts, index, rows, firstTurn, focusTurn, info) {
  const sampled = row.logprobs.filter((_, i) => row.loss_mask[i]);
  const mean = sampled.length ? sampled.reduce((sum, value) => sum + value, 0) / sampled.length : NaN;
  return el("section", { class: "token-row", "aria-label": `Row ${index + 1}` },
    rows > 1 && el("h2", {}, index < rows - 1 ? `Row ${index + 1} of ${rows}: a fork, before the history was rewritten` : `Row ${rows} of ${rows}: the end of the episode`),
    el("p", { class: "facts" }, el("span", {}, `${count(row.ids.length)} tokens`), el("span", {}, `${count(sampled.length)} to train on`),
      sampled.length > 0 && el("span", {}, `mean log-probability ${number(mean)}`), sampled.length > 0 && el("span", {}, `perplexity ${number(Math.exp(-mean))}`),
      el("span", {}, `drift ${row.drift ?? 0}`), !tokenExact(row) && el("span", { class: "failure" }, "not exact")),
    sampled.length > 1 && profile(sampled),
    segments(row).map((segment) => segmentView(row, texts, segment, firstTurn, focusTurn, info)));
}

function segmentView(row, texts, segment, firstTurn, focusTurn, info) {
  const size = segment.end - segment.start, turn = segment.turn ? segment.turn + firstTurn : 0;
  const open = focusTurn ? turn === focusTurn : segment.mask === 1 && size < 400;
  const name = turn ? `Turn ${turn}, sampled` : "read";
  const body = el("details", { class: segment.mask ? "segment sampled" : "segment", open, id: turn ? `tokens-${turn}` : null },
    el("summary", {}, name, el("span", { class: "quiet" }, ` ${plural(size, "token")}, ${segment.start} to ${segment.end - 1}`)));
  const unfold = () => { if (body.open && body.childElementCount === 1) body.append(strips(row, texts, segment, info)); };
  body.addEventListener("toggle", unfold);
  unfold();
  return body;
}

function strips(row, texts, segment, info) {
  const place = el("div", { class: "token-text", tabindex: "0", role: "group", "aria-label": "tokens" });
  let drawn = segment.start, focused = null;
  const more = el("button", { type: "button", class: "more" });
  function draw() {
    const last = Math.min(segment.end, drawn + CHUNK);
    for (; drawn < last; drawn += 1) place.append(token(row, texts, drawn));
    if (drawn < segment.end) fill(more, `Show the next ${count(Math.min(CHUNK, segment.end - drawn))} of ${count(segment.end - drawn)}`);
    else more.remove();
  }
  function tell(node) {
    if (!node?.dataset.i) return;
    focused?.classList.remove("focused");
    focused = node;
    node.classList.add("focused");
    const i = Number(node.dataset.i), logprob = row.logprobs[i];
    const sampled = row.loss_mask[i] ? `sampled, log-probability ${number(logprob)}, probability ${number(Math.exp(logprob))}` : "read, not trained on";
    fill(info, `Token ${i}: id ${row.ids[i]}, ${texts ? `${JSON.stringify(texts[i])}, ` : ""}${sampled}`);
  }
  place.addEventListener("pointerover", (event) => tell(event.target.closest(".token")));
  place.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const next = focused && place.contains(focused) ? (step > 0 ? focused.nextElementSibling : focused.previousElementSibling) : place.firstElementChild;
    tell(next);
    next?.scrollIntoView({ block: "nearest" });
  });
  more.addEventListener("click", draw);
  draw();
  return el("div", {}, place, drawn < segment.end && more);
}

function token(row, texts, i) {
  const text = texts ? texts[i] : `${row.ids[i]}`;
  const shade = row.loss_mask[i] ? `p${shadeOf(row.logprobs[i])}` : "observed";
  const shown = texts ? visible(text).replaceAll("\n", "↵\n") || "·" : text;
  return el("span", { class: texts ? `token ${shade}` : `token id ${shade}`, data: { i: String(i) } }, shown);
}

function shadeOf(logprob) {
  const probability = Math.exp(logprob);
  return SHADES.findLastIndex((bound) => probability >= bound);
}

/** A line chart of the sampled tokens' log-probabilities in order: the lowest value in each of 300 intervals. */
function profile(values) {
  const width = 300, step = Math.max(1, values.length / width), points = [];
  for (let at = 0; at < values.length; at += step) points.push(Math.min(...values.slice(Math.floor(at), Math.max(Math.floor(at) + 1, Math.floor(at + step)))));
  const low = Math.min(-1, ...points);
  const path = points.map((value, i) => `${i ? "L" : "M"}${((i / Math.max(1, points.length - 1)) * width).toFixed(1)} ${((value / low) * 38 + 1).toFixed(1)}`).join("");
  return el("figure", { class: "profile" }, svg("svg", { viewBox: `0 0 ${width} 40`, preserveAspectRatio: "none", role: "img", "aria-label": `log-probabilities, lowest ${number(low)}` }, svg("path", { d: path, class: "profile-line" })),
    el("figcaption", { class: "quiet" }, `log-probability of the sampled tokens in their order, from 0 down to ${number(low)}`));
}
