// Pictures with a row for each learner, or each sort of fault, and a column for each bucket of rounds. A cell is
// filled from below, part by part, so it can be read without colours.

import { el, number, percent, put, roundStep, style } from "./format.js";
import { canvas, figure, slider } from "./keys.js";
import { refusedOf } from "./verdict.js";

const ROW_AXIS = 20;

// `read(data)` returns null, or {answer, step, rounds, rows: [{label, parts: [{colour, shares}]}], words(place), after}.
// With `after` there is one column more than rounds, for what came after the last of them; it says its name.
function cells(question, keyNames, read, openRound) {
  const { root, answer, legend, body } = figure(question, { wide: true });
  let seen = null;
  let at = null;
  const said = el("p", { class: "said", "aria-hidden": "true" });
  put(legend, ...keyNames.map(([kind, name]) => el(
    "span", { class: "entry" }, el("span", { class: `key ${kind}`, "aria-hidden": "true" }), name,
  )));
  legend.hidden = keyNames.length === 0;
  root.append(said);

  function tall() {
    return seen.rows.length <= 12 ? 22 : seen.rows.length <= 32 ? 13 : 8;
  }

  function columnCount() {
    return seen === null ? 0 : seen.step.length + (seen.after === undefined ? 0 : 1);
  }

  function labelWidth(width) {
    return width < 420 ? 64 : 88;
  }

  const picture = canvas(body, () => seen === null ? 30 : Math.max(1, seen.rows.length) * (tall() + 2) + ROW_AXIS, draw);

  function left(width, place) {
    const label = labelWidth(width);
    return label + ((width - label) * place) / Math.max(1, columnCount());
  }

  function draw(pen, width, height) {
    if (seen === null) return;
    const high = tall();
    const label = labelWidth(width);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    seen.rows.forEach((row, index) => {
      const top = index * (high + 2);
      pen.fillStyle = style("lane");
      pen.fillRect(label, top, width - label, high);
      pen.fillStyle = style("muted");
      pen.textAlign = "right";
      if (high >= 10 || index % 2 === 0) pen.fillText(row.label, label - 8, top + high / 2, label - 8);
      const colours = row.parts.map((part) => style(part.colour));
      for (let place = 0; place < columnCount(); place += 1) {
        const from = left(width, place);
        const wide = left(width, place + 1) - from;
        // A gap between cells where there is room for one.
        const shown = Math.max(wide - (wide > 5 ? 1 : 0), row.least ?? 0.6);
        let bottom = top + high;
        row.parts.forEach((part, which) => {
          const size = part.shares[place] * high;
          if (size <= 0) return;
          pen.fillStyle = colours[which];
          pen.fillRect(from, bottom - size, shown, size);
          if (part.crossed && wide > 9) cross(pen, from, bottom - size, shown, size, part.crossed);
          bottom -= size;
        });
      }
    });
    axisMarks(pen, width, height);
    if (at !== null && at < columnCount()) {
      pen.strokeStyle = style("text");
      pen.lineWidth = 1.5;
      const wide = left(width, at + 1) - left(width, at);
      pen.strokeRect(left(width, at) - 1, 0, Math.max(3, wide) + 1, height - ROW_AXIS + 1);
    }
  }

  function axisMarks(pen, width, height) {
    const { step, rounds } = seen;
    const first = step[0];
    const end = step[step.length - 1] + Math.max(1, rounds[rounds.length - 1]);
    const every = Math.max(1, roundStep((end - first) / Math.max(2, Math.floor(width / 100))));
    pen.fillStyle = style("muted");
    pen.textAlign = "center";
    const label = labelWidth(width);
    const edge = left(width, step.length);
    for (let round = Math.ceil(first / every) * every; round < end; round += every) {
      const x = label + ((edge - label) * (round - first + 0.5)) / (end - first);
      if (x < edge - 12) pen.fillText(number(round), x, height - 7);
    }
    if (seen.after === undefined) return;
    pen.fillRect(edge - 1, 0, 1, height - ROW_AXIS);
    pen.textAlign = "right";
    pen.fillText(seen.after, width, height - 7);
  }

  function say() {
    put(said, seen === null ? "" : at === null || at >= columnCount()
      ? "Choose a column, with the pointer or the arrow keys." : `${columnName(at)}: ${seen.words(at)}.`);
  }

  function columnName(place) {
    if (place === seen.step.length) return "After the last round";
    const many = seen.rounds[place];
    const first = seen.step[place];
    return many > 1 ? `Rounds ${number(first)} to ${number(first + many - 1)}` : `Round ${number(first)}`;
  }

  const keys = slider(body, {
    label: question,
    count: columnCount,
    text: (place) => `${columnName(place)}: ${seen.words(place)}`,
    move: (place) => {
      at = place;
      say();
      picture.redraw();
    },
    open: openColumn,
  });

  function openColumn(place) {
    if (place < seen.step.length) openRound(seen.step[place]);
  }

  function under(event) {
    const place = picture.element.getBoundingClientRect();
    const label = labelWidth(place.width);
    const share = (event.clientX - place.left - label) / (place.width - label);
    return seen === null || share < 0 || share >= 1 ? null : Math.floor(share * columnCount());
  }

  picture.element.addEventListener("pointermove", (event) => {
    const place = under(event);
    if (place !== null && place !== at) keys.go(place);
  });
  picture.element.addEventListener("click", (event) => {
    const place = under(event);
    if (place !== null) openColumn(place);
  });

  function update(data) {
    seen = read(data);
    put(answer, seen === null ? "No round is committed yet." : seen.answer);
    body.hidden = seen === null;
    say();
    picture.redraw();
    keys.tell();
  }

  return { root, update };
}

function sum(values) {
  return values.reduce((all, one) => all + one, 0);
}

const KINDS = [
  ["merged", "merged"],
  ["left_out", "came, but was left out"],
  ["refused", "its push was refused"],
  ["missed", "did not answer"],
];
const CROSSED = { missed: "falling", refused: "both" };

export function participation(openRound) {
  const names = [...KINDS.map(([kind, name]) => [`part-${kind}`, name]), ["part-none", "no member"]];
  return cells("Who took part in which round?", names, ({ history }) => {
    const { step, rounds, by_learner: by, left_out: more } = history.learners;
    const learners = Object.entries(by).map(([learner, { counts }]) => {
      // Those refused are counted among the missed, too.
      const refused = counts.refused ?? rounds.map(() => 0);
      return [learner, { counts: { ...counts, refused, missed: counts.missed.map((many, place) => many - refused[place]) } }];
    });
    const whole = sum(rounds);
    if (whole === 0 || learners.length === 0) return null;
    const rows = learners.map(([learner, { counts }]) => ({
      label: `learner ${learner}`,
      parts: KINDS.map(([kind]) => ({
        colour: `part-${kind}`,
        crossed: CROSSED[kind],
        shares: counts[kind].map((many, place) => many / Math.max(1, rounds[place])),
      })),
    }));
    const shares = learners.map(([learner, { counts }]) => ({ learner, share: sum(counts.merged) / whole }));
    const least = shares.reduce((few, one) => (one.share < few.share ? one : few));
    const beyond = more > 0 ? ` Only the first ${learners.length} learners are drawn.` : "";
    const reasons = (place, learner) => {
      const round = [...history.recent, ...history.slowest].find((one) => one.step === step[place]);
      const found = rounds[place] > 1 || round === undefined ? undefined : refusedOf(round).find((one) => String(one.learner) === learner);
      return found === undefined ? "" : ` (${found.why})`;
    };
    const words = (place) => learners.slice(0, 16).map(([learner, { counts }]) => {
      const told = KINDS.filter(([kind]) => counts[kind][place] > 0)
        .map(([kind, name]) => [kind, kind === "refused" ? "refused" : name])
        .map(([kind, name]) => (rounds[place] > 1 ? `${name} ${percent(counts[kind][place] / rounds[place])}` : name) + (kind === "refused" ? reasons(place, learner) : ""));
      return `learner ${learner} ${told.join(", ") || "no member"}`;
    }).join("; ");
    const answer = least.share === 1
      ? `Everybody was in every one of ${number(whole)} rounds.`
      : `Learner ${least.learner} was in the fewest: ${percent(least.share)} of ${number(whole)} rounds.`;
    return { answer: answer + beyond, step, rounds, rows, words };
  }, openRound);
}

const FAULTS = [
  ["retries", "discarded", "attempt discarded", "attempts discarded", "part-missed"],
  ["refusals", "refused", "refusal", "refusals", "part-left_out"],
  ["leaves", "left", "learner left", "learners left", "learner-3"],
  ["joins", "joined", "learner joined", "learners joined", "learner-2"],
  ["restarts", "restarts", "restart", "restarts", "learner-0"],
];

export function faults(openRound) {
  return cells("When did something go wrong?", [], ({ moment, history }) => {
    const { step, rounds } = history.run;
    if (step.length === 0) return null;
    // What came after the last commit has a column of its own.
    const counts = Object.fromEntries(FAULTS.map(([name]) => [name, [...history.run.counts[name], history.run.counts_after?.[name] ?? 0]]));
    const over = moment.session.exit_code !== null || moment.writer === "gone";
    const told = (place) => FAULTS.map(([name, , one, many]) => [place === null ? sum(counts[name]) : counts[name][place], one, many])
      .filter(([times]) => times > 0).map(([times, one, many]) => `${number(times)} ${times === 1 ? one : many}`).join(", ");
    const rows = FAULTS.map(([name, label, , , colour]) => {
      const most = Math.max(1, ...counts[name]);
      // One alone must be seen beside many.
      return { label, least: 3, parts: [{ colour, shares: counts[name].map((many) => (many === 0 ? 0 : 0.35 + (0.65 * many) / most)) }] };
    });
    const all = told(null);
    return { answer: all === "" ? "Nothing did." : `${all}, in ${number(sum(rounds))} rounds.`, step, rounds, rows, after: over ? "end" : "now", words: (place) => told(place) || "nothing" };
  }, openRound);
}

// A line across what never came, and two across what was refused.
function cross(pen, left, top, width, height, how) {
  pen.strokeStyle = style("surface");
  pen.lineWidth = 1.25;
  pen.beginPath();
  pen.moveTo(left + 1.5, top + 1.5);
  pen.lineTo(left + width - 1.5, top + height - 1.5);
  if (how === "both") {
    pen.moveTo(left + 1.5, top + height - 1.5);
    pen.lineTo(left + width - 1.5, top + 1.5);
  }
  pen.stroke();
}
