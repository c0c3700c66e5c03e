// What the page concludes from the numbers. Pure: the moment and the history in, words out.

import { asSentence, count, learners, number, percent, span } from "./format.js";

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
      const late = [...round.missed, ...round.left_out];
      return late.length > 0
        ? `${time} of grace, in vain, for ${learners(late)}`
        : `${time} of grace for ${came.length > 0 ? `learner ${came[came.length - 1].learner}` : "the last answer"}`;
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

// Which learner holds the others up: who answered last or not at all in most of the recent rounds.
export function laggard(moment, history) {
  const rounds = history.recent.slice(-40);
  const last = new Map();
  const behind = new Map();
  let judged = 0;
  for (const round of rounds) {
    const came = answers(round);
    if (round.missed.length === 0 && came.length < 2) continue;
    judged += 1;
    const late = round.missed.length > 0 ? round.missed : [came[came.length - 1].learner];
    for (const learner of late) last.set(learner, (last.get(learner) ?? 0) + 1);
    if (round.missed.length === 0) {
      const gap = came[came.length - 1].seconds - came[came.length - 2].seconds;
      behind.set(late[0], [...(behind.get(late[0]) ?? []), gap]);
    }
  }
  const paces = moment.learners.map((learner) => learner.steps_per_second).filter((pace) => pace !== null);
  if (judged === 0 || last.size === 0) {
    return { title: "Nobody stands out", sentence: "There are too few rounds with several answers to say." };
  }
  const [learner, times] = [...last].reduce((most, one) => (one[1] > most[1] ? one : most));
  const gaps = behind.get(learner) ?? [];
  const gap = gaps.length === 0 ? null : gaps.reduce((sum, one) => sum + one, 0) / gaps.length;
  const own = moment.learners.find((one) => one.learner === learner)?.steps_per_second ?? null;
  const words = [`Last, or without an answer, in ${times} of ${count(judged, "recent round")}`];
  if (gap !== null) words.push(`${span(gap)} after the one before it`);
  if (own !== null && paces.length > 1) {
    const best = Math.max(...paces);
    words.push(`${number(own, 2)} steps/s, the fastest has ${number(best, 2)}`);
  }
  // Among n learners each is last in one of n by chance.
  const expected = judged / Math.max(1, moment.learners.length);
  const title = times > 1.5 * expected || moment.learners.length === 1 ? `Learner ${learner}` : "Nobody stands out";
  return { title, sentence: `${words.join("; ")}.` };
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
