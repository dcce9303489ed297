// Small charts. Each says in words what it shows.
import { el, svg } from "./dom.js";
import { count } from "./format.js";

/** A line over values, from 0 to the most of them (or `most`). */
export function sparkline(values, { label, most = 0, width = 160, height = 34 } = {}) {
  const top = Math.max(most, ...values, 1), step = width / Math.max(1, values.length - 1);
  const points = values.map((value, i) => `${(i * step).toFixed(1)} ${(height - 1 - (value / top) * (height - 3)).toFixed(1)}`);
  return svg("svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
    values.length > 1 && svg("path", { class: "spark-area", d: `M0 ${height}L${points.join("L")}L${width} ${height}Z` }),
    values.length > 1 && svg("path", { class: "spark-line", d: `M${points.join("L")}` }));
}

/** Bars of several parts over each other: `rows` are lists of {value, kind}. */
export function stacked(rows, { label, height = 84, width = 360 } = {}) {
  const top = Math.max(1, ...rows.map((row) => row.reduce((sum, { value }) => sum + value, 0)));
  const step = width / rows.length;
  const marks = rows.flatMap((row, i) => {
    let at = height;
    return row.filter(({ value }) => value > 0).map(({ value, kind }) => {
      const tall = (value / top) * (height - 2);
      at -= tall;
      return svg("rect", { class: `fill-${kind}`, x: (i * step).toFixed(2), y: at.toFixed(2), width: Math.max(1, step - 1).toFixed(2), height: tall.toFixed(2) });
    });
  });
  return svg("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": label }, marks);
}

/** Counts by name, as bars with their numbers. */
export function ranking(counts, { kind = "bad" } = {}) {
  const most = Math.max(1, ...counts.map(([, n]) => n));
  return el("table", { class: "plain" }, el("tbody", {}, counts.map(([name, n]) => el("tr", {},
    el("th", { scope: "row" }, name), el("td", { class: "meter-cell" }, el("span", { class: "meter", "aria-hidden": "true" }, el("span", { class: kind, style: { width: `${(n / most) * 100}%` } }))), el("td", { class: "numeric" }, count(n))))));
}

/** How much of a bound is taken. */
export function gauge(value, most, { label, kind = "" } = {}) {
  const share = most > 0 ? Math.min(1, value / most) : 0;
  return el("span", { class: "gauge", role: "meter", "aria-label": label, "aria-valuenow": value, "aria-valuemin": 0, "aria-valuemax": Math.max(most, value) },
    el("span", { class: kind, style: { width: `${share * 100}%` } }));
}
