// Small charts. Each has a text for screen readers.
import { el, svg } from "./dom.js";
import { count } from "./format.js";

/** A line chart of values. The vertical axis ends at the highest value, but not below `most`. */
export function sparkline(values, { label, most = 0, width = 160, height = 34 } = {}) {
  const top = Math.max(most, ...values, 1), step = width / Math.max(1, values.length - 1);
  const points = values.map((value, i) => `${(i * step).toFixed(1)} ${(height - 1 - (value / top) * (height - 3)).toFixed(1)}`);
  return svg("svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
    values.length > 1 && svg("path", { class: "spark-area", d: `M0 ${height}L${points.join("L")}L${width} ${height}Z` }),
    values.length > 1 && svg("path", { class: "spark-line", d: `M${points.join("L")}` }));
}

/** Labels of a chart's axes: the ends of the horizontal axis, and the highest value of the vertical axis. */
export function axes({ from, middle = "", to, top }) {
  return [el("p", { class: "axis-top quiet" }, top), el("p", { class: "axis quiet" }, el("span", {}, from), middle && el("span", {}, middle), el("span", {}, to))];
}

/** The height of the highest bar of `stacked`. */
export function highest(rows) {
  return Math.max(0, ...rows.map((row) => row.reduce((sum, { value }) => sum + value, 0)));
}

/** A stacked bar chart. @param rows the parts {value, kind} of each bar, from the bottom. */
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

const BINS = 20, CHART = { width: 380, height: 170, left: 40, bottom: 34, top: 8, right: 10 };

/** Bins of values: {from, to, count}. `whole`: the values are integers, so the width of a bin is an integer. */
export function binned(values, { whole = false } = {}) {
  if (!values.length) return [];
  let low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
  if (!whole && low >= 0 && high <= 1 && high > 0.5) [low, high] = [0, 1];
  const raw = (high - low || 1) / (low === 0 && high === 1 ? 10 : BINS), power = 10 ** Math.floor(Math.log10(raw));
  const nice = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= raw * 0.999);
  const step = whole ? Math.max(1, Math.ceil(nice)) : nice, start = Math.floor(low / step) * step;
  const n = Math.max(1, whole ? Math.floor((high - start) / step) + 1 : Math.ceil((high - start) / step - 1e-9));
  const bins = Array.from({ length: n }, (_, i) => ({ from: start + i * step, to: start + (i + 1) * step, count: 0 }));
  for (const value of values) bins[Math.min(n - 1, Math.floor((value - start) / step + 1e-9))].count += 1;
  return bins;
}

/** A histogram. @param axis label of the horizontal axis @param write formats a value @param whole the values are
 *  integers */
export function histogram(values, { name, axis, write, whole = false }) {
  const bins = binned(values, { whole }), { width, height, left, bottom, top, right } = CHART;
  const most = Math.max(1, ...bins.map((bin) => bin.count)), step = (width - left - right) / Math.max(1, bins.length), floor = height - bottom;
  const text = (x, y, said, anchor) => svg("text", { x: x.toFixed(1), y, "text-anchor": anchor }, said);
  const edges = whole && bins.length && bins[0].to - bins[0].from === 1;
  const marks = bins.map((bin, i) => svg("rect", { class: "fill-bar", x: (left + i * step).toFixed(2), y: (floor - (bin.count / most) * (floor - top)).toFixed(2), width: Math.max(1, step - 1.5).toFixed(2), height: ((bin.count / most) * (floor - top)).toFixed(2) },
    svg("title", {}, `${edges ? write(bin.from) : `${write(bin.from)} to ${write(bin.to)}`}: ${count(bin.count)}`)));
  const at = edges ? bins.map((bin, i) => [left + (i + 0.5) * step, bin.from]) : [...bins.map((bin, i) => [left + i * step, bin.from]), ...(bins.length ? [[width - right, bins.at(-1).to]] : [])];
  const every = Math.ceil(at.length / 6);
  const mean = values.reduce((sum, value) => sum + value, 0) / values.length, digits = mean < 100 ? 100 : 1;
  return el("figure", { class: "histogram panel" }, el("figcaption", {}, el("h2", {}, name), el("span", { class: "quiet" }, values.length ? `mean ${write(Math.round(mean * digits) / digits)}, ${count(values.length)} episodes` : "no values")),
    bins.length > 0 && svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `histogram of ${name.toLowerCase()}: ${bins.map((bin) => `${write(bin.from)}: ${bin.count}`).join(", ")}` },
      svg("line", { class: "axis-line", x1: left, x2: width - right, y1: floor, y2: floor }), svg("line", { class: "axis-line", x1: left, x2: left, y1: top, y2: floor }),
      text(left - 6, top + 8, count(most), "end"), text(left - 6, floor, "0", "end"), marks,
      at.filter((_, i) => i % every === 0).map(([x, value]) => text(x, floor + 14, write(Number(value.toPrecision(6))), x > width - 2 * right ? "end" : "middle")),
      text((left + width - right) / 2, height - 4, axis, "middle"),
      svg("text", { x: -(top + floor) / 2, y: 10, transform: "rotate(-90)", "text-anchor": "middle" }, "episodes")));
}

/** A table of counts by name, with a bar for each count. */
export function ranking(counts, { kind = "bad" } = {}) {
  const most = Math.max(1, ...counts.map(([, n]) => n));
  return el("table", { class: "plain" }, el("tbody", {}, counts.map(([name, n]) => el("tr", {},
    el("th", { scope: "row" }, name), el("td", { class: "meter-cell" }, el("span", { class: "meter", "aria-hidden": "true" }, el("span", { class: kind, style: { width: `${(n / most) * 100}%` } }))), el("td", { class: "numeric" }, count(n))))));
}

/** A bar with the share of `value` in the bound `most`. */
export function gauge(value, most, { label, kind = "" } = {}) {
  const share = most > 0 ? Math.min(1, value / most) : 0;
  return el("span", { class: "gauge", role: "meter", "aria-label": label, "aria-valuenow": value, "aria-valuemin": 0, "aria-valuemax": Math.max(most, value) },
    el("span", { class: kind, style: { width: `${share * 100}%` } }));
}
