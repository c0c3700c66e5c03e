// What the page concludes from the numbers. Pure: the moment and the history in, words out.

import { asSentence, count, learners, median, number, percent, short, span } from "./format.js";

// Where the time of a committed round went, in order; the parts add up to its whole time.
export function parts(round) {
  const marks = [
    round.opened_at, round.attempt_at, round.quorum_at, round.sealed_at, round.merged_at, round.ordered_at,
    round.committed_at,
  ];
  const result = [];
  let last = marks[0];
  ["earlier", "gather", "grace", "merge", "turn", "commit"].forEach((phase, index) => {
    const end = marks[index + 1];
    // A mark that is missing (a quorum that was never reached alone) leaves its time to the next part.
    if (end === null || end === undefined) return;
    result.push({ phase, from: last, seconds: Math.max(0, end - last) });
    last = end;
  });
  return result;
}

export function whole(round) {
  return round.committed_at - round.opened_at;
}

// Learners in the order they answered the last attempt, each with its seconds since that attempt opened.
function answers(round) {
  return (round.answers ?? []).map(([learner, at]) => ({ learner, seconds: at - round.attempt_at }));
}

// Of the learners that a merge lacks: whose push was refused, with the sentence why, and who gave no answer.
export function refusedOf(round) {
  return (round.refused ?? []).map(([learner, why]) => ({ learner, why: why.split("refused: ").pop() }));
}

export function silentOf(round) {
  const refused = new Set(refusedOf(round).map((one) => one.learner));
  return round.missed.filter((learner) => !refused.has(learner));
}

export const SWEEP = "a round of the closing sweep has no grace: it waits for every live member, until the quorum deadline, which an upload under way holds back";

// The sentence that says what took longest.
export function reason(round) {
  const longest = parts(round).reduce((most, part) => (part.seconds > most.seconds ? part : most));
  const time = span(longest.seconds);
  const came = answers(round);
  switch (longest.phase) {
    case "earlier":
      return `${time} in ${count(round.attempt - 1, "attempt")} before`;
    case "gather": {
      const needed = came[Math.min(round.quorum ?? came.length, came.length) - 1];
      return needed === undefined
        ? `${time} until the quorum was there`
        : `${time} until learner ${needed.learner} completed the quorum`;
    }
    case "grace": {
      const late = [...silentOf(round), ...round.left_out];
      const whom = late.length > 0 ? learners(late) : came.length > 0 ? `learner ${came[came.length - 1].learner}` : "the last answer";
      if (round.sweep) return `${time} of waiting${late.length > 0 ? " in vain" : ""} for ${whom} after the quorum, in the closing sweep`;
      return `${time} of grace${late.length > 0 ? ", in vain," : ""} for ${whom}`;
    }
    case "merge":
      return `${time} of merging`;
    case "turn":
      return `${time} until the rounds before it were committed`;
    default:
      return `${time} of the outer step`;
  }
}

// Good, warning, critical, done or starting; a short word, and the sentence behind it.
export function health(moment) {
  const session = moment.session;
  const rounds = `${number(moment.step)} of ${number(moment.total_steps)} rounds`;
  const critical = moment.alerts.filter((alert) => alert.severity === "critical");
  if (session.exit_code !== null) {
    return session.exit_code === 0
      ? { level: "done", word: "Finished", sentence: `The run has ended as it should, with ${rounds} committed.` }
      : { level: "critical", word: `Ended with code ${session.exit_code}`, sentence: asSentence(moment.wait.sentence) };
  }
  if (moment.writer === "gone") {
    return {
      level: "critical", word: "Cut off",
      sentence: `No process writes this tape any more; ${rounds} are committed. Start the syncer again with --resume.`,
    };
  }
  if (critical.length > 0) return { level: "critical", word: "In trouble", sentence: asSentence(critical[0].sentence) };
  if (moment.alerts.length > 0) return { level: "warning", word: "Look here", sentence: asSentence(moment.alerts[0].sentence) };
  if (moment.phase === "provisional" || moment.phase === "waiting") {
    return { level: "starting", word: "Starting", sentence: "Rounds have not begun yet." };
  }
  return { level: "good", word: "Healthy", sentence: `${rounds} are committed, and nothing needs you.` };
}

// Whom the session waits for, since when, and until when at the latest.
export function waiting(moment) {
  const { since, until, whom, sentence } = moment.wait;
  const session = moment.session;
  if (session.exit_code !== null) return { title: "Nothing any more", sentence, elapsed: null, limit: null };
  if (moment.writer === "gone") {
    return { title: "A new start", sentence: `When it was cut off: ${sentence}`, elapsed: null, limit: null };
  }
  return {
    title: whom.length > 0 ? asSentence(learners(whom)).slice(0, -1) : since === null ? "Nothing" : "No learner",
    sentence,
    elapsed: since === null ? null : Math.max(0, moment.now - since),
    limit: since === null || until === null ? null : until - since,
  };
}

// Who trains how fast, the slowest first: medians over the run, which no pause and no spike moves.
export function paces(history) {
  return Object.entries(history.learners.by_learner)
    .map(([learner, { series }]) => ({ learner: Number(learner), pace: median(series.steps_per_second.mean) }))
    .filter((one) => one.pace !== null)
    .sort((a, b) => a.pace - b.pace);
}

// Which learner holds the others up: who answered last or not at all in most of the recent rounds, and who
// trains slowest. They need not be the same.
export function laggard(moment, history) {
  const rounds = history.recent.slice(-40);
  const last = new Map();
  const behind = new Map();
  let judged = 0;
  for (const round of rounds) {
    const came = answers(round);
    const silent = silentOf(round);
    if (silent.length === 0 && came.length < 2) continue;
    judged += 1;
    const late = silent.length > 0 ? silent : [came[came.length - 1].learner];
    for (const learner of late) last.set(learner, (last.get(learner) ?? 0) + 1);
    if (silent.length === 0) {
      const gap = came[came.length - 1].seconds - came[came.length - 2].seconds;
      behind.set(late[0], [...(behind.get(late[0]) ?? []), gap]);
    }
  }
  if (judged === 0 || last.size === 0) {
    return { title: "Nobody stands out", sentence: "There are too few rounds with several answers to say." };
  }
  const [learner, times] = [...last].reduce((most, one) => (one[1] > most[1] ? one : most));
  const gap = median(behind.get(learner) ?? []);
  const after = gap === null ? "" : `, ${span(gap)} after the one before it (median)`;
  const words = [`Learner ${learner} was waited for most: last or unanswered in ${times} of the last ${count(judged, "round")}${after}.`];
  const known = paces(history);
  if (known.length > 1) {
    const [slowest, fastest] = [known[0], known[known.length - 1]];
    words.push(`Learner ${slowest.learner} trained slowest: ${short(slowest.pace)} steps/s (median); the fastest is learner ${fastest.learner} with ${short(fastest.pace)}.`);
  }
  // Among n learners each is last in one of n by chance.
  const expected = judged / Math.max(1, moment.learners.length);
  const title = times > 1.5 * expected || moment.learners.length === 1 ? `Learner ${learner}` : "Nobody stands out";
  return { title, sentence: words.join(" ") };
}

// What the last rounds were mostly made of.
export function mostly(rounds) {
  const sums = new Map();
  let all = 0;
  for (const round of rounds) {
    for (const part of parts(round)) {
      sums.set(part.phase, (sums.get(part.phase) ?? 0) + part.seconds);
      all += part.seconds;
    }
  }
  if (all === 0) return null;
  const [phase, seconds] = [...sums].reduce((most, one) => (one[1] > most[1] ? one : most));
  return { phase, share: percent(seconds / all), seconds: all };
}
