// Which plots there are. A title is the question that its plot answers; the line below it is the answer.

import { bytes, count, learnerStroke, number, percent, PHASES, short, span, style } from "./format.js";
import { histogram, lineChart, lyingBars } from "./charts.js";
import { phaseName } from "./rounds.js";

// Buckets of a series that say how it is of late.
const AGREEMENT_BUCKETS = 8;

function mean(values) {
  const known = values.filter((value) => value !== null && value !== undefined);
  return known.length === 0 ? null : known.reduce((sum, value) => sum + value, 0) / known.length;
}

function axis(table) {
  return { x: table.step, rounds: table.rounds };
}

function some(column) {
  return column !== undefined && column.mean.some((value) => value !== null);
}

function line(label, column, stroke) {
  return { label, stroke, mean: column.mean, ...(column.min === undefined ? {} : { min: column.min, max: column.max }) };
}

// One line for each learner, of a series of its own.
function perLearner(history, name) {
  return Object.entries(history.learners.by_learner)
    .filter(([, { series }]) => some(series[name]))
    .map(([learner, { series }], index) => ({ label: `learner ${learner}`, mean: series[name].mean, learner, ...learnerStroke(index) }));
}

function extremes(lines) {
  const means = lines.map((one) => ({ label: one.label, value: mean(one.mean) })).filter((one) => one.value !== null);
  means.sort((a, b) => a.value - b.value);
  return [means[0], means[means.length - 1]];
}

function made(history) {
  const names = ["gather", "grace", "merge", "turn", "commit"];
  const series = names.map((name) => history.run.series[`${name}_seconds`]);
  if (!series.every(some)) return null;
  const means = series.map((column) => mean(column.mean) ?? 0);
  const all = means.reduce((sum, value) => sum + value, 0);
  const most = means.indexOf(Math.max(...means));
  return {
    answer: `Of a round's ${span(all)} on average, ${percent(all === 0 ? 0 : means[most] / all)} is ${phaseName(names[most])}.`,
    ...axis(history.run), value: span, stacked: true,
    lines: names.map((name, index) => ({
      label: PHASES.find(([key]) => key === name)[1], stroke: style(`phase-${name}`), mean: series[index].mean,
    })),
  };
}

function banded(name, label, value, answer, rest = {}) {
  return ({ history }) => {
    const column = history.run.series[name];
    if (!some(column)) return null;
    return { answer: answer(column), ...axis(history.run), value, lines: [line(label, column, style("learner-0"))], ...rest };
  };
}

function learnersOver(name, value, answer, rest = {}) {
  return ({ history }) => {
    const lines = perLearner(history, name);
    if (lines.length === 0) return null;
    return { answer: answer(...extremes(lines), lines), ...axis(history.learners), value, lines, ...rest };
  };
}

function loss({ loss: curves }) {
  if (!curves || curves.length === 0) return null;
  const steps = [...new Set(curves.flatMap((curve) => curve.step))].sort((a, b) => a - b);
  const lines = curves.map((curve, index) => {
    const by = new Map(curve.step.map((step, place) => [step, curve.loss[place]]));
    return { label: curve.name, mean: steps.map((step) => by.get(step) ?? null), ...learnerStroke(index) };
  });
  const first = mean(curves.map((curve) => curve.loss[0]));
  const last = mean(curves.map((curve) => curve.loss[curve.loss.length - 1]));
  return { answer: `From ${short(first)} to ${short(last)}, the mean of ${count(curves.length, "learner")}.`, x: steps, value: short, zero: false, lines };
}

function bins(name, value, answer) {
  return ({ history }) => {
    const found = history.histograms[name];
    const all = found === undefined ? 0 : found.counts.reduce((sum, many) => sum + many, 0);
    if (all === 0) return null;
    let first = found.counts.findIndex((many) => many > 0);
    let last = found.counts.length - found.counts.slice().reverse().findIndex((many) => many > 0) - 1;
    // A bar alone says little of where it stands.
    first = Math.max(0, first - 1);
    last = Math.min(found.counts.length - 1, last + 1);
    const bars = found.counts.slice(first, last + 1).map((many, place) => ({ label: value(found.edges[first + place], found.edges[first + place + 1]), count: many }));
    return { answer: answer(found, all), bars };
  };
}

// The bin below whose upper edge at least so large a share of all lies.
function below(found, all, share) {
  let sum = 0;
  for (let place = 0; place < found.counts.length; place += 1) {
    sum += found.counts[place];
    if (sum >= share * all) return found.edges[place + 1] ?? found.edges[place];
  }
  return found.edges[found.edges.length - 1];
}

function stale({ moment }) {
  const entries = Object.entries(moment.staleness).map(([value, many]) => [Number(value), many]);
  const all = entries.reduce((sum, [, many]) => sum + many, 0);
  if (all === 0) return null;
  const by = new Map(entries);
  const most = Math.max(...by.keys());
  const bars = [];
  for (let value = 0; value <= Math.min(most, 11); value += 1) bars.push({ label: String(value), count: by.get(value) ?? 0 });
  if (most > 11) bars.push({ label: "12+", count: entries.filter(([value]) => value > 11).reduce((sum, [, many]) => sum + many, 0) });
  return { answer: `${percent((by.get(0) ?? 0) / all)} of ${number(all)} merged pushes were not stale${most === 0 ? "" : `; the stalest was so by ${count(most, "round")}`}.`, bars };
}

function moved({ moment }) {
  const rows = moment.learners.filter((learner) => learner.bytes_in !== null || learner.bytes_out !== null);
  if (rows.length === 0) return null;
  const sent = rows.reduce((sum, learner) => sum + (learner.bytes_in ?? 0), 0);
  return {
    answer: `${bytes(sent)} came from ${count(rows.length, "learner")}.`,
    rows: rows.map((learner) => ({
      name: `learner ${learner.learner}`,
      bars: [
        { label: "sent", value: learner.bytes_in, text: bytes(learner.bytes_in), kind: "sent" },
        ...(learner.bytes_out === null ? [] : [{ label: "received", value: learner.bytes_out, text: bytes(learner.bytes_out), kind: "received" }]),
      ],
    })),
  };
}

function between(low, high) {
  if (low === null || low <= 0) return `< ${span(high)}`;
  return high === null || high === undefined || high > 1e8 ? `≥ ${span(low)}` : span(low);
}

// What the merges told of their learners; nothing where they did not, as on older tapes.
function agreement({ history }) {
  const series = history.run.series;
  const names = [["delta_cosine", "cosine between deltas"], ["norm_ratio", "merged / average"], ["offset_ratio", "published ahead by"]];
  const known = names.filter(([name]) => series[name] !== undefined && some(series[name]));
  if (known.length === 0) return null;
  const [cosine, , offset] = names.map(([name]) => mean(series[name]?.mean.slice(-AGREEMENT_BUCKETS) ?? []));
  const agree = cosine === null ? "One learner alone has nobody to agree with"
    : cosine > 0.3 ? "They agree" : cosine > 0.05 ? "They agree a little" : cosine >= -0.1 ? "They neither agree nor disagree"
      : cosine >= -0.3 ? "They disagree a little" : "They undo each other's work";
  const ahead = offset === null ? "" : offset > 1 ? `; what is published is too far ahead of them, ${number(offset, 2)} of their average deltas`
    : offset > 0.05 ? `; what is published is ahead of their mean by ${number(offset, 2)} of their average delta` : "; what is published is their mean";
  return {
    answer: `${agree}${cosine === null ? "" : ` of late (cosine ${number(cosine, 2)})`}${ahead}.`,
    ...axis(history.run), value: (ratio) => number(ratio, 2), zero: true,
    lines: known.map(([name, label], index) => ({ label, mean: series[name].mean, ...learnerStroke(index) })),
  };
}

export function allPlots(openRound) {
  const over = { openRound };
  return {
    time: [
      lineChart("What are rounds made of, over the whole run?", ({ history }) => made(history), over),
      histogram("How much grace was granted?", bins("grace_seconds", between, (found, all) => `Half of ${number(all)} graces were below ${span(below(found, all, 0.5))}, nine of ten below ${span(below(found, all, 0.9))}.`)),
      histogram("How long did the quorum take?", bins("quorum_seconds", between, (found, all) => `Half of the rounds had it within ${span(below(found, all, 0.5))}, nine of ten within ${span(below(found, all, 0.9))}.`)),
    ],
    learners: [
      lineChart("Whose work is in the model?", learnersOver("contribution", percent, (least, most, lines) => lines.length === 1
        ? `All of it is ${most.label}'s.` : `${percent(most.value)} of a merge is ${most.label}'s where it takes part, ${percent(least.value)} ${least.label}'s.`), over),
      lineChart("How fast does each learner step?", learnersOver("steps_per_second", (value) => short(value), (least, most) => `From ${short(least.value)} steps/s (${least.label}) to ${short(most.value)} (${most.label}), on average.`), over),
      lineChart("How stale is what is merged?", learnersOver("staleness", (value) => short(value), (least, most) => most.value === 0
        ? "Not at all: every push began from the newest version." : `${short(most.value)} rounds for ${most.label}, on average; ${short(least.value)} for ${least.label}.`, { least: 1 }), over),
      histogram("How stale were the merged pushes?", stale),
      lyingBars("How much did each learner send?", moved, { hideEmpty: true }),
    ],
    training: [
      lineChart("Does the loss fall?", loss, { hideEmpty: true }),
      lineChart("Are the merged gradients steady?", banded("gradient_norm", "norm of the merged gradient", short, (column) => {
        const known = column.mean.filter((value) => value !== null);
        const most = Math.max(...(column.max ?? column.mean).filter((value) => value !== null));
        return `The norm is ${short(known[known.length - 1])} now, was ${short(known[0])} at first, and never above ${short(most)}.`;
      }), over),
      lineChart("Do the learners agree? Is the published model ahead of them?", agreement, { ...over, hideEmpty: true }),
      lineChart("Do the learners' deltas point where the momentum does?", ({ history }) => {
        const lines = perLearner(history, "cosine");
        const all = history.run.series.cosine;
        if (lines.length === 0 && !some(all)) return null;
        const value = mean(all.mean);
        return {
          answer: value === null ? "There is no momentum yet." : `The cosine is ${number(value, 2)} on average: ${value > 0.1 ? "they agree with where the model was going" : value < -0.1 ? "they work against it" : "they neither follow nor oppose it"}.`,
          ...axis(history.learners), value: (cosine) => number(cosine, 2), zero: true, lines,
        };
      }, over),
      lineChart("Does one learner move further than the others?", learnersOver("delta_norm", short, (least, most, lines) => lines.length === 1
        ? `Its deltas have a norm of ${short(most.value)} on average.` : `Deltas of ${most.label} have a norm of ${short(most.value)} on average, those of ${least.label} ${short(least.value)}.`), over),
    ],
  };
}
