// A dialog with the keys of the pages.
import { el } from "./dom.js";

const KEYS = [
  ["Everywhere", [["?", "show this help"], ["/", "go to the filter"]]],
  ["Filter", [["↓ or Enter", "go to the list"]]],
  ["Lists", [["↑ ↓ or j k", "move"], ["Page Up, Page Down, Home, End", "move further"], ["Enter", "open"], ["Tab", "go to the column headers, which sort"]]],
  ["Episode", [["j k", "next and previous turn"], ["f", "find in this episode; Enter goes to the next place"], ["n p", "next and previous sample of the group"], ["] [", "next and previous episode of the filtered list"], ["u", "back to the list"], ["← →", "change the tab that has the focus"]]],
];

/** Show the dialog. */
export function showHelp() {
  if (document.querySelector("dialog[open]")) return;
  const dialog = el("dialog", { class: "dialog help", "aria-labelledby": "help-title" },
    el("form", { method: "dialog" }, el("h2", { id: "help-title" }, "Keys"),
      KEYS.map(([where, keys]) => el("section", {}, el("h3", {}, where), el("dl", {}, keys.map(([key, does]) => el("div", {}, el("dt", {}, el("kbd", {}, key)), el("dd", {}, does)))))),
      el("div", { class: "buttons" }, el("button", { class: "primary", type: "submit" }, "Close"))));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}
