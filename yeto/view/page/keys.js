// Pictures of rounds for people who cannot point at them: a picture is a slider over its rounds. Arrow keys
// move, Enter opens, and what it stands on is said in words.

import { el } from "./format.js";

// The shell of everything that is drawn: the question, its answer, and a place for the picture.
export function figure(question, { wide = false } = {}) {
  const answer = el("p", { class: "answer" });
  const legend = el("div", { class: "legend" });
  const body = el("div", { class: "picture" });
  const root = el(
    "figure", { class: wide ? "figure wide" : "figure" },
    el("figcaption", {}, el("h3", {}, question), answer), body, legend,
  );
  return { root, answer, legend, body };
}

// Make an element a slider over places 0 to count() - 1.
export function slider(element, { label, count, text, move, open }) {
  let at = null;
  element.tabIndex = 0;
  element.setAttribute("role", "slider");
  element.setAttribute("aria-label", label);

  function tell() {
    const places = count();
    const now = at === null ? places - 1 : Math.min(at, places - 1);
    element.setAttribute("aria-valuemin", "1");
    element.setAttribute("aria-valuemax", String(Math.max(places, 1)));
    element.setAttribute("aria-valuenow", String(Math.max(now + 1, 1)));
    element.setAttribute("aria-valuetext", places === 0 ? "no rounds yet" : text(now));
  }

  function go(place) {
    const places = count();
    if (places === 0) return;
    at = Math.max(0, Math.min(places - 1, place));
    tell();
    move(at);
  }

  element.addEventListener("keydown", (event) => {
    const now = at === null ? count() - 1 : at;
    const steps = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageUp: 10, PageDown: -10 };
    if (event.key in steps) go(now + steps[event.key]);
    else if (event.key === "Home") go(0);
    else if (event.key === "End") go(count() - 1);
    else if (event.key === "Enter" || event.key === " ") {
      if (count() > 0 && open !== undefined) open(Math.min(now, count() - 1));
    } else return;
    event.preventDefault();
  });
  return { tell, go };
}

// A canvas that is as wide as its place, sharp on any screen, and drawn again when that changes.
export function canvas(place, height, draw) {
  const element = el("canvas", { "aria-hidden": "true" });
  place.append(element);
  let drawn = "";

  function redraw() {
    const width = place.clientWidth;
    const tall = height();
    if (width === 0) return;
    const ratio = window.devicePixelRatio || 1;
    const size = `${width}x${tall}x${ratio}`;
    if (size !== drawn) {
      drawn = size;
      element.width = Math.round(width * ratio);
      element.height = Math.round(tall * ratio);
      element.style.width = `${width}px`;
      element.style.height = `${tall}px`;
    }
    const pen = element.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, tall);
    draw(pen, width, tall);
  }

  new ResizeObserver(redraw).observe(place);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  return { element, redraw };
}
