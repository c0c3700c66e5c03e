// The tables of the page. Each has a caption that names it, heads for its columns, and scrolls by itself where
// it is wider than the screen.

import { asSentence, bytes, count, el, fineShare, learners, mark, NONE, number, put, short, span } from "./format.js";
import { paces, reason, refusedOf, silentOf, whole } from "./verdict.js";

// A column is [name, kind, title]; what its name does not say by itself stands in the title.
export function table(caption, columns) {
  const body = el("tbody");
  const said = el("span", { class: "note" });
  const more = el("p", { class: "more" });
  const scroll = el(
    "div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    el(
      "table", {},
      el("caption", {}, el("span", { class: "title" }, caption, said)),
      el("thead", {}, el("tr", {}, ...columns.map(([name, kind, title]) => el("th", { scope: "col", class: kind ?? "", title }, name)))),
      body,
    ),
  );
  const root = el("div", { class: "sheet" }, scroll, more);

  // Where rows or columns are out of sight, it says so.
  function hint() {
    const down = scroll.scrollHeight > scroll.clientHeight + 2;
    const right = scroll.scrollWidth > scroll.clientWidth + 2;
    const words = [down ? `${number(body.rows.length)} rows: scroll down for more` : "", right ? "more columns to the right" : ""];
    put(more, words.filter((one) => one !== "").join("; "));
    more.hidden = !down && !right;
  }
  new ResizeObserver(hint).observe(scroll);

  function update(rows, note = "") {
    root.hidden = rows.length === 0;
    put(said, note === "" ? "" : ` ${note}`);
    put(
      body,
      ...rows.map((cells) => el(
        "tr", {},
        ...cells.map((cell, index) => el(index === 0 ? "th" : "td", {
          class: columns[index][1] ?? "", scope: index === 0 ? "row" : null,
        }, cell)),
      )),
    );
    hint();
  }

  return { root, update };
}

function isOver(moment) {
  return moment.session.exit_code !== null || moment.writer === "gone";
}

// How long ago something was; of a run that is over, when it was.
function since(moment, at) {
  if (at === null) return NONE;
  return isOver(moment) ? `at ${mark(at, 1)}` : `${span(Math.max(0, moment.now - at))} ago`;
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
  return el("span", { class: "share" }, el("span", { class: "track", "aria-hidden": "true" }, fill), fineShare(value));
}

export function learnerTable() {
  // Columns that nothing is known of would only push the others out of sight.
  const known = (learner) => [learner.loss, learner.bytes_out];
  let empty = null;
  const view = table("Learners", [
    ["learner"], ["link"], ["waited for"], ["steps/s", "right"], ["tokens/s", "right"],
    ["local step", "right", "Inner steps as the learner counts them itself: from 0 again where it was started afresh"],
    ["merges", "right"], ["contribution", "right"], ["missed", "right"], ["staleness", "right"], ["loss", "right loss"],
    ["sent", "right"], ["received", "right received"], ["last answer", "right"],
  ]);
  function update({ moment, history }) {
    // Of a run that is over there is no pace now, but a usual one.
    const over = isOver(moment);
    const usual = new Map(over ? paces(history).map((one) => [one.learner, one.pace]) : []);
    const pace = (learner) => usual.get(learner.learner) ?? learner.steps_per_second;
    const tokens = (learner) => (usual.has(learner.learner) && learner.c_steps > 0
      ? pace(learner) * learner.c_tokens / learner.c_steps : learner.tokens_per_second);
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
      number(pace(learner), 2),
      number(tokens(learner)),
      number(learner.local_step),
      number(learner.merges),
      share(learner.contribution),
      learner.missed_in_a_row > 1 ? `${number(learner.missed)} (${learner.missed_in_a_row} in a row)` : number(learner.missed),
      learner.staleness === null ? NONE : `${learner.staleness} (mean ${short(learner.staleness_mean)})`,
      short(learner.loss),
      bytes(learner.bytes_in),
      bytes(learner.bytes_out),
      since(moment, learner.answered_at),
    ]), over && usual.size > 0 ? "steps/s and tokens/s as they were in this run (medians)" : "");
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
      missing(round),
    ]));
  }
  return { root: view.root, update };
}

function missing(round) {
  const silent = silentOf(round);
  const words = [silent.length === 0 ? "" : learners(silent), ...refusedOf(round).map(({ learner }) => `learner ${learner} (refused)`)];
  return words.filter((one) => one !== "").join(", ") || NONE;
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
  const view = table("What was refused?", [["what"], ["of"], ["why"], ["times", "right"], ["last at", "right"], ["the last one", "text"]]);
  function update({ moment, history }) {
    const total = (what) => moment.refusals.reduce((sum, one) => sum + (one.what === what ? one.count : 0), 0);
    view.update(moment.refusals.map((refusal) => [
      refusal.what,
      refusal.learner === null ? NONE : `learner ${refusal.learner}`,
      refusal.reason.replaceAll("_", " "),
      number(refusal.count),
      refusal.at === null || refusal.at === undefined ? NONE : mark(refusal.at, 1),
      refusal.why,
    ]), `${count(total("push"), "push", "pushes")} and ${count(total("connection"), "connection")} in all; ${harm(history)}`);
  }
  return { root: view.root, update };
}

// What refused pushes meant for the merges that stand.
function harm(history) {
  const lacking = Object.values(history.learners.by_learner)
    .reduce((sum, { counts }) => sum + (counts.refused ?? []).reduce((all, many) => all + many, 0), 0);
  if (lacking === 0) return "no merge lacks an answer because of it";
  const rounds = history.recent.filter((round) => refusedOf(round).length > 0);
  const where = rounds.reduce((sum, round) => sum + refusedOf(round).length, 0) !== lacking ? ""
    : ` (${rounds.length === 1 ? "round" : "rounds"} ${rounds.slice(-12).map((round) => number(round.step)).join(", ")})`;
  return `merges lack ${count(lacking, "answer")} because of it${where}`;
}

const SIGNS = {
  join: "→", leave: "←", refused: "✕", push_refused: "✕", retry: "↻", restart: "⟲", stop: "■", pool: "!", checkpoint: "!", ended: "■",
};

export function markTable() {
  const view = table("What went wrong, and when?", [
    ["at", "right"],
    ["round", "right", "The round that it affects: that of a push or an attempt, the first one after a restart, or else the one that was next"],
    ["what"], ["in words", "text"],
  ]);
  function update({ moment, history }) {
    const marks = [...history.marks].reverse();
    const all = marks.length + history.marks_left_out;
    const note = history.marks_left_out > 0 ? `the newest ${number(marks.length)} of ${number(all)}, the newest first` : "the newest first";
    view.update(marks.map((one) => [
      mark(one.at, 1),
      one.step > moment.total_steps && moment.total_steps > 0 ? "end" : number(one.step),
      `${SIGNS[one.kind] ?? "•"} ${one.kind.replaceAll("_", " ")}`,
      one.text,
    ]), note);
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
    const over = isOver(moment);
    const rows = [
      ["Rounds", `${number(moment.step)} of ${number(moment.total_steps)}`],
      ["Learners", over ? `${session.num_learners}` : `${connected} of ${session.num_learners} connected`, `quorum ${session.quorum}`],
      over ? ["Pace", moment.at > 0 ? `${short((moment.committed / moment.at) * 3600)} rounds/h` : NONE, "mean of the whole run"]
        : ["Pace", moment.merges_per_hour === null ? NONE : `${short(moment.merges_per_hour)} rounds/h`],
      over ? ["Ran for", span(moment.at)] : ["Time left", moment.eta_seconds === null ? "unknown" : span(moment.eta_seconds)],
      ["Checkpoint", checkpoint(moment), moment.checkpoint.writing === null ? "" : `step ${number(moment.checkpoint.writing)} is being written`],
      ["Attempts", number(moment.attempts), discarded === 0 ? "none discarded" : `${number(discarded)} discarded`],
      ["Starts", number(session.restarts + 1), session.restarts === 0 ? "" : `${count(session.restarts, "restart")}, ${
        moment.superseded === 0 ? "no commit" : count(moment.superseded, "commit")} taken back`],
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
