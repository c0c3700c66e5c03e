"""Both phases of a learner-budget run, each as a syncer process, and the proof that they went as they must.

The rule: the final marker means that everything was looked at, so it is written here, last of all, and is not
there in any other case. A run that failed, that was stopped, or that a person put a marker beside, has none.

The syncer decides how a phase ends; what is decided here is only what follows, and from nothing but the tape
and the checkpoint. So a supervisor that is started again goes on where the last one was: in the first phase,
between the two, in the second, or at the end, where it looks at everything once more.

Learners are none of its business: they dial the syncer, wait between the phases, and are told when to end.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import trio
from attrs import field, frozen

from yeto.errors import EXIT_STOPPED, CheckpointError, ConfigError, TapeError, YetoError, first_of
from yeto.fleet.children import Child
from yeto.fleet.commands import YETO_RUN
from yeto.fleet.keeper import STOP_SECONDS, Keeper
from yeto.hosts import with_port
from yeto.state import inspect, read_manifest, remove_final_marker, write_final_marker
from yeto.state.guards import lock_file
from yeto.storage import Held, hold
from yeto.tape import Mark, find_past, printable, read
from yeto.view.budget import BudgetRun, read_budget, replay_budget
from yeto.view.follow import OwnRun
from yeto.view.live import waited
from yeto.view.model import Moment

T = TypeVar("T")

LINE_SECONDS: Final = 10.0
"""Time between two looks at how far the run is; a line is printed when there is something new."""

LOOK_SECONDS: Final = 0.05
"""Time between two looks for the file that says where the syncer listens."""


@frozen(kw_only=True)
class Supervised:
    """One run under supervision."""

    num_learners: int
    budget: int
    """Local steps that each learner takes (N)."""
    checkpoint: Path
    tape: Path
    log: Path
    """What the syncer prints."""
    ready_file: Path
    port: int
    """0 takes any free one in the first phase, and the same one from then on."""
    syncer_words: Sequence[str]
    """Flags of the syncer beyond those above, its budget and how it starts."""
    kept_variables: Sequence[str] = ()
    """Environment variables of ours that the syncer needs, such as the one with a key."""
    say: Callable[[str], None] = field(default=partial(print, flush=True))

    def run(self) -> int:
        """Drive both phases, verify, mark.

        Returns:
            0 with the final marker in place; 3 when learners never confirmed the final cut, or one that is
            needed stayed away; 4 when a signal stopped it.

        Raises:
            YetoError: a phase failed, or the run is not what it has to be; there is no marker.
        """
        try:
            return trio.run(_Supervisor(self).run)
        except* YetoError as group:
            raise first_of(group) from None


class _Supervisor:
    """The syncer of the present phase, and what is known of it."""

    def __init__(self, run: Supervised) -> None:
        self._run = run
        self._port = run.port
        self._keeper = Keeper(say=run.say, stop=self._stop, kill=self._kill)
        self._working = trio.CancelScope()
        """What a signal ends where there is no syncer to be stopped."""
        self._syncer = Child("syncer", (), run.log, keep_variables=run.kept_variables)

    async def run(self) -> int:
        with _held(self._run.checkpoint):
            # What it still commits is part of the story.
            await self._keeper.run(partial(self._keeper.until_free, lock_file(self._run.checkpoint)))
            if self._keeper.stopping.is_set():
                return EXIT_STOPPED
            story = await self._story()
            self._require_same_run(story)
            try:
                return await self._keeper.run(partial(self._live, story))
            except BaseException:
                self._withdraw()
                raise
            finally:
                # Also when Python itself fails here: the syncer may not outlive its supervisor.
                with trio.CancelScope(shield=True):
                    await self._syncer.stop(STOP_SECONDS)

    async def _live(self, story: BudgetRun) -> int:
        with self._working:
            return await self._both_phases(story)
        return EXIT_STOPPED

    async def _both_phases(self, story: BudgetRun) -> int:
        run = self._run
        # Whatever there is one for, it was not found by this look at everything.
        self._withdraw()
        if story.cut_off is None:
            run.say(
                f"phase 1 of 2: {run.num_learners} learners train until each has taken {run.budget} steps; "
                f"the syncer's log is {run.log}"
            )
            code = await self._phase("phase 1", ["--resume-or-start"])
            if code != 0:
                return code
            story = await self._story()
        await _off_thread(self._check_cut_off, story)
        if not story.finished:
            run.say("phase 2 of 2: every fragment is merged once more, by all learners")
            code = await self._phase("phase 2", ["--resume", "--budget-finish"])
            if code != 0:
                return code
        run.say("verifying tape and checkpoint")
        step = await _off_thread(self._check_all)
        write_final_marker(run.checkpoint, step)
        run.say(f"done: step {step}, verified and marked as final beside {run.checkpoint}")
        return 0

    async def _phase(self, name: str, start: Sequence[str]) -> int:
        """Run the syncer to the end of a phase; return its exit code.

        Raises:
            YetoError: it failed; the message is its own.
        """
        run = self._run
        if self._keeper.stopping.is_set():
            run.say(f"stopped before {name}; the same command goes on from here")
            return EXIT_STOPPED
        before = run.tape.stat().st_size if run.tape.exists() else 0
        self._syncer.start(self._afresh(start))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._announce)
            nursery.start_soon(self._show, name)
            code = await self._keeper.keep(
                self._syncer,
                "the syncer",
                origin=" from its checkpoint",
                again=partial(self._afresh, start),
            )
            nursery.cancel_scope.cancel()
        if code < 0:
            run.say(_stopped(name))
            return EXIT_STOPPED
        if code != 0:
            await self._explain(name, code, since=before)
        return code

    async def _explain(self, name: str, code: int, *, since: int) -> None:
        """Say why a phase did not end well; what ended in order is on the tape, what did not is in the log.

        Raises:
            YetoError: unless a person stopped it.
        """
        failure = self._syncer.failure(code)
        grown = self._run.tape.exists() and self._run.tape.stat().st_size > since
        end = (await self._story()).end if grown else None
        if end is not None and end.exit_code == code:
            failure = YetoError(f"{name}: {end.why}")
            failure.exit_code = code
        if code == EXIT_STOPPED and self._keeper.stopping.is_set():
            self._run.say(_stopped(name))
            return
        raise failure

    async def _story(self) -> BudgetRun:
        return await _off_thread(read_budget, self._run.tape)

    def _require_same_run(self, story: BudgetRun) -> None:
        """Refuse flags that are those of another run than the one whose tape is there."""
        config, run = story.config, self._run
        if config is None or not run.checkpoint.exists():
            return  # a run that never came to a checkpoint is set aside, whatever it was
        for flag, told, now in (
            ("--learners", config.num_learners, run.num_learners),
            ("--learner-budget-steps", config.learner_budget_steps, run.budget),
        ):
            if told != now:
                was = "none" if told is None else told
                raise ConfigError(
                    f"{flag} {now}: the run of {run.tape} has {was}; give the same, or name other files"
                )

    def _check_cut_off(self, story: BudgetRun) -> None:
        """Look at what the first phase left.

        Raises:
            YetoError: it is not what the second may go on from; names what is missing.
        """
        run = self._run
        if story.cut_off is None and story.end is not None and story.end.phase == "final":
            raise YetoError(
                f"the run reached its {story.end.step} rounds before the budget was used up; "
                "begin anew with a higher --total-steps"
            )
        _refuse(run.tape, story.missing_of_cut_off(run.num_learners, run.budget))
        assert story.cut_off is not None
        step = self._check_checkpoint(story)
        if story.target is None and step != story.cut_off.step:
            raise CheckpointError(
                f"{run.checkpoint}: is of step {step}, the cut-off on {run.tape} is at {story.cut_off.step}"
            )
        run.say(
            f"cut off at step {story.cut_off.step}; the checkpoint of step {step} is whole, and on the tape"
        )

    def _check_all(self) -> int:
        """Look at the whole run, every decision and every value; return its last step.

        Raises:
            YetoError: something is not what it has to be; names the first such thing.
        """
        run = self._run
        story, divergence = replay_budget(run.tape)
        if divergence is not None:
            raise TapeError(f"{run.tape}: {divergence}")
        _refuse(run.tape, story.missing(run.num_learners, run.budget))
        assert story.target is not None
        step = self._check_checkpoint(story)
        if step != story.target:
            raise CheckpointError(f"{run.checkpoint}: is of step {step}, the run ended at {story.target}")
        return step

    def _check_checkpoint(self, story: BudgetRun) -> int:
        """Look at every value of the newest checkpoint; return its step.

        Raises:
            CheckpointError: it is damaged, or not one that the tape tells of.
        """
        run = self._run
        found = inspect(run.checkpoint)
        if found.problems:
            raise CheckpointError(found.problems[0])
        manifest = read_manifest(Path(found.path))
        mark = Mark(
            step=manifest.step,
            digests={entry.fragment: entry.params_digest for entry in manifest.fragments},
            seq=manifest.tape_seq,
        )
        if find_past(read(run.tape), mark) is None:
            raise CheckpointError(f"{found.path}: {run.tape} tells of no such checkpoint")
        return manifest.step

    def _afresh(self, start: Sequence[str]) -> list[str]:
        """Return the command of a syncer, once nothing is there any more of where another one listened."""
        self._forget_place()
        return self._command(start)

    def _command(self, start: Sequence[str]) -> list[str]:
        run = self._run
        return [
            *(*YETO_RUN, "--role=syncer", f"--learners={run.num_learners}"),
            *(f"--learner-budget-steps={run.budget}", f"--port={self._port}"),
            *(f"--ready-file={run.ready_file}", f"--checkpoint-path={run.checkpoint}"),
            *(f"--event-tape={run.tape}", *start, *run.syncer_words),
        ]

    def _forget_place(self) -> None:
        """Take away what a syncer before said of where it listens.

        Raises:
            ConfigError: something else has the name.
        """
        file = self._run.ready_file
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f"--ready-file {file}: cannot be replaced: {error.strerror}") from error

    def _withdraw(self) -> None:
        remove_final_marker(self._run.checkpoint)

    async def _announce(self) -> None:
        """Say where the syncer listens, and keep the port: learners look for it where it was."""
        while not self._run.ready_file.exists():
            await trio.sleep(LOOK_SECONDS)
        place = json.loads(self._run.ready_file.read_text(encoding="utf-8"))
        if self._port != place["port"]:
            self._port = place["port"]
            self._run.say(f"the syncer listens on {with_port(place['host'], self._port)}, in both phases")

    async def _show(self, phase: str) -> None:
        run = OwnRun(self._run.tape)
        said = ""
        while True:
            await trio.sleep(LINE_SECONDS)
            if self._keeper.stopping.is_set():
                return
            moment = run.moment()
            # What the tape ends with is the session before, until this one listens and has said something.
            if moment is None or moment.phase == "ended" or not self._run.ready_file.exists():
                line = f"{phase}: the syncer is starting"
            else:
                line = _line(phase, moment)
            if line != said:
                self._run.say(line)
            said = line

    def _stop(self) -> None:
        if self._syncer.running:
            self._run.say("stopping: the syncer writes a checkpoint first (again to kill it at once)")
            self._syncer.send_signal(signal.SIGTERM)
        else:
            self._run.say("stopped; the same command goes on from here")
            self._working.cancel()

    def _kill(self) -> None:
        self._run.say("killing the syncer; the last checkpoint is intact")
        self._syncer.send_signal(signal.SIGKILL)


async def _off_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Call what takes long, while signals are heeded."""
    return await trio.to_thread.run_sync(partial(function, *arguments), abandon_on_cancel=True)


def _stopped(phase: str) -> str:
    return f"stopped in {phase}; the same command goes on from here"


def _line(phase: str, moment: Moment) -> str:
    """Return how far a phase is: in the first, what counts are the learners' steps."""
    steps = [learner.local_step for learner in moment.learners if learner.local_step is not None]
    least = f", learners are at step {min(steps)} or later" if steps else ""
    return f"{phase}: {moment.step} rounds committed{least}; {waited(moment.wait, moment.now)}"


def _refuse(tape: Path, missing: Iterator[str]) -> None:
    """Raise what is missing first, and say how much more is."""
    sentences = list(missing)
    if sentences:
        more = f" (and {len(sentences) - 1} more)" if len(sentences) > 1 else ""
        raise YetoError(printable(f"{tape}: {sentences[0]}{more}"))


def _held(checkpoint: Path) -> Held:
    """Hold a run for this supervisor.

    Raises:
        ConfigError: it has one, or nothing can be written beside the checkpoint.
    """
    taken = ConfigError(f"{checkpoint}: another supervisor has this run already")
    try:
        return hold(Path(f"{checkpoint}.supervisor.lock"), taken)
    except OSError as error:
        raise ConfigError(f"--checkpoint-path {checkpoint}: cannot be written: {error.strerror}") from error
