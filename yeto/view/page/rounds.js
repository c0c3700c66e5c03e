// The timeline: each fragment is a lane, each round a bar in it, made of the phases its time went to.

import { el, learners, mark, number, PHASES, put, span, style, timeStep } from "./format.js";
import { canvas, figure, slider } from "./keys.js";
import { mostly, parts, reason, refusedOf, silentOf, whole } from "./verdict.js";

const LANE_AXIS = 24;
const LANE_LABEL = 34;

export function timeline(openRound) {
  const question = "Where did each round's time go?";
  const { root, answer, legend, body } = figure(question, { wide: true });
  let all = [];
  let shown = [];
  let offset = 0;
  let chosen = null;
  let boxes = [];

  const older = el("button", { type: "button", click: () => page(1) }, "← older");
  const newer = el("button", { type: "button", click: () => page(-1) }, "newer →");
  const said = el("p", { class: "said", "aria-hidden": "true" });
  put(
    legend,
    ...PHASES.map(([phase, name]) => {
      return el("span", { class: "entry" }, el("span", { class: `key phase-${phase}`, "aria-hidden": "true" }), name);
    }),
    el("span", { class: "pager" }, older, newer),
  );
  root.append(said);

  function window() {
    return Math.max(12, Math.min(64, Math.floor(body.clientWidth / 14)));
  }

  function cut() {
    const end = all.length - offset;
    shown = all.slice(Math.max(0, end - window()), end);
    older.disabled = end - window() <= 0;
    newer.disabled = offset === 0;
    say();
    picture.redraw();
  }

  function page(direction) {
    offset = Math.max(0, Math.min(Math.max(0, all.length - 1), offset + direction * Math.floor(window() / 2)));
    cut();
  }

  function lanes() {
    return [...new Set(shown.map((round) => round.fragment))].sort((a, b) => a - b);
  }

  function laneHeight() {
    const many = lanes().length;
    return many <= 12 ? 18 : many <= 32 ? 10 : 5;
  }

  const picture = canvas(body, () => Math.max(1, lanes().length) * (laneHeight() + 3) + LANE_AXIS, draw);

  function draw(pen, width, height) {
    boxes = [];
    if (shown.length === 0) return;
    const from = Math.min(...shown.map((round) => round.opened_at));
    const to = Math.max(...shown.map((round) => round.committed_at));
    const scale = (width - LANE_LABEL - 2) / Math.max(to - from, 1e-6);
    const x = (at) => LANE_LABEL + (at - from) * scale;
    const tall = laneHeight();
    const order = lanes();
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    timeAxis(pen, from, to, x, height, width);
    order.forEach((fragment, lane) => {
      const top = lane * (tall + 3);
      pen.fillStyle = style("lane");
      pen.fillRect(LANE_LABEL, top, width - LANE_LABEL, tall);
      if (tall >= 10 || lane % 4 === 0) {
        pen.fillStyle = style("muted");
        pen.textAlign = "right";
        pen.fillText(`f${fragment}`, LANE_LABEL - 7, top + tall / 2);
      }
    });
    for (const round of shown) {
      const top = order.indexOf(round.fragment) * (tall + 3);
      for (const part of parts(round)) {
        const left = x(part.from);
        const right = Math.max(left + 0.75, x(part.from + part.seconds));
        if (part.seconds === 0) continue;
        pen.fillStyle = style(`phase-${part.phase}`);
        pen.fillRect(left, top, right - left, tall);
        if (part.phase === "earlier") hatch(pen, left, top, right - left, tall);
      }
      const box = { round, left: x(round.opened_at), right: x(round.committed_at), top, bottom: top + tall };
      boxes.push(box);
      if (round === chosen) {
        pen.strokeStyle = style("text");
        pen.lineWidth = 2;
        pen.strokeRect(box.left - 1, box.top - 1, Math.max(4, box.right - box.left) + 2, tall + 2);
      }
    }
  }

  function say() {
    put(said, chosen === null ? "Choose a round, with the pointer or the arrow keys." : words(chosen));
  }

  const keys = slider(body, {
    label: question,
    count: () => all.length,
    text: (place) => words(all[place]),
    move: (place) => {
      chosen = all[place];
      const behind = all.length - 1 - place;
      if (behind < offset || behind >= offset + window()) {
        offset = Math.max(0, behind - Math.floor(window() / 2));
      }
      cut();
    },
    open: (place) => openRound(all[place].step),
  });

  function under(event) {
    const place = picture.element.getBoundingClientRect();
    const left = event.clientX - place.left;
    const top = event.clientY - place.top;
    const inLane = boxes.filter((box) => top >= box.top - 2 && top <= box.bottom + 2);
    const near = inLane.filter((box) => left >= box.left - 3 && left <= box.right + 3);
    return near.length === 0 ? null : near[near.length - 1].round;
  }

  picture.element.addEventListener("pointermove", (event) => {
    const round = under(event);
    if (round !== null && round !== chosen) {
      chosen = round;
      say();
      picture.redraw();
    }
    picture.element.style.cursor = round === null ? "default" : "pointer";
  });
  picture.element.addEventListener("click", (event) => {
    const round = under(event);
    if (round !== null) openRound(round.step);
  });

  function update({ history }) {
    all = history.recent;
    const most = mostly(all);
    put(
      answer,
      most === null
        ? "No round is committed yet."
        : `Of the last ${number(all.length)} rounds' time, ${most.share} was ${phaseName(most.phase)}.${
          all.some((round) => round.sweep) ? ` In the closing sweep, ${sweepRounds(all)}, a round waits for every live member.` : ""}`,
    );
    if (chosen !== null) chosen = all.find((round) => round.step === chosen.step) ?? null;
    cut();
    keys.tell();
  }

  new ResizeObserver(() => cut()).observe(body);
  return { root, update };
}

export function phaseName(phase) {
  return { commit: "the outer step" }[phase] ?? PHASES.find(([key]) => key === phase)[1];
}

export function words(round) {
  const inMerge = `${learners(round.responders)} in the merge`;
  const silent = silentOf(round);
  const missed = silent.length > 0 ? `, ${learners(silent)} missed` : "";
  const refused = refusedOf(round).map(({ learner, why }) => `, learner ${learner} refused (${why})`).join("");
  return `Round ${number(round.step)}, fragment ${round.fragment}${round.sweep ? ", closing sweep" : ""}: ${span(whole(round))}, most of it ${reason(round)}; ${inMerge}${missed}${refused}.`;
}

function sweepRounds(all) {
  const steps = all.filter((round) => round.sweep).map((round) => round.step);
  return steps.length === 1 ? `round ${number(steps[0])}` : `rounds ${number(steps[0])} to ${number(steps[steps.length - 1])}`;
}

function timeAxis(pen, from, to, x, height, width) {
  const step = timeStep((to - from) / Math.max(2, Math.floor(width / 110)));
  pen.textAlign = "center";
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) {
    pen.fillStyle = style("grid");
    pen.fillRect(x(at), 0, 1, height - LANE_AXIS + 4);
    pen.fillStyle = style("muted");
    if (x(at) > LANE_LABEL + 16 && x(at) < width - 24) pen.fillText(mark(at, step), x(at), height - 9);
  }
}

// Lines across, so that attempts that came to nothing are told without colour.
function hatch(pen, left, top, width, height) {
  pen.save();
  pen.beginPath();
  pen.rect(left, top, width, height);
  pen.clip();
  pen.strokeStyle = style("surface");
  pen.lineWidth = 1.5;
  pen.beginPath();
  for (let at = left - height; at < left + width; at += 5) {
    pen.moveTo(at, top + height);
    pen.lineTo(at + height, top);
  }
  pen.stroke();
  pen.restore();
}
