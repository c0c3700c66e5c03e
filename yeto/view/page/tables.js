// The tables of the page. Each has a caption that names it, heads for its columns, and scrolls by itself where
// it is wider than the screen.

import { asSentence, bytes, count, el, learners, mark, NONE, number, percent, put, short, span } from "./format.js";
import { reason, whole } from "./verdict.js";

export function table(caption, columns, { note = "" } = {}) {
  const body = el("tbody");
  const root = el(
    "div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    el(
      "table", {},
      el("caption", {}, el("span", { class: "title" }, caption, note === "" ? null : el("span", { class: "note" }, ` ${note}`))),
      el("thead", {}, el("tr", {}, ...columns.map(([name, kind]) => el("th", { scope: "col", class: kind ?? "" }, name)))),
      body,
    ),
  );

  function update(rows) {
    root.hidden = rows.length === 0;
    put(
      body,
      ...rows.map((cells) => el(
        "tr", {},
        ...cells.map((cell, index) => el(index === 0 ? "th" : "td", {
          class: columns[index][1] ?? "", scope: index === 0 ? "row" : null,
        }, cell)),
      )),
    );
  }

  return { root, update };
}

// How long ago something was; of a run that is over, when it was.
function since(moment, at) {
  if (at === null) return NONE;
  const over = moment.session.exit_code !== null || moment.writer === "gone";
  return over ? `at ${mark(at, 1)}` : `${span(Math.max(0, moment.now - at))} ago`;
}

const LINKS = {
  connected: ["good", "●"], expected: ["quiet", "○"], away: ["warning", "◌"], refused: ["critical", "✕"],
  released: ["quiet", "✓"],
};

function link(learner) {
  const [level, sign] = LINKS[learner.link] ?? ["quiet", "?"];
  return el(
    "span", { class: `link ${level}`, title: learner.link_why },
    el("span", { "aria-hidden": "true" }, sign), ` ${learner.link}`,
  );
}

function share(value) {
  if (value === null) return NONE;
  const fill = el("span", { class: "fill" });
  fill.style.width = `${Math.min(100, value * 100)}%`;
  return el("span", { class: "share" }, el("span", { class: "track", "aria-hidden": "true" }, fill), percent(value));
}

export function learnerTable() {
  // Columns that nothing is known of would only push the others out of sight.
  const known = (learner) => [learner.loss, learner.bytes_out];
  let empty = null;
  const view = table("Learners", [
    ["learner"], ["link"], ["waited for"], ["steps/s", "right"], ["tokens/s", "right"], ["local step", "right"],
    ["merges", "right"], ["contribution", "right"], ["missed", "right"], ["staleness", "right"], ["loss", "right loss"],
    ["sent", "right"], ["received", "right received"], ["last answer", "right"],
  ]);
  function update({ moment }) {
    const columns = [0, 1].map((place) => moment.learners.every((learner) => known(learner)[place] === null));
    if (String(columns) !== empty) {
      empty = String(columns);
      view.root.dataset.noLoss = columns[0];
      view.root.dataset.noReceived = columns[1];
    }
    view.update(moment.learners.map((learner) => [
      String(learner.learner),
      link(learner),
      learner.waited_since === null
        ? NONE : el("span", { class: "waited" }, span(Math.max(0, moment.now - learner.waited_since)), el("span", { class: "note" }, learner.waited_for)),
      number(learner.steps_per_second, 2),
      number(learner.tokens_per_second),
      number(learner.local_step),
      number(learner.merges),
      share(learner.contribution),
      learner.missed_in_a_row > 1 ? `${number(learner.missed)} (${learner.missed_in_a_row} in a row)` : number(learner.missed),
      learner.staleness === null ? NONE : `${learner.staleness} (mean ${short(learner.staleness_mean)})`,
      short(learner.loss),
      bytes(learner.bytes_in),
      bytes(learner.bytes_out),
      since(moment, learner.answered_at),
    ]));
  }
  return { root: view.root, update };
}

export function openTable(openRound) {
  const view = table("Open rounds", [
    ["round"], ["fragment", "right"], ["attempt", "right"], ["phase"], ["open for", "right"], ["answered", "right"], ["owing"],
    ["what it waits for", "text"],
  ]);
  function update({ moment }) {
    view.update(moment.rounds.map((round) => [
      roundButton(round.step, openRound),
      String(round.fragment),
      String(round.attempt),
      round.phase,
      span(Math.max(0, moment.now - round.opened_at)),
      `${round.answered.length} of ${round.members.length}, quorum ${round.quorum}`,
      round.owing.length === 0 ? NONE : learners(round.owing),
      round.wait.sentence,
    ]));
  }
  return { root: view.root, update };
}

function roundButton(step, openRound) {
  return el("button", { type: "button", class: "round", click: () => openRound(step) }, number(step));
}

export function slowTable(openRound) {
  const view = table("Which rounds were the slowest, and why?", [
    ["round"], ["fragment", "right"], ["took", "right"], ["most of it", "text"], ["missed"],
  ]);
  function update({ history }) {
    const rounds = [...(history.slowest ?? history.recent)].sort((a, b) => whole(b) - whole(a)).slice(0, 10);
    view.update(rounds.map((round) => [
      roundButton(round.step, openRound), String(round.fragment), span(whole(round)), reason(round),
      round.missed.length === 0 ? NONE : learners(round.missed),
    ]));
  }
  return { root: view.root, update };
}

export function fragmentTable() {
  const view = table("How old is each fragment?", [
    ["fragment"], ["version", "right"], ["committed", "right"], ["last sent", "right"],
  ]);
  function update({ moment }) {
    view.update(moment.fragments.map((fragment) => [
      String(fragment.fragment),
      fragment.version === 0 ? "initial" : number(fragment.version),
      since(moment, fragment.committed_at),
      fragment.broadcast === null ? NONE : `version ${number(fragment.broadcast)}`,
    ]));
  }
  return { root: view.root, update };
}

export function refusalTable() {
  const view = table("What was refused?", [["what"], ["of"], ["why"], ["times", "right"], ["the last one", "text"]]);
  function update({ moment }) {
    view.update(moment.refusals.map((refusal) => [
      refusal.what,
      refusal.learner === null ? NONE : `learner ${refusal.learner}`,
      refusal.reason.replaceAll("_", " "),
      number(refusal.count),
      refusal.why,
    ]));
  }
  return { root: view.root, update };
}

const SIGNS = {
  join: "→", leave: "←", refused: "✕", push_refused: "✕", retry: "↻", restart: "⟲", stop: "■", pool: "!", checkpoint: "!", ended: "■",
};

export function markTable() {
  const view = table("What went wrong, and when?", [["at", "right"], ["before round", "right"], ["what"], ["in words", "text"]], { note: "the newest first" });
  function update({ history }) {
    const marks = history.marks.slice(-60).reverse();
    view.update(marks.map((one) => [
      mark(one.at, 1),
      number(one.step),
      `${SIGNS[one.kind] ?? "•"} ${one.kind.replaceAll("_", " ")}`,
      one.text,
    ]));
  }
  return { root: view.root, update };
}

export function alertList() {
  const root = el("ul", { class: "alerts" });
  function update({ moment }) {
    root.hidden = moment.alerts.length === 0;
    put(root, ...moment.alerts.map((alert) => el(
      "li", { class: alert.severity },
      el("strong", {}, `${alert.severity === "critical" ? "✕ Critical" : "▲ Warning"}: ${alert.subject}`),
      el("p", {}, `${asSentence(alert.sentence)} ${asSentence(alert.remedy)}`.trim()),
      moment.now - alert.since < 1 ? null : el("p", { class: "quiet" }, `for ${span(moment.now - alert.since)}`),
    )));
  }
  return { root, update };
}

export function facts() {
  const root = el("dl", { class: "facts" });
  function update({ moment }) {
    const session = moment.session;
    const discarded = Object.values(moment.discarded).reduce((sum, many) => sum + many, 0);
    const connected = moment.learners.filter((learner) => learner.link === "connected").length;
    const over = session.exit_code !== null || moment.writer === "gone";
    const rows = [
      ["Rounds", `${number(moment.step)} of ${number(moment.total_steps)}`],
      ["Learners", over ? `${session.num_learners}` : `${connected} of ${session.num_learners} connected`, `quorum ${session.quorum}`],
      ["Pace", moment.merges_per_hour === null ? NONE : `${short(moment.merges_per_hour)} rounds/h`],
      over ? ["Ran for", span(moment.at)] : ["Time left", moment.eta_seconds === null ? "unknown" : span(moment.eta_seconds)],
      ["Checkpoint", checkpoint(moment), moment.checkpoint.writing === null ? "" : `step ${number(moment.checkpoint.writing)} is being written`],
      ["Attempts", number(moment.attempts), discarded === 0 ? "none discarded" : `${number(discarded)} discarded`],
      ["Restarts", number(session.restarts), moment.superseded === 0 ? "" : `${count(moment.superseded, "commit")} taken back`],
    ];
    put(root, ...rows.map(([name, value, note]) => el(
      "div", {}, el("dt", {}, name), el("dd", {}, value, note ? el("span", { class: "note" }, note) : null),
    )));
  }
  return { root, update };
}

function checkpoint(moment) {
  const { step, at } = moment.checkpoint;
  if (step === null) return "none yet";
  return at === null ? `step ${number(step)}` : `step ${number(step)}, ${since(moment, at)}`;
}
