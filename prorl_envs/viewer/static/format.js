// Numbers as text.

const GROUPED = new Intl.NumberFormat("en");

/** An integer: 12,345; or 1.2M from a million on. */
export function count(number) {
  if (!Number.isFinite(number)) return "–";
  if (Math.abs(number) >= 1e6) return `${(number / 1e6).toFixed(1)}M`;
  return GROUPED.format(number);
}

/** A duration: 3 ms, 1.2 s, 2 min 5 s, 3 h 10 min. */
export function seconds(value) {
  if (!Number.isFinite(value)) return "–";
  if (value <= 0) return "0 s";
  if (value < 0.0995) return `${Number((value * 1000).toPrecision(value < 0.0095 ? 1 : 2))} ms`;
  if (value < 9.95) return `${value.toFixed(1)} s`;
  if (value < 59.5) return `${Math.round(value)} s`;
  const minutes = Math.floor((value + 0.5) / 60);
  if (minutes < 60) return `${minutes} min ${Math.round(value - minutes * 60)} s`;
  if (minutes < 60 * 24) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return `${Math.floor(minutes / 1440)} d ${Math.floor((minutes % 1440) / 60)} h`;
}

/** A time in UTC, to the minute. */
export function date(text) {
  const when = new Date(text ?? "");
  return Number.isNaN(when.getTime()) ? "–" : `${when.toISOString().slice(0, 16).replace("T", " ")} UTC`;
}

/** A number with up to four significant digits. */
export function number(value) {
  return Number.isFinite(value) ? String(Number(value.toPrecision(4))) : "–";
}

export function percent(share) {
  return Number.isFinite(share) ? `${(share * 100).toFixed(share < 0.1 ? 1 : 0)}%` : "–";
}

export function bytes(value) {
  if (!Number.isFinite(value)) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  for (; value >= 1000 && unit < units.length - 1; unit += 1) value /= 1000;
  return `${unit ? value.toPrecision(3) : value} ${units[unit]}`;
}

/** A count with a noun: "1 job", "2 jobs". */
export function plural(n, one, many = `${one}s`) {
  return `${count(n)} ${n === 1 ? one : many}`;
}

/** The CSS class for the colour of a reward. */
export function tone(reward) {
  if (reward === null || reward === undefined) return "none";
  return reward >= 1 ? "good" : reward > 0 ? "part" : "bad";
}

/** The reason of an episode's end in one or two words. */
export function outcome(entry) {
  if (entry.failure && entry.failure !== "cancelled") return `failed: ${entry.failure}`;
  return (entry.stop_reason ?? entry.state).replaceAll("_", " ");
}

/** Whether a job has ended. */
export function over({ state }) {
  return ["done", "failed", "cancelled"].includes(state);
}

/** The seconds of an episode in its stages, without waiting. */
export function active(entry) {
  return entry.init_s + entry.run_s + entry.eval_s;
}
