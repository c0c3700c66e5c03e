// Lines with bands, stacks, and bars. Each chart is given a function that reads the data and returns what is to
// be seen; when that has the same shape as before, only numbers are exchanged.

import { el, NONE, number, percent, put, style } from "./format.js";
import { figure, slider } from "./keys.js";

const HEIGHT = 200;
const drawn = new Set();

// A chart over rounds. `read(data)` returns null when there is nothing to see, else
// {answer, x, lines: [{label, stroke, dash, mean, min, max, gaps}], value(v), stacked, rounds, top}. A line with `gaps`
// goes on over places where it has no value; above `top` nothing is shown.
export function lineChart(question, read, { hideEmpty = false, empty, openRound, wide = false } = {}) {
  const parts = figure(question, { wide });
  const { root, answer, legend, body } = parts;
  let plot = null;
  let shape = "";
  let seen = null;
  const hidden = new Set();
  const keys = slider(body, {
    label: question,
    count: () => seen?.x.length ?? 0,
    text: (place) => `${roundName(place)}: ${seen.lines
      .filter((line) => line.mean[place] !== null && line.mean[place] !== undefined)
      .map((line) => `${line.label} ${seen.value(line.mean[place])}`).join(", ") || "nothing"}`,
    move: (place) => {
      if (plot !== null) plot.setCursor({ left: plot.valToPos(seen.x[place], "x"), top: HEIGHT / 2 });
    },
    open: (place) => openRound?.(seen.x[place]),
  });

  function roundName(place) {
    const first = seen.x[place];
    const width = seen.rounds?.[place] ?? 1;
    return width > 1 ? `rounds ${number(first)} to ${number(first + width - 1)}` : `round ${number(first)}`;
  }

  function showLegend(place) {
    const at = place ?? null;
    legend.querySelectorAll("output").forEach((output, index) => {
      const line = seen.lines[index];
      put(output, at === null ? "" : line.mean[at] === null ? NONE : seen.value(line.mean[at]));
    });
    const where = legend.querySelector(".where");
    if (where !== null) put(where, at === null ? "" : roundName(at));
  }

  function buildLegend() {
    put(
      legend,
      ...seen.lines.map((line) => {
        const mark = el("span", { class: "key", "aria-hidden": "true" });
        mark.style.background = line.dash?.length > 0
          ? `repeating-linear-gradient(90deg, ${line.stroke} 0 5px, transparent 5px 8px)` : line.stroke;
        return el(
          "button",
          {
            type: "button",
            "aria-pressed": String(!hidden.has(line.label)),
            click: (event) => {
              if (hidden.has(line.label)) hidden.delete(line.label);
              else hidden.add(line.label);
              event.currentTarget.setAttribute("aria-pressed", String(!hidden.has(line.label)));
              if (plot !== null) build();
            },
          },
          mark, line.label, " ", el("output", { "aria-live": "off" }),
        );
      }),
      el("span", { class: "where" }),
    );
    legend.hidden = seen.lines.length < 2 && !openRound;
  }

  function build() {
    plot?.destroy();
    plot = new uPlot(options(seen, hidden, body.clientWidth, showLegend), columns(seen, hidden), body);
    if (openRound !== undefined) {
      plot.over.addEventListener("click", () => {
        const place = placeUnder(plot, seen);
        if (place !== null) openRound(seen.x[place]);
      });
    }
  }

  function update(data) {
    const next = read(data);
    if (next === null) {
      root.hidden = hideEmpty;
      put(answer, empty ?? "Nothing to see yet.");
      body.hidden = empty !== undefined;
      root.classList.toggle("wide", wide || body.hidden);
      plot?.destroy();
      plot = null;
      seen = null;
      shape = "";
      legend.replaceChildren();
      keys.tell();
      return;
    }
    root.hidden = body.hidden = false;
    root.classList.toggle("wide", wide);
    put(answer, next.answer);
    const nextShape = JSON.stringify(next.lines.map((line) => [line.label, line.min !== undefined]));
    const same = nextShape === shape && plot !== null;
    seen = next;
    shape = nextShape;
    if (same) plot.setData(columns(seen, hidden));
    else {
      buildLegend();
      if (body.clientWidth > 0) build();
    }
    keys.tell();
  }

  new ResizeObserver(() => {
    if (seen === null || body.clientWidth === 0) return;
    if (plot === null) build();
    else if (plot.width !== body.clientWidth) plot.setSize({ width: body.clientWidth, height: HEIGHT });
  }).observe(body);
  drawn.add(() => {
    // The scheme changed: strokes are read from the style sheet anew.
    shape = "";
  });
  return { root, update };
}

// Forget what depends on the colour scheme; the next update draws anew.
export function schemeChanged() {
  drawn.forEach((forget) => forget());
}

function columns(seen, hidden) {
  if (seen.stacked) {
    // Each place is a step as wide as its rounds, so the last one needs an end.
    const last = seen.x.length - 1;
    const result = [[...seen.x, lastRound(seen) + 1]];
    // Drawn from the top: each sum covers the one before down to the axis.
    const shown = seen.lines.filter((line) => !hidden.has(line.label));
    const sums = [];
    let below = seen.x.map(() => 0);
    for (const line of shown) {
      below = below.map((sum, place) => sum + (line.mean[place] ?? 0));
      sums.push(below);
    }
    sums.reverse().forEach((sum) => result.push([...sum, sum[last]]));
    return result;
  }
  const result = [seen.x];
  for (const line of seen.lines) {
    const show = !hidden.has(line.label);
    const nothing = () => seen.x.map(() => null);
    if (line.min !== undefined) result.push(show ? line.min : nothing(), show ? line.max : nothing());
    result.push(show ? line.mean : nothing());
  }
  return result;
}

function lastRound(seen) {
  const last = seen.x.length - 1;
  return seen.x[last] + Math.max(1, seen.rounds?.[last] ?? 1) - 1;
}

// Where the pointer is: at the nearest place, or in the step that it is over.
function placeUnder(plot, seen) {
  const near = plot.cursor.idx ?? null;
  if (!seen.stacked || near === null) return near;
  const place = seen.x.findLastIndex((first) => first <= plot.posToVal(plot.cursor.left, "x"));
  return place < 0 ? null : place;
}

function options(seen, hidden, width, showLegend) {
  const text = style("muted");
  const grid = { stroke: style("grid"), width: 1 };
  const axis = { stroke: text, grid, ticks: { ...grid, size: 4 }, font: "11px system-ui, sans-serif" };
  const series = [{}];
  const bands = [];
  if (seen.stacked) {
    const shown = seen.lines.filter((line) => !hidden.has(line.label)).reverse();
    for (const line of shown) series.push({ fill: line.stroke, width: 0, points: { show: false }, paths: uPlot.paths.stepped({ align: 1 }) });
  } else {
    for (const line of seen.lines) {
      if (line.min !== undefined) {
        const bounds = { width: 0, points: { show: false } };
        series.push(bounds, bounds);
        bands.push({ series: [series.length - 1, series.length - 2], fill: faint(line.stroke) });
      }
      series.push({
        stroke: line.stroke, dash: line.dash, width: 1.75, spanGaps: line.gaps === true,
        points: { size: 4, fill: line.stroke, filter: alone },
      });
    }
  }
  return {
    width,
    height: HEIGHT,
    legend: { show: false },
    series,
    bands,
    cursor: { y: false, points: { show: !seen.stacked }, drag: { x: true, y: false }, sync: { key: "rounds" } },
    scales: { x: { time: false }, y: { range: bounds(seen) } },
    axes: [
      { ...axis, size: 30, space: 60, values: (_, ticks) => ticks.map((tick) => Number.isInteger(tick) && tick <= lastRound(seen) ? number(tick) : "") },
      { ...axis, size: 58, space: 36, values: (_, ticks) => ticks.map((tick) => seen.value(tick)) },
    ],
    hooks: { setCursor: [(plot) => showLegend(placeUnder(plot, seen))] },
  };
}

// A value between two gaps has no line through it, so it gets a point.
function alone(plot, place) {
  const values = plot.data[place];
  const found = [];
  const known = (at) => values[at] !== null && values[at] !== undefined;
  values.forEach((value, at) => {
    if (known(at) && !(at > 0 && known(at - 1)) && !(at + 1 < values.length && known(at + 1))) found.push(at);
  });
  return found;
}

function bounds(seen) {
  return (_, low, high) => {
    if (low === null || high === null) return [0, 1];
    high = Math.min(Math.max(high, seen.least ?? high), seen.top ?? Infinity);
    const bottom = seen.zero === false ? low : Math.min(0, low);
    const room = (high - bottom || Math.abs(high) || 1) * 0.06;
    return [seen.zero === false || low < 0 ? bottom - room : bottom, high + room];
  };
}

function faint(colour) {
  return `color-mix(in srgb, ${colour} 22%, transparent)`;
}

// Bars that stand: a histogram. `read(data)` returns null, or {answer, bars: [{label, count}]}.
export function histogram(question, read) {
  const { root, answer, legend, body } = figure(question);
  legend.remove();
  body.classList.add("bars");

  function update(data) {
    const seen = read(data);
    body.hidden = seen === null;
    put(answer, seen === null ? "Nothing to see yet." : seen.answer);
    if (seen === null) return;
    const most = Math.max(1, ...seen.bars.map((bar) => bar.count));
    const all = seen.bars.reduce((sum, bar) => sum + bar.count, 0);
    const items = seen.bars.map((bar) => {
      const fill = el("div", { class: "bar" });
      // What is there at all must be seen.
      fill.style.height = bar.count === 0 ? "0" : `max(2px, ${(bar.count / most) * 100}%)`;
      return el(
        "li", { title: `${bar.label}: ${number(bar.count)}` },
        el("span", { class: "count" }, bar.count === 0 ? "" : percent(bar.count / all)),
        el("div", { class: "column" }, fill),
        el("span", { class: "bin" }, bar.label),
        el("span", { class: "unseen" }, `: ${number(bar.count)}`),
      );
    });
    body.dataset.many = items.length > 8;
    put(body, el("ol", {}, ...items));
  }

  return { root, update };
}

// Bars that lie, several for each name. `read(data)` returns null, or {answer, rows: [{name, bars: [{label, value, text, kind}]}]}.
export function lyingBars(question, read, { hideEmpty = false } = {}) {
  const { root, answer, legend, body } = figure(question);
  legend.remove();

  function update(data) {
    const seen = read(data);
    root.hidden = seen === null && hideEmpty;
    body.hidden = seen === null;
    put(answer, seen === null ? "Nothing to see yet." : seen.answer);
    if (seen === null) return;
    const most = Math.max(1e-9, ...seen.rows.flatMap((row) => row.bars.map((bar) => bar.value ?? 0)));
    const rows = seen.rows.map((row) => el(
      "li", {}, el("span", { class: "name" }, row.name),
      ...row.bars.map((bar) => {
        const fill = el("div", { class: `bar ${bar.kind}` });
        fill.style.width = `${((bar.value ?? 0) / most) * 100}%`;
        return el("div", { class: "lying" }, el("div", { class: "track" }, fill), el("span", {}, `${bar.label} ${bar.text}`));
      }),
    ));
    put(body, el("ul", { class: "lyings" }, ...rows));
  }

  return { root, update };
}
