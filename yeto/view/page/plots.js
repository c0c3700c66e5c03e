// Which plots there are. A title is the question that its plot answers; the line below it is the answer.

import { bytes, count, fineShare, learnerStroke, median, number, percent, PHASES, short, span, style } from "./format.js";
import { histogram, lineChart, lyingBars } from "./charts.js";
import { phaseName } from "./rounds.js";
import { paces, SWEEP } from "./verdict.js";

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

// Over all rounds: a bucket counts as often as there are rounds in it, and where there was no such time it was 0.
function overRounds(table, column) {
  const all = table.rounds.reduce((sum, many) => sum + many, 0);
  return table.rounds.reduce((sum, many, place) => sum + many * (column.mean[place] ?? 0), 0) / Math.max(1, all);
}

function made({ moment, history }) {
  const names = PHASES.map(([name]) => name).filter((name) => some(history.run.series[`${name}_seconds`]));
  const series = names.map((name) => history.run.series[`${name}_seconds`]);
  if (series.length === 0) return null;
  const means = series.map((column) => overRounds(history.run, column));
  const all = means.reduce((sum, value) => sum + value, 0);
  const most = means.indexOf(Math.max(...means));
  const beside = moment.session.pipeline > 1 ? ` (${number(moment.session.pipeline)} are under way at a time)` : "";
  return {
    answer: `A round took ${span(overRounds(history.run, history.run.series.round_seconds))} on average, from its first opening to its commit${beside}; ${percent(all === 0 ? 0 : means[most] / all)} of that was ${phaseName(names[most])}.`,
    ...axis(history.run), value: span, stacked: true,
    lines: names.map((name, index) => ({
      label: PHASES.find(([key]) => key === name)[1], stroke: style(`phase-${name}`), mean: series[index].mean.map((value) => value ?? 0),
    })),
  };
}

function learnersOver(name, value, answer, rest = {}) {
  return ({ history }) => {
    const lines = perLearner(history, name);
    if (lines.length === 0) return null;
    return { answer: answer(...extremes(lines)), ...axis(history.learners), value, lines, ...rest };
  };
}

// Of each merge, what came from whom: a learner counts 0 where it was not in it.
function contributions({ moment, history }) {
  const { by_learner: by, rounds } = history.learners;
  const lines = Object.entries(by).filter(([, { series }]) => some(series.contribution)).map(([learner, { series, counts }], index) => ({
    label: `learner ${learner}`, stroke: learnerStroke(index).stroke,
    mean: series.contribution.mean.map((value, place) => ((value ?? 0) * counts.merged[place]) / Math.max(1, rounds[place])),
  }));
  if (lines.length === 0) return null;
  const shares = moment.learners.filter((one) => one.contribution !== null).sort((a, b) => a.contribution - b.contribution);
  const [least, most] = [shares[0], shares[shares.length - 1]];
  const answer = shares.length === 0 ? "Nobody's so far." : shares.length === 1 ? `All of it is learner ${most.learner}'s.`
    : `Over the whole run ${fineShare(most.contribution)} of it is learner ${most.learner}'s, the most, and ${fineShare(least.contribution)} learner ${least.learner}'s, the least.`;
  return { answer, ...axis(history.learners), value: percent, lines, stacked: true };
}

const SMOOTHED = 5;
const SPEED_SHOWN = 2.5;

// Without the spikes of a measurement over a short time: each place is the median of those around it.
function smooth(values) {
  const reach = SMOOTHED >> 1;
  return values.map((value, place) => (value === null ? null : median(values.slice(Math.max(0, place - reach), place + reach + 1))));
}

function speeds({ history }) {
  const lines = perLearner(history, "steps_per_second").map((one) => ({ ...one, gaps: true, mean: smooth(one.mean) }));
  const known = paces(history);
  if (lines.length === 0 || known.length === 0) return null;
  const [least, most] = [known[0], known[known.length - 1]];
  const who = known.length === 1 ? `Learner ${most.learner} takes ${short(most.pace)} steps/s`
    : `Learner ${least.learner} is the slowest with ${short(least.pace)} steps/s, learner ${most.learner} the fastest with ${short(most.pace)}`;
  // A few steps that a learner made up for after a pause would press all lines down to the axis.
  const top = SPEED_SHOWN * most.pace;
  const cut = lines.some((one) => Math.max(...one.mean.map((value) => value ?? 0)) > top) ? ` Bursts above ${short(top)} are cut off.` : "";
  return { answer: `${who} (medians; the lines are running medians of ${SMOOTHED}).${cut}`, ...axis(history.learners), value: short, lines, top };
}

// Fragments are of different sizes, so where rounds stand alone each has a line of its own.
const FRAGMENTS_DRAWN = 8;

function gradients({ moment, history }) {
  const column = history.run.series.gradient_norm;
  if (!some(column)) return null;
  const fragments = moment.session.num_fragments ?? 1;
  const alone = history.run.width === 1 && fragments > 1 && fragments <= FRAGMENTS_DRAWN;
  const lines = !alone ? [line("norm of the merged gradient", column, style("learner-0"))]
    : Array.from({ length: fragments }, (_, fragment) => ({
      label: `fragment ${fragment}`, ...learnerStroke(fragment), gaps: true,
      // Rounds take the fragments in turn.
      mean: column.mean.map((value, place) => ((history.run.step[place] - 1) % fragments === fragment ? value : null)),
    }));
  const known = column.mean.filter((value) => value !== null);
  const most = Math.max(...(column.max ?? column.mean).filter((value) => value !== null));
  const mixed = alone || fragments === 1 ? "" : " Neighbouring rounds are of different fragments, so the line goes up and down between theirs.";
  return {
    answer: `The norm is ${short(known[known.length - 1])} in the last round, was ${short(known[0])} in the first, and never above ${short(most)}.${mixed}`,
    ...axis(history.run), value: short, lines,
  };
}

// How long a learner's deltas are beside the mean of their round, which is the same fragment for all.
function lengths({ history }) {
  const lines = perLearner(history, "delta_norm");
  if (lines.length === 0) return null;
  if (lines.length > 1) {
    const usual = history.learners.step.map((_, place) => mean(lines.map((one) => one.mean[place])));
    for (const one of lines) one.mean = one.mean.map((value, place) => (value === null || !usual[place] ? null : value / usual[place]));
  }
  const [least, most] = extremes(lines);
  if (most === undefined) return null;
  const answer = lines.length === 1 ? `Its deltas have a norm of ${short(most.value)} on average.`
    : `Deltas of ${most.label} are ${number(most.value, 2)} times as long as the mean of their round, on average, those of ${least.label} ${number(least.value, 2)} times.`;
  return { answer, ...axis(history.learners), value: short, lines };
}

// What rounds waited for beyond the quorum; in the closing sweep that is no grace.
function waited(found, all, { recent }) {
  const sweep = recent.filter((round) => round.sweep && round.quorum_at !== null && round.sealed_at !== null);
  const most = sweep.reduce((longest, round) => Math.max(longest, round.sealed_at - round.quorum_at), 0);
  const closing = sweep.length === 0 ? "" : ` Among them are ${count(sweep.length, "round")} of the closing sweep, the longest with ${span(most)}: ${SWEEP}.`;
  return `${halfAndNine(found, all, "rounds waited for less than")}.${closing}`;
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
    return { answer: answer(found, all, history), bars };
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

// Half of them and nine of ten, or only these where that says as much.
function halfAndNine(found, all, what) {
  const [half, most] = [below(found, all, 0.5), below(found, all, 0.9)];
  return half === most ? `Nine of ten of ${number(all)} ${what} ${span(most)}` : `Half of ${number(all)} ${what} ${span(half)}, nine of ten ${span(most)}`;
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

// The name of a bin; its edges are round numbers.
function between(low, high) {
  const name = (seconds) => span(seconds).replace(/\.0+(?= )/, "");
  if (low === null || low <= 0) return `under ${name(high)}`;
  if (high === null || high === undefined || high > 1e8) return `${name(low)} or more`;
  const [number_, unit, ...rest] = name(low).split(" ");
  const same = rest.length === 0 && name(high).endsWith(` ${unit}`) && name(high).split(" ").length === 2;
  return `${same ? number_ : name(low)}–${name(high)}`;
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
      lineChart("What are rounds made of, over the whole run?", made, over),
      histogram("How much grace was granted?", bins("grace_seconds", between, (found, all) => `${halfAndNine(found, all, "graces were below")}. A round waits so long at most; it goes on as soon as everybody has answered.`)),
      histogram("How long did rounds wait after their quorum?", bins("waited_seconds", between, waited)),
      histogram("How long did the quorum take?", bins("quorum_seconds", between, (found, all) => `${halfAndNine(found, all, "rounds had it within")}.`)),
    ],
    learners: [
      lineChart("Whose work is in the model?", contributions, over),
      lineChart("How fast does each learner step?", speeds, over),
      lineChart("How stale is what is merged?", learnersOver("staleness", (value) => short(value), (least, most) => most.value === 0
        ? "Not at all: every push began from the newest version." : `${short(most.value)} rounds for ${most.label}, on average; ${short(least.value)} for ${least.label}.`, { least: 1 }), over),
      histogram("How stale were the merged pushes?", stale),
      lyingBars("How much did each learner send?", moved, { hideEmpty: true }),
    ],
    training: [
      lineChart("Does the loss fall?", loss, { empty: "The event log does not hold the loss; learners write it to logs of their own: yeto report TAPE --log-jsonl LEARNER-LOG, once for each, draws it here." }),
      lineChart("Are the merged gradients steady?", gradients, over),
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
      lineChart("Does one learner move further than the others?", lengths, over),
    ],
  };
}
