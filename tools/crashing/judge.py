"""What must hold of the files that a syncer left, however it ended.

* The tape replays, and says of the checkpoint what stands in it, ledger and digests included.
* Nothing that a learner saw is lost: each version it was sent is a commit of the timeline that counts.
* The ledger is what the merges on the tape sum to, and every merged push is one that a learner sent, once.

The sums are made here from the plain lines of the tape, not by the code that is under test.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attrs import define, field
from breaking import Broken

from yeto.cli.replay_checkpoint import check_checkpoint
from yeto.state import has_checkpoint
from yeto.tape import Record, Replayer, complete_lines, open_tape

Totals = dict[int, tuple[int, int, int]]
"""Merges, steps and tokens of each learner."""


@define
class Story:
    """A tape as plain sums: what its timeline that counts comes to."""

    commits: dict[int, dict[str, Any]] = field(factory=dict)
    """The merge record of each step."""
    ledger: Totals = field(factory=dict)
    resumed: list[int] = field(factory=list)
    """The step of each resume, in their order."""
    superseded: int = 0
    ended: bool = False

    @property
    def step(self) -> int:
        """The last step."""
        return max(self.commits, default=0)


def tell(tape: Path) -> Story:
    """Sum a tape up, a torn tail left out.

    Raises:
        Broken: commits have gaps, or a resume has another ledger than the merges before it.
    """
    story = Story()
    by_step: dict[int, Totals] = {0: {}}
    data = tape.read_bytes()
    for line in data[: data.rfind(b"\n") + 1].splitlines():
        record = json.loads(line)
        match record["kind"]:
            case "merge":
                step = record["step"]
                if step != story.step + 1:
                    raise Broken(f"record {record['seq']}: step {step} is committed after {story.step}")
                story.commits[step] = record
                story.ledger = _with(story.ledger, record)
                by_step[step] = story.ledger
            case "session_resumed":
                step = record["step"]
                if step not in by_step:
                    raise Broken(f"record {record['seq']}: resumed at {step}, which was never committed")
                later = [other for other in story.commits if other > step]
                story.superseded += len(later)
                for other in later:
                    del story.commits[other]
                story.ledger = by_step[step]
                stated = {e["learner"]: _totals(e) for e in record["ledger"] if any(_totals(e))}
                if stated != story.ledger:
                    raise Broken(
                        f"record {record['seq']}: resumed with the ledger {stated}, "
                        f"the merges sum to {story.ledger}"
                    )
                story.resumed.append(step)
            case "session_ended":
                story.ended = True
    return story


def _totals(entry: dict[str, Any]) -> tuple[int, int, int]:
    return entry["merges"], entry["c_steps"], entry["c_tokens"]


def _with(ledger: Totals, merge: dict[str, Any]) -> Totals:
    added = dict(ledger)
    for part in merge["responders"]:
        merges, steps, tokens = added.get(part["learner"], (0, 0, 0))
        added[part["learner"]] = (merges + 1, steps + part["c_steps"], tokens + part["c_tokens"])
    return added


def check_files(tape: Path, checkpoint: Path) -> Story | None:
    """Hold tape and checkpoint against each other; return the tape's story, None when there is no tape.

    Raises:
        Broken: they differ, or one is damaged.
    """
    if not tape.exists():
        if has_checkpoint(checkpoint):
            raise Broken("there is a checkpoint, and no tape")
        return None
    replayer = Replayer(str(tape))
    if has_checkpoint(checkpoint):
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            code = check_checkpoint(tape, _verified(tape, replayer), replayer, checkpoint, as_json=False)
        if code:
            raise Broken(f"tape and checkpoint: {' '.join(said.getvalue().split())}")
    else:
        for _ in _verified(tape, replayer):
            pass
        if replayer.divergence is not None:
            raise Broken(f"the tape does not replay: {replayer.divergence}")
    story = tell(tape)
    replayed = {
        entry.learner: (entry.merges, entry.c_steps, entry.c_tokens)
        for entry in replayer.state.ledger.values()
        if entry.merges
    }
    # Cut off behind an event, the rules know of a commit whose record is lost. It was never acted upon.
    if not replayer.due and replayed != story.ledger:
        raise Broken(f"the tape replays to the ledger {replayed}, its merges sum to {story.ledger}")
    return story


def _verified(tape: Path, replayer: Replayer) -> Iterator[Record]:
    """Feed a tape's whole records to ``replayer`` and give them on, as far as they are what the rules say."""
    with open_tape(tape) as file:
        for line in complete_lines(file, str(tape)):
            record = replayer.feed(line)
            if replayer.divergence is not None:
                return
            yield record


def check_seen(story: Story, seen: dict[tuple[int, int], set[str]]) -> None:
    """Hold what learners were sent against the timeline that counts.

    Args:
        story: of the tape.
        seen: digests of each (fragment, version) that arrived anywhere.

    Raises:
        Broken: something that was broadcast is lost.
    """
    for (fragment, version), digests in seen.items():
        if version == 0:
            if len(digests) != 1:
                raise Broken(f"fragment {fragment} was sent in {len(digests)} first versions")
            continue
        commit = story.commits.get(version)
        if commit is None:
            raise Broken(f"version {version} of fragment {fragment} was broadcast and is lost")
        if digests != {commit["params_digest"]} or commit["fragment"] != fragment:
            raise Broken(
                f"version {version} of fragment {fragment} was broadcast as {sorted(digests)}, the tape "
                f"has {commit['params_digest']} of fragment {commit['fragment']}"
            )


def check_pushes(story: Story, sent: set[tuple[Any, ...]]) -> None:
    """Hold merged pushes against those that learners sent.

    Args:
        story: of the tape.
        sent: (learner, step, attempt, base version, steps, tokens) of each.

    Raises:
        Broken: one was never sent, or is in a merge twice.
    """
    for step, merge in story.commits.items():
        learners = [part["learner"] for part in merge["responders"]]
        if len(set(learners)) != len(learners):
            raise Broken(f"step {step} merged a learner twice")
        for part in merge["responders"]:
            push = (
                *(part["learner"], step, merge["attempt"]),
                *(part["base_version"], part["c_steps"], part["c_tokens"]),
            )
            if push not in sent:
                raise Broken(f"step {step} merged {push}, which no learner sent")
