// The story of one round, in a dialog: its phases with their times, who answered when, and, where a server can
// look it up, the records themselves.

import { asSentence, el, learners, number, PHASES, put, span } from "./format.js";
import { parts, reason, refusedOf, silentOf, SWEEP, whole } from "./verdict.js";

// `find(step)` returns a round of the history or null; `fetchStory(step)` its records, or null without a server.
export function storyDialog(find, fetchStory) {
  const title = el("h2", { id: "story-title" });
  const text = el("div", { class: "story" });
  const close = el("button", { type: "button", class: "close", click: () => root.close() }, "Close");
  const root = el("dialog", { "aria-labelledby": "story-title" }, el("header", {}, title, close), text);
  root.addEventListener("click", (event) => {
    // A click beside the dialog is one on it itself.
    if (event.target === root) root.close();
  });

  async function open(step) {
    put(title, `Round ${number(step)}`);
    const round = find(step);
    put(text, ...(round === null ? [] : told(round)));
    if (round === null && fetchStory === null) {
      put(text, el("p", {}, `The report keeps the newest and the slowest rounds one by one; this one only in the plots. "yeto replay TAPE --round ${step}" tells its story.`));
    }
    if (!root.open) root.showModal();
    if (fetchStory !== null) {
      const place = el("div", { class: "records" }, el("p", { class: "quiet" }, "Reading its records…"));
      text.append(place);
      try {
        const lines = await fetchStory(step);
        put(place, el("h3", {}, "Its records"), el("ol", { class: "lines", tabindex: "0", role: "region", "aria-label": "Its records" }, ...lines.map(recordLine)));
      } catch (error) {
        put(place, el("p", { class: "quiet" }, `Its records could not be read: ${error.message}`));
      }
    }
  }

  return { root, open };
}

function told(round) {
  const all = whole(round);
  const bar = el("div", { class: "stack", "aria-hidden": "true" });
  for (const part of parts(round)) {
    const piece = el("div", { class: `phase-${part.phase}` });
    piece.style.flexGrow = String(part.seconds);
    bar.append(piece);
  }
  const rows = parts(round).filter((part) => part.seconds > 0).map((part) => el(
    "tr", {},
    el("th", { scope: "row" }, el("span", { class: `key phase-${part.phase}`, "aria-hidden": "true" }), PHASES.find(([key]) => key === part.phase)[1]),
    el("td", { class: "right" }, span(part.seconds)),
    el("td", { class: "right" }, `${number((part.seconds / Math.max(all, 1e-9)) * 100)} %`),
  ));
  const sentences = [];
  if (round.answers !== undefined && round.answers.length > 0) {
    sentences.push(`Answers after its last opening: ${round.answers.map(([learner, at]) => `learner ${learner} in ${span(at - round.attempt_at)}`).join(", ")}.`);
  }
  sentences.push(`Merged: ${learners(round.responders)}.`);
  for (const { learner, why } of refusedOf(round)) sentences.push(`Learner ${learner}'s push was refused: ${why}.`);
  const silent = silentOf(round);
  if (silent.length > 0) sentences.push(`No answer from ${learners(silent)}.`);
  if (round.left_out.length > 0) sentences.push(`Too stale or too late for the merge: ${learners(round.left_out)}.`);
  return [
    el("p", { class: "lead" }, `${span(all)} from its opening to its commit; most of it ${reason(round)}.`),
    bar,
    el("table", {}, el("caption", {}, `Fragment ${round.fragment}, attempt ${round.attempt}${round.sweep ? ", closing sweep" : ""}`), el("tbody", {}, ...rows)),
    el("p", {}, sentences.join(" ")),
    ...(round.sweep ? [el("p", { class: "quiet" }, asSentence(SWEEP))] : []),
  ];
}

function recordLine(record) {
  return el(
    "li", { class: record.superseded ? "superseded" : "" },
    el("span", { class: "when" }, `${number(record.at, 3)} s`),
    el("span", {}, record.sentence, record.superseded ? " (taken back by a restart)" : ""),
  );
}
