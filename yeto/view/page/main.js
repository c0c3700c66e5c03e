// Puts the page together, from the JSON inside a report or from a server that sends a run as it goes on.

import { asSentence, el, number, put, span, wallClock } from "./format.js";
import { health, laggard, parts, reason, waiting, whole } from "./verdict.js";
import { schemeChanged } from "./charts.js";
import { timeline } from "./rounds.js";
import { faults, participation } from "./grid.js";
import { alertList, facts, fragmentTable, learnerTable, markTable, openTable, refusalTable, slowTable } from "./tables.js";
import { storyDialog } from "./story.js";
import { allPlots } from "./plots.js";

const HISTORY_MS = 5000;
const STALE_MS = 10000;

const data = { moment: null, history: null, loss: null, made: null };
const views = [];
const live = document.getElementById("data") === null;

function findRound(step) {
  const known = [...(data.history?.recent ?? []), ...(data.history?.slowest ?? [])];
  return known.find((round) => round.step === step) ?? null;
}

async function fetchJson(path) {
  const answer = await fetch(path, { headers: { accept: "application/json" } });
  const body = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(body.error ?? `status ${answer.status}`);
  return body;
}

const story = storyDialog(findRound, live ? async (step) => (await fetchJson(`api/round/${step}`)).records : null);
const openRound = (step) => story.open(step);

function section(id, title, ...views_) {
  views.push(...views_);
  document.getElementById(id).append(
    el("h2", {}, title), el("div", { class: "figures" }, ...views_.map((view) => view.root)),
  );
}

function card(question) {
  const asked = el("h2", {}, question);
  const title = el("p", { class: "card-title" });
  const text = el("p", { class: "card-text" });
  const extra = el("div", { class: "card-extra" });
  return { root: el("article", { class: "card" }, asked, title, text, extra), asked, title, text, extra };
}

const cards = {
  wait: card("What is it waiting for?"),
  slow: card("Who holds it up?"),
  last: card("Why did the last round take so long?"),
};

function build() {
  document.getElementById("cards").append(...Object.values(cards).map((one) => one.root));
  const alerts = alertList();
  const short = facts();
  document.getElementById("alerts").append(alerts.root);
  document.getElementById("facts").append(short.root);
  const people = learnerTable();
  const open = openTable(openRound);
  document.getElementById("now").append(people.root, open.root);
  const plots = allPlots(openRound);
  section("time", "Time", timeline(openRound), faults(openRound), ...plots.time);
  section("learners", "Learners", participation(openRound), ...plots.learners);
  section("training", "Training", ...plots.training);
  const tables = [slowTable(openRound), markTable(), refusalTable(), fragmentTable()];
  document.getElementById("tables").append(el("h2", {}, "In rows"), ...tables.map((one) => one.root));
  views.push(alerts, short, people, open, ...tables);
  document.body.append(story.root);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", () => {
    schemeChanged();
    show();
  });
}

function showHead() {
  const { moment, history } = data;
  const verdict = health(moment);
  const hero = document.getElementById("state");
  hero.dataset.level = verdict.level;
  put(document.getElementById("word"), verdict.word);
  put(document.getElementById("sentence"), verdict.sentence);
  const session = moment.session;
  put(document.getElementById("session"), `Session ${session.session_id}`);
  put(document.getElementById("begun"), `begun ${wallClock(session.wall_clock)}, Yeto ${session.software_version}`);
  const share = moment.total_steps > 0 ? moment.step / moment.total_steps : 0;
  const bar = document.getElementById("progress");
  bar.max = Math.max(1, moment.total_steps);
  bar.value = moment.step;
  bar.textContent = `${Math.round(share * 100)} %`;
  document.title = `${verdict.word}: round ${moment.step} of ${moment.total_steps}, Yeto`;

  const wait = waiting(moment);
  put(cards.wait.title, wait.title);
  put(cards.wait.text, asSentence(wait.sentence));
  if (wait.elapsed === null) put(cards.wait.extra);
  else {
    const most = wait.limit === null ? "without a limit" : `of at most ${span(wait.limit)}`;
    const meter = wait.limit === null ? null
      : el("meter", { min: "0", max: String(wait.limit), value: String(Math.min(wait.elapsed, wait.limit)), "aria-label": "Part of the longest wait" });
    put(cards.wait.extra, meter, el("p", {}, el("b", {}, span(wait.elapsed)), ` so far, ${most}`));
  }
  const slow = laggard(moment, history);
  put(cards.slow.title, slow.title);
  put(cards.slow.text, slow.sentence);
  const over = session.exit_code !== null;
  put(cards.slow.asked, over ? "Who held it up?" : "Who holds it up?");
  put(cards.last.asked, over ? "Which round took longest, and why?" : "Why did the last round take so long?");
  const last = over ? history.slowest?.[0] : history.recent[history.recent.length - 1];
  if (last === undefined) {
    put(cards.last.title, "No round yet");
    put(cards.last.text, "");
    put(cards.last.extra);
  } else showLast(last);
}

function showLast(last) {
  put(cards.last.title, `${span(whole(last))}`);
  put(cards.last.text, `Round ${number(last.step)}: ${reason(last)}.`);
  const bar = el("div", { class: "stack", "aria-hidden": "true" });
  for (const part of parts(last)) {
    const piece = el("div", { class: `phase-${part.phase}` });
    piece.style.flexGrow = String(part.seconds);
    bar.append(piece);
  }
  const button = el("button", { type: "button", class: "plain", click: () => openRound(last.step) }, "Its story");
  // What has the focus must not be taken away under the keys.
  const held = cards.last.extra.contains(document.activeElement);
  put(cards.last.extra, bar, button);
  if (held) button.focus();
}

function show() {
  if (data.moment === null || data.history === null) return;
  document.body.dataset.ready = "true";
  showHead();
  for (const view of views) view.update(data);
}

// Only what a moment changes: the plots wait for the history.
function showMoment() {
  if (data.moment === null || data.history === null) return;
  showHead();
  for (const view of views) if (view.root.closest("#state, #now, #alerts, #facts") !== null) view.update(data);
}

function note(text, level = "quiet") {
  const place = document.getElementById("connection");
  put(place, text);
  place.dataset.level = level;
}

function follow() {
  let fetching = false;
  let due = true;
  let seen = -1;
  let heard = performance.now();

  async function history() {
    if (fetching || !due || document.hidden) return;
    fetching = true;
    due = false;
    try {
      data.history = await fetchJson("api/history");
      show();
    } catch (error) {
      due = true;
      note(`The history could not be read: ${error.message}`, "warning");
    }
    fetching = false;
  }

  const events = new EventSource("events");
  events.addEventListener("status", (event) => {
    const first = data.moment === null;
    data.moment = JSON.parse(event.data);
    heard = performance.now();
    const records = data.moment.session.records;
    if (records !== seen) due = true;
    seen = records;
    note("Live");
    if (first) history();
    else showMoment();
  });
  events.addEventListener("waiting", (event) => {
    heard = performance.now();
    note(JSON.parse(event.data).error, "warning");
  });
  events.addEventListener("error", () => note("The connection is lost; trying again", "warning"));
  setInterval(history, HISTORY_MS);
  setInterval(() => {
    const quiet = performance.now() - heard;
    if (quiet > STALE_MS) note(`No word for ${span(quiet / 1000)}`, "warning");
  }, 2000);
  document.addEventListener("visibilitychange", history);
}

build();
if (live) {
  note("Connecting");
  follow();
} else {
  Object.assign(data, JSON.parse(document.getElementById("data").textContent));
  note(`Report of ${data.made.tape}, made ${data.made.at}`);
  show();
}
