// Numbers and times as people read them, and elements that are made of text, never of markup: a tape may say
// anything, and none of it may become code.

export const NONE = "–";

export function number(value, digits = 0) {
  if (value === null || value === undefined) return NONE;
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

// Three significant figures, for quantities whose size is not known beforehand.
export function short(value) {
  if (value === null || value === undefined) return NONE;
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return value.toLocaleString("en", { maximumSignificantDigits: 3 });
}

export function percent(value) {
  if (value === null || value === undefined) return NONE;
  const share = value * 100;
  return `${number(share, share > 0 && share < 9.95 ? 1 : 0)} %`;
}

// Of shares that stand beside each other: whole numbers need not add up to a hundred.
export function fineShare(value) {
  return value === null || value === undefined ? NONE : `${number(value * 100, 1)} %`;
}

export function median(values) {
  const known = values.filter((value) => value !== null && value !== undefined).sort((a, b) => a - b);
  if (known.length === 0) return null;
  const half = known.length >> 1;
  return known.length % 2 === 1 ? known[half] : (known[half - 1] + known[half]) / 2;
}

export function span(seconds) {
  if (seconds === null || seconds === undefined) return NONE;
  if (seconds < 0) return `-${span(-seconds)}`;
  if (seconds === 0) return "0 s";
  if (seconds < 0.9995) return `${number(seconds * 1000, seconds < 0.00995 ? 1 : 0)} ms`;
  if (seconds < 99.95) return `${number(seconds, seconds < 9.995 ? 2 : 1)} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${pad(whole % 60)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 2880) return `${Math.floor(minutes / 60)} h ${pad(minutes % 60)} min`;
  const hours = Math.round(seconds / 3600);
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

function pad(value) {
  return String(value).padStart(2, "0");
}

// A time of the session for an axis: what differs between two marks is always there.
export function mark(seconds, step) {
  if (step < 1) return `${number(seconds, step < 0.1 ? 2 : 1)} s`;
  const whole = Math.round(seconds);
  const clock = `${pad(Math.floor(whole / 60) % 60)}:${pad(whole % 60)}`;
  return whole < 3600 ? clock : `${Math.floor(whole / 3600)}:${clock}`;
}

// The first of the steps that people count in that is not smaller.
export function roundStep(wanted) {
  const power = 10 ** Math.floor(Math.log10(Math.max(wanted, 1e-9)));
  return [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= wanted * 0.999);
}

export function timeStep(wanted) {
  const known = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];
  if (wanted <= 0.5) return roundStep(wanted);
  return known.find((size) => size >= wanted) ?? Math.ceil(wanted / 86400) * 86400;
}

// Wall clock times of a tape have a zone; people elsewhere read them best in none but UTC.
export function wallClock(text) {
  const time = new Date(text);
  return Number.isNaN(time.getTime()) ? text : `${time.toISOString().slice(0, 16).replace("T", " ")} UTC`;
}

// What a coordinator says, as a sentence of its own.
export function asSentence(text) {
  const whole = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?]$/.test(whole) || whole === "" ? whole : `${whole}.`;
}

export function bytes(value) {
  if (value === null || value === undefined) return NONE;
  // As the terminal says it, so that the same bytes are the same words.
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value.toFixed(unit > 0 ? 1 : 0)} ${units[unit]}`;
}

export function count(value, one, many = `${one}s`) {
  return `${number(value)} ${value === 1 ? one : many}`;
}

export function learners(ids) {
  if (ids.length === 0) return "nobody";
  const shown = ids.slice(0, 6).join(", ");
  const more = ids.length > 6 ? ` and ${ids.length - 6} more` : "";
  return `${ids.length === 1 ? "learner" : "learners"} ${shown}${more}`;
}

// Make an element. Attributes that are functions become listeners, children that are strings become text.
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

// Replace what is inside; where that is the same text, nothing is touched, so nothing is read out twice.
export function put(element, ...children) {
  if (children.length === 1 && typeof children[0] === "string") {
    if (element.textContent !== children[0]) element.textContent = children[0];
    return;
  }
  element.replaceChildren(...children.filter((child) => child !== null && child !== undefined));
}

// A colour or size of the style sheet, as it is in the present scheme.
export function style(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

export const PHASES = [
  ["earlier", "earlier attempts"],
  ["gather", "gathering"],
  ["grace", "waiting after the quorum"],
  ["merge", "merging"],
  ["turn", "waiting for earlier rounds"],
  ["commit", "outer step"],
];

const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];

// Eight colours, then the same with other dashes; more than 32 learners are hard to tell apart in any picture.
export function learnerStroke(index) {
  return { stroke: style(`learner-${index % 8}`), dash: DASHES[Math.floor(index / 8) % DASHES.length] };
}
