// A table of any length; the page contains only the visible rows. The grid has the focus: arrow keys move the active
// row, Enter opens it.
import { el, fill } from "./dom.js";

const SPARE = 8;
let lists = 0;

/** @param columns {id, name, cell(item), width, grow, numeric, wide, sortable}
 *  @param onOpen called with the item of an opened row @param onSort called with the id of a column */
export class VirtualList {
  #items = [];
  #active = 0;
  #drawn = "";

  constructor({ label, columns, rowHeight = 40, onOpen = null, onSort = null, keyOf = (item) => item.key, empty = "Nothing here." }) {
    Object.assign(this, { columns, rowHeight, onOpen, onSort, keyOf, empty });
    this.id = `list${(lists += 1)}`;
    this.head = el("div", { class: "list-head", role: "row" });
    this.space = el("div", { class: "list-space", role: "presentation" });
    this.body = el("div", { class: "list-body", role: "presentation" }, this.space);
    this.node = el("div", { class: "list", role: "grid", "aria-label": label, tabindex: "0", on: { keydown: (event) => this.#key(event) } }, this.head, this.body);
    this.body.addEventListener("scroll", () => this.#draw(), { passive: true });
    this.observer = new ResizeObserver(() => this.#draw());
    this.observer.observe(this.body);
  }

  /** Show other items. The active item stays active if it is among them. */
  update(items, { sort = "", descending = false } = {}) {
    const key = this.#items.length ? this.keyOf(this.#items[this.#active] ?? this.#items[0]) : null;
    this.#items = items;
    const index = key === null ? -1 : items.findIndex((item) => this.keyOf(item) === key);
    this.#active = Math.max(0, index);
    this.node.setAttribute("aria-rowcount", String(items.length + 1));
    const focused = this.head.contains(document.activeElement) ? document.activeElement.dataset.column : null;
    fill(this.head, this.columns.map((column) => this.#heading(column, sort, descending)));
    if (focused) this.head.querySelector(`[data-column="${focused}"]`)?.focus({ preventScroll: true });
    this.space.style.height = `${Math.max(items.length, 1) * this.rowHeight}px`;
    this.#drawn = "";
    this.#draw();
  }

  focus() {
    this.node.focus({ preventScroll: true });
  }

  /** Stop the observer. */
  end() {
    this.observer.disconnect();
  }

  #heading(column, sort, descending) {
    const sorted = column.id === sort;
    const name = column.name || el("span", { class: "sr" }, column.label);
    return el("div", {
      role: "columnheader", class: kinds(column), style: size(column),
      "aria-sort": sorted ? (descending ? "descending" : "ascending") : null,
    }, this.onSort && column.sortable !== false
      ? el("button", { type: "button", class: "heading", title: `Sort by ${(column.name || column.label).toLowerCase()}`, data: { column: column.id }, on: { click: () => this.onSort(column.id) } }, name, sorted && el("span", { "aria-hidden": "true" }, descending ? " ↓" : " ↑"))
      : name);
  }

  #draw() {
    const top = this.body.scrollTop, height = this.body.clientHeight;
    const first = Math.max(0, Math.floor(top / this.rowHeight) - SPARE);
    const last = Math.min(this.#items.length, Math.ceil((top + height) / this.rowHeight) + SPARE);
    const drawn = `${first}-${last}-${this.#active}`;
    if (drawn === this.#drawn) return;
    this.#drawn = drawn;
    if (!this.#items.length) fill(this.space, el("p", { class: "quiet pad" }, this.empty));
    else fill(this.space, this.#items.slice(first, last).map((item, i) => this.#row(item, first + i)));
    this.node.setAttribute("aria-activedescendant", this.#items.length ? `${this.id}-${this.#active}` : "");
  }

  #row(item, index) {
    const active = index === this.#active;
    return el("div", {
      role: "row", id: `${this.id}-${index}`, class: active ? "row active" : "row", "aria-rowindex": index + 2, "aria-selected": active ? "true" : null,
      style: { top: `${index * this.rowHeight}px`, height: `${this.rowHeight}px` },
      on: this.onOpen ? { click: (event) => this.#click(event, item, index) } : {},
    }, this.columns.map((column) => el("div", { role: "gridcell", class: kinds(column), style: size(column) }, column.cell(item))));
  }

  #click(event, item, index) {
    if (event.target.closest("a, button, input") || event.ctrlKey || event.metaKey || getSelection()?.toString()) return;
    this.#active = index;
    this.#draw();
    this.onOpen(item);
  }

  #key(event) {
    if (event.target !== this.node) return;
    const page = Math.max(1, Math.floor(this.body.clientHeight / this.rowHeight) - 1);
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity, j: 1, k: -1 };
    if (event.key === "Enter" && this.#items.length) this.onOpen?.(this.#items[this.#active]);
    else if (event.key in steps && !event.ctrlKey && !event.metaKey && !event.altKey) this.#move(steps[event.key]);
    else return;
    event.preventDefault();
  }

  #move(step) {
    this.#active = Math.min(this.#items.length - 1, Math.max(0, this.#active + step));
    const top = this.#active * this.rowHeight, height = this.body.clientHeight;
    if (top < this.body.scrollTop) this.body.scrollTop = top;
    else if (top + this.rowHeight > this.body.scrollTop + height) this.body.scrollTop = top + this.rowHeight - height;
    this.#draw();
  }
}

/** Go from a filter to its list if the key of an event says so. */
export function toList(event, list) {
  if (event.key !== "ArrowDown" && event.key !== "Enter") return;
  event.preventDefault();
  list.focus();
}

function kinds(column) {
  return ["cell", column.numeric && "numeric", column.wide && "wide", column.grow && "grow"].filter(Boolean).join(" ");
}

function size(column) {
  return column.grow ? { "flex-grow": String(column.grow) } : { "flex-basis": column.width };
}
