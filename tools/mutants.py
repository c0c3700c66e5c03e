"""The mutants of ``tools/mutate``: each breaks one rule of the coordinator, and nothing else."""

from __future__ import annotations

from attrs import frozen


@frozen
class Mutant:
    """One change of one file."""

    name: str
    file: str
    """Below ``yeto/core``."""
    old: str
    """What stands there, exactly once; short, so that it stays while the code around it changes."""
    new: str
    breaks: str
    """The rule it breaks."""


MUTANTS = (
    # What is taken from learners.
    Mutant(
        "stale-by-one",
        "pushes.py",
        "staleness > lag:",
        "staleness > lag + 1:",
        "a push staler than --max-base-lag is refused",
    ),
    Mutant(
        "stale-against-the-newest",
        "pushes.py",
        "max(round_.base_version - event.base_version, 0)",
        "max(draft.step - event.base_version, 0)",
        "staleness is against the attempt's base version, not the newest commit",
    ),
    Mutant(
        "future-base-admitted",
        "pushes.py",
        "elif event.base_version > round_.base_version:",
        "elif event.base_version > round_.base_version + 1000:",
        "a base above the attempt's is refused",
    ),
    Mutant(
        "duplicates-admitted",
        "pushes.py",
        "elif learner in round_.answers or learner in round_.uploads:",
        "elif learner in round_.answers and learner in round_.uploads:",
        "one upload for each member and attempt",
    ),
    Mutant(
        "no-work-admitted",
        "pushes.py",
        "elif event.c_steps == 0:",
        "elif event.c_steps < 0:",
        "a push without a step is refused",
    ),
    Mutant(
        "strangers-admitted",
        "pushes.py",
        "member.generation != event.generation or ",
        "",
        "an older connection does not speak for its successor",
    ),
    Mutant(
        "second-chances-for-ever",
        "pushes.py",
        "resend = reason in _SECOND_CHANCE and learner not in round_.chances",
        "resend = reason in _SECOND_CHANCE",
        "the second stale or future base of an attempt declines",
    ),
    Mutant(
        "infinite-norms-accepted",
        "pushes.py",
        "not event.finite or event.norm is None or not event.norm <= MAX_NORM",
        "not event.finite or event.norm is None",
        "a norm above 1e15 is not finite",
    ),
    Mutant(
        "bad-pushes-count-per-push",
        "pushes.py",
        "if link.bad_step == upload.local_step:",
        "if link.bad_step == -1:",
        "a non-finite push counts once for each local step",
    ),
    Mutant(
        "bad-pushes-never-forgotten",
        "pushes.py",
        "bad_run=0, bad_step=None",
        "bad_step=None",
        "only non-finite pushes in a row close a connection",
    ),
    # When an attempt is sealed, discarded and retried.
    Mutant(
        "quorum-one-less",
        "sealing.py",
        "    if answers < round_.quorum:\n",
        "    if answers < round_.quorum - 1:\n",
        "nothing is sealed below K answers",
    ),
    Mutant(
        "deadline-below-quorum-seals",
        "sealing.py",
        'discard(draft, round_, "quorum_timeout", why)',
        "_seal(draft, round_, why)",
        "a quorum deadline that passes below K discards",
    ),
    Mutant(
        "unreachable-waits",
        "sealing.py",
        "if answers + owing < round_.quorum:",
        "if owing < 0:",
        "an attempt that cannot reach K any more is discarded at once",
    ),
    Mutant(
        "disconnect-erases-answers",
        "rounds.py",
        "round_.owes(learner, generation):\n",
        "learner in round_.members:\n"
        "            answers = round_.answers\n"
        "            answers = answers.delete(learner) if learner in answers else answers\n"
        "            round_ = replace(round_, answers=answers)\n",
        "a disconnect never erases an accepted answer",
    ),
    Mutant(
        "disconnected-are-waited-for",
        "members.py",
        "        member_left(draft, learner, generation)\n",
        "",
        "nobody waits for a member that is gone",
    ),
    Mutant(
        "deadline-ignores-progress",
        "pushes.py",
        "held = at + PROGRESS_SECONDS + PROGRESS_SLACK_SECONDS",
        "held = at",
        "an upload that goes on moves the quorum deadline",
    ),
    Mutant(
        "deadline-moves-for-ever",
        "pushes.py",
        "moment(min(held, opened_at + MAX_DEADLINES * timeout_seconds))",
        "moment(held)",
        "the quorum deadline moves to four times its length at most",
    ),
    Mutant(
        "retry-wait-never-grows",
        "rounds.py",
        "2.0 ** min(discards, 6)",
        "2.0",
        "declines wait 2, 4, 8, ... seconds",
    ),
    Mutant(
        "retry-wait-unbounded",
        "rounds.py",
        "max(wait, min(MAX_RETRY_SECONDS, 2.0 ** min(discards, 6)))",
        "max(wait, 2.0**discards)",
        "a retry waits 60 seconds at most",
    ),
    Mutant(
        "retry-forgets-its-discards",
        "rounds.py",
        "            discards=discards,\n",
        "            discards=0,\n",
        "discards in a row are counted until the round commits",
    ),
    Mutant(
        "disconnect-retry-at-once",
        "rounds.py",
        "wait = DISCONNECT_RETRY_SECONDS",
        "wait = 0.0",
        "after a disconnect a retry waits a second",
    ),
    Mutant(
        "retry-without-quorum",
        "opening.py",
        " and len(draft.current) >= draft.quorum:\n            _open_attempt",
        ":\n            _open_attempt",
        "an attempt needs K current learners",
    ),
    # Grace and pace.
    Mutant(
        "grace-not-clamped",
        "pacing.py",
        "min(max(gamma * (tau * xi_step - xi_quorum - xi_sync), 0.0), cap)",
        "max(gamma * (tau * xi_step - xi_quorum - xi_sync), 0.0)",
        "the grace is never longer than its cap",
    ),
    Mutant(
        "grace-negative",
        "pacing.py",
        "min(max(gamma * (tau * xi_step - xi_quorum - xi_sync), 0.0), cap)",
        "min(gamma * (tau * xi_step - xi_quorum - xi_sync), cap)",
        "the grace is never negative",
    ),
    Mutant(
        "grace-of-the-fastest",
        "sealing.py",
        "else max(xi_step, link.xi_step)",
        "else min(xi_step, link.xi_step)",
        "the slack takes the slowest member's step",
    ),
    Mutant(
        "grace-wrong-latency",
        "sealing.py",
        "latencies[round_.quorum - 1]",
        "latencies[0]",
        "the slack takes the K-th smallest latency",
    ),
    Mutant(
        "grace-of-gone-members",
        "sealing.py",
        "link.generation != member.generation or ",
        "",
        "an estimate is dropped with its generation",
    ),
    Mutant(
        "ema-weight",
        "pacing.py",
        "EMA_WEIGHT = 0.5",
        "EMA_WEIGHT = 0.25",
        "a new sample counts half",
    ),
    Mutant(
        "samples-not-capped",
        "pacing.py",
        "SAMPLE_CAP = 4.0",
        "SAMPLE_CAP = 4e9",
        "a step-time sample counts at most four times the estimate",
    ),
    Mutant(
        "sync-without-checkpoint",
        "checkpoints.py",
        "entry.sync_seconds + event.seconds",
        "entry.sync_seconds",
        "a due checkpoint is part of the sync time",
    ),
    Mutant(
        "throttle-from-the-commit",
        "opening.py",
        "        draft.last_open = draft.at\n",
        "        draft.last_open = draft.at + 1.0\n",
        "the throttle counts from the last opening",
    ),
    Mutant(
        "blind-openings-unbounded",
        "pacing.py",
        "state.blind_opened >= state.depth",
        "state.blind_opened >= 10**9",
        "without an estimate at most depth rounds are opened",
    ),
    # Merging and committing.
    Mutant(
        "weights-not-squared",
        "weights.py",
        "return tokens * tokens / steps if",
        "return tokens / steps if",
        "a learner's weight is tokens squared over steps",
    ),
    Mutant(
        "sweep-corrects",
        "sealing.py",
        "correct and not plain",
        "correct",
        "a plain average, the closing sweep's or direct's, corrects nothing",
    ),
    Mutant(
        "guard-below-quorum",
        "sealing.py",
        "spare = len(by_norm) - round_.quorum",
        "spare = len(by_norm) - 1",
        "no guard leaves fewer than K answers",
    ),
    Mutant(
        "guard-upper-median",
        "sealing.py",
        "by_norm[len(by_norm) // 2][0]",
        "by_norm[(len(by_norm) - 1) // 2][0]",
        "outliers are held against the lower median",
    ),
    Mutant(
        "retry-keeps-the-largest",
        "sealing.py",
        "count = min(1 if round_.failures else 0, spare)",
        "count = 0",
        "after an unusable merge the largest norm is left out",
    ),
    Mutant(
        "failures-without-end",
        "rounds.py",
        "MAX_FAILURES = 3",
        "MAX_FAILURES = 30",
        "the third unusable merge stops the session",
    ),
    Mutant(
        "commits-out-of-order",
        "commits.py",
        "    if not draft.rounds or draft.rounds[0].status is not MERGED:\n"
        "        return\n"
        "    round_ = draft.rounds[0]\n",
        "    merged = [one for one in draft.rounds if one.status is MERGED]\n"
        "    if not merged or any(one.status is COMMITTING for one in draft.rounds):\n"
        "        return\n"
        "    round_ = merged[0]\n",
        "commits are strictly in ascending step",
    ),
    Mutant(
        "ledger-counts-twice",
        "commits.py",
        '"merges": merges + 1,',
        '"merges": merges + 2,',
        "the ledger counts each merge once",
    ),
    Mutant(
        "broadcast-before-durable",
        "checkpoints.py",
        "entry.gate > draft.durable:",
        "entry.gate > draft.step:",
        "a broadcast leaves after its checkpoint is durable",
    ),
    Mutant(
        "step-0-not-awaited",
        "opening.py",
        "draft.durable < 0 or ",
        "",
        "nothing starts before the checkpoint of step 0 is durable",
    ),
    Mutant(
        "opens-before-the-broadcast",
        "opening.py",
        "return state.versions[fragment] == state.broadcast[fragment]",
        "return True",
        "a round opens only after its fragment's last broadcast was ordered",
    ),
    Mutant(
        "due-checkpoint-forgotten",
        "checkpoints.py",
        "            draft.due = step\n",
        "            pass\n",
        "a checkpoint that became due while one was written is written next",
    ),
    # The closing sweep.
    Mutant(
        "sweep-one-round-short",
        "state.py",
        "step > self.target - self.num_fragments",
        "step > self.target - self.num_fragments + 1",
        "the closing sweep is the last P rounds",
    ),
    Mutant(
        "sweep-waits-for-excused",
        "sealing.py",
        "if owing > round_.excused:",
        "if owing > 0:",
        "a member missed in one sweep round is not waited for in the next",
    ),
    Mutant(
        "sweep-never-waits-again",
        "pushes.py",
        "        _wait_again(draft, learner)\n",
        "        pass\n",
        "a member that answers again is waited for again",
    ),
    Mutant(
        "sweep-settles-once",
        "sealing.py",
        "draft.step + 1 if round_.sweep else step",
        "step",
        "what is possible after one event happens at once",
    ),
    # Who takes part.
    Mutant(
        "generations-reused",
        "sessions.py",
        "    if generation in seen:\n",
        "    if generation in seen[:-1]:\n",
        "a generation is never used twice",
    ),
    Mutant(
        "half-open-kept",
        "sessions.py",
        "    if older is not None:\n",
        "    if older is not None and learner not in draft.current:\n",
        "the newest connection of an id closes the older",
    ),
    Mutant(
        "provisional-not-released",
        "members.py",
        "draft.opener == generation:",
        "draft.opener != generation:",
        "a provisional session goes with the connection that fixed it",
    ),
    Mutant(
        "wait-for-quorum-only",
        "opening.py",
        "    return state.config.wait_for\n",
        "    return state.quorum\n",
        "the first round waits for --wait-for learners",
    ),
    # Resume and end.
    Mutant(
        "resume-keeps-gates",
        "resume.py",
        "broadcast=versions,",
        "broadcast=(0,) * num_fragments,",
        "a resumed session has broadcast what its checkpoint holds",
    ),
    Mutant(
        "resume-forgets-the-ledger",
        "resume.py",
        "ledger=Map({entry.learner: entry for entry in event.ledger}),",
        "",
        "a resumed session goes on with the checkpoint's ledger",
    ),
    Mutant(
        "cut-awaits-the-refused",
        "ending.py",
        " and learner not in draft.dismissed",
        "",
        "whoever was refused for good is not awaited",
    ),
    Mutant(
        "cut-forgets-who-left",
        "ending.py",
        "AWAY_SECONDS = 60.0",
        "AWAY_SECONDS = 0.0",
        "whoever left less than a minute before the cut is awaited",
    ),
    Mutant(
        "guests-awaited-for-ever",
        "members.py",
        "        if draft.awaited.get(learner):\n",
        "        if False:\n",
        "who comes after the cut is awaited only while it is connected",
    ),
    Mutant(
        "stop-retries",
        "rounds.py",
        'Phase.STOPPING: "stopping", ',
        "",
        "a stopping session retries nothing",
    ),
    Mutant(
        "stop-waits-for-ever",
        "ending.py",
        '        draft.stop_deadline = None\n        drop_rounds(draft, draft.step + 1, "stopping")\n',
        "        draft.stop_deadline = None\n",
        "at the end of the stop budget what was not commit-ordered is dropped",
    ),
    Mutant(
        "pool-not-drained",
        "ending.py",
        "(drain and draft.config.svd_pool and not draft.pool_drained)",
        "False",
        "the SVD pool is drained before the final checkpoint",
    ),
    Mutant(
        "budget-ends-early",
        "ending.py",
        "reported == draft.config.num_learners and",
        "reported >= draft.config.quorum and",
        "a budget cut-off collects a report of every configured learner",
    ),
    Mutant(
        "budget-opens-rounds",
        "ending.py",
        "draft.reports = draft.reports.set(learner, True)\n        begin_budget(draft)\n",
        "draft.reports = draft.reports.set(learner, True)\n",
        "the first budget report closes the session to new rounds",
    ),
)
