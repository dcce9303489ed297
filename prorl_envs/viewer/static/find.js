// Search in the conversation of an episode: the places that contain a text, with its occurrences marked.
import { unfold } from "./conversation.js";
import { el, fill } from "./dom.js";

const SHOWN = 20, MARKED = 2000;

/** The search field and its results.
 *  @param panel element with the conversation @param text the initial text
 *  @param places returns the places of the conversation: {name, text, nodes}, with the elements of each place
 *  @returns {node, search, step}: search marks the text again; step goes to its next place */
export function finder(panel, text, places) {
  let found = [], at = -1;
  const field = el("input", { type: "search", id: "find", value: text, placeholder: "Find in this episode", "aria-label": "Find in this episode", autocomplete: "off", spellcheck: "false", on: { input: search } });
  const hits = el("span", { class: "hits", role: "status" });
  const node = el("form", { class: "find", role: "search", on: { submit: (event) => { event.preventDefault(); step(); } } }, field, hits);

  function search() {
    const needle = lower(field.value);
    found = needle ? places().filter((place) => lower(place.text).includes(needle)) : [];
    at = -1;
    draw();
  }

  function draw() {
    const buttons = found.slice(0, SHOWN).map(({ name }, i) => el("button", { type: "button", class: "link", "aria-current": i === at ? "true" : null, on: { click: () => step(i) } }, name));
    fill(hits, !found.length ? field.value && "not found" : [buttons, found.length > SHOWN && `and ${found.length - SHOWN} more`]);
    mark();
  }

  /** Go to a place, by default the next one. Folded texts of the place are opened. */
  function step(to = (at + 1) % found.length) {
    if (!found.length) return;
    at = to;
    const needle = lower(field.value), { nodes } = found[at];
    unfold(nodes, (folded) => lower(folded.textContent).includes(needle));
    draw();
    show(ranges(nodes, needle)[0] ?? nodes[0]);
  }

  function mark() {
    const talk = panel.querySelectorAll(".conversation");
    CSS.highlights?.set("found", new Highlight(...ranges([...talk], lower(field.value))));
  }

  return { node, search, step };
}

/** A text in lower case, except for characters that it would lengthen, such as U+0130: offsets in both texts agree. */
const lower = (text) => {
  const whole = text.toLowerCase();
  return whole.length === text.length ? whole : text.replace(/./gsu, (one) => (one.toLowerCase().length === one.length ? one.toLowerCase() : one));
};

/** The first occurrences of a text in elements. An occurrence that spans several text nodes is not found. */
function ranges(elements, needle) {
  const found = [];
  for (const element of needle ? elements : []) {
    const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const text = lower(walker.currentNode.data);
      for (let at = text.indexOf(needle); at >= 0; at = text.indexOf(needle, at + needle.length)) {
        const range = document.createRange();
        range.setStart(walker.currentNode, at);
        range.setEnd(walker.currentNode, at + needle.length);
        if (found.push(range) === MARKED) return found;
      }
    }
  }
  return found;
}

/** Scroll to a range or an element, also within an output that scrolls itself. */
function show(place) {
  const top = () => place.getBoundingClientRect().top;
  const box = place.startContainer?.parentElement.closest(".output");
  if (box) box.scrollTop += top() - box.getBoundingClientRect().top - box.clientHeight / 2;
  window.scrollBy(0, top() - window.innerHeight / 3);
}
