"""Where a learner's curves go besides its own log: TensorBoard and Weights & Biases, if asked for.

Three rules. A package that is missing is refused before anything is loaded. What a sink is given is what the
log is given, picked by one table, so that two records of a run never disagree. And once training has begun a
sink may end, not training: whatever it raises is said once, and the others go on.

The horizontal axis is the learner's local step; ``exchange/global_step`` leads from there to the run's. A
record is written by the thread that tells it, so a sink must be quick: a few hundred bytes to a file, or into
the queue of the package's own process.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from yeto.errors import ConfigError, YetoError
from yeto.learner.config import LearnerConfig

REACH_SECONDS = 30.0
"""How long a start waits for the service of Weights & Biases."""

FINISH_SECONDS = 60.0
"""How long the end waits for the same: what is not sent by then is on disk, and can be sent later."""

SCALARS: Mapping[str, Mapping[str, str]] = {
    "step": {
        "loss": "train/loss",
        "learning_rate": "train/learning_rate",
        "gradient_norm": "train/gradient_norm",
        "tokens_per_second": "train/tokens_per_second",
        "tokens": "train/tokens",
        "merges": "exchange/merges",
        "staleness": "exchange/staleness",
        "global_step": "exchange/global_step",
    },
    "eval": {"loss": "eval/loss"},
}
"""Names of curves by kind of record and field."""


class Sink(Protocol):
    """One place that curves go to. Any method may raise anything; the sink is then not used again."""

    flag: str
    """What the user said to have it."""

    def write(self, scalars: Mapping[str, float], local_step: int) -> None:
        """Take one point of some curves."""

    def close(self) -> None:
        """Write out what is left."""


class SinkStuck(YetoError):
    """A sink did not end in time, and something of it is still at work."""


class Sinks:
    """All sinks of a learner; one that fails is dropped and told of once."""

    def __init__(self, *sinks: Sink) -> None:
        """Feed ``sinks``, which are open."""
        self._sinks = list(sinks)
        self.is_stuck = False
        """Whether one could not be ended; a process that waits for it at its exit might never exit."""

    def feed(self, kind: str, fields: Mapping[str, Any]) -> list[str]:
        """Give the sinks what they want of one record of the log.

        Args:
            kind: of the record.
            fields: of the record, before what is no number becomes null: a curve may show that.

        Returns:
            What to tell a person: a line for each sink that ends here.
        """
        names = SCALARS.get(kind)
        if not self._sinks or names is None:
            return []
        scalars = {curve: float(fields[name]) for name, curve in names.items()}
        return self._each(lambda sink: sink.write(scalars, fields["local_step"]))

    def close(self) -> list[str]:
        """Close all; return a line for each that could not write out what it had."""
        troubles = self._each(lambda sink: sink.close(), "the result is not touched by that")
        self._sinks.clear()
        return troubles

    def _each(self, act: Callable[[Sink], None], then: str = "training goes on") -> list[str]:
        troubles = []
        for sink in tuple(self._sinks):
            try:
                act(sink)
            except Exception as error:
                self.is_stuck = self.is_stuck or isinstance(error, SinkStuck)
                # A full disk or a lost service is no reason to lose a training.
                self._sinks.remove(sink)
                troubles.append(f"{sink.flag} ends here: {_cause(error)}; {then}")
        return troubles


def require_packages(config: LearnerConfig) -> None:
    """Look whether the packages that were asked for are installed, without loading them.

    Raises:
        ConfigError: one is not; the message says how to get it.
    """
    for package, wanted in (("tensorboard", config.tensorboard), ("wandb", config.wandb)):
        if wanted is not None and find_spec(package) is None:
            raise ConfigError(
                f"--{package} needs the package {package}, which is not installed: "
                f"pip install 'yeto[{package}]'"
            )


def open_sinks(config: LearnerConfig) -> Sinks:
    """Open what the configuration asks for.

    Raises:
        ConfigError: a package is not installed, or a sink cannot be opened.
    """
    require_packages(config)
    sinks: list[Sink] = []
    if config.tensorboard is not None:
        sinks.append(TensorBoard(config.tensorboard, config.learner_id))
    if config.wandb is not None:
        sinks.append(WeightsAndBiases(config.wandb, config.learner_id, config.num_learners))
    return Sinks(*sinks)


class TensorBoard:
    """An event file for TensorBoard, in a folder of this learner's, so that each is a run of its own.

    Written in place, a record at a time: the package's own writer has a thread, which dies with a traceback
    when a disk is full, and up to two minutes of curves that a killed process takes along.
    """

    def __init__(self, folder: Path, learner_id: int) -> None:
        """Begin a new event file in ``folder/learner-<id>``; a restarted learner's files are one run.

        Raises:
            ConfigError: the file cannot be made.
        """
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.flag = f"--tensorboard {folder}"
        self._event, self._summary = Event, Summary
        own = folder / f"learner-{learner_id}"
        name = f"events.out.tfevents.{time.time_ns() / 1e9:.6f}.{socket.gethostname()}.{os.getpid()}"
        try:
            own.mkdir(parents=True, exist_ok=True)
            self._file = (own / name).open("xb")
            self._records = RecordWriter(self._file)
            self._append(file_version="brain.Event:2")
        except OSError as error:
            raise ConfigError(f"{self.flag}: {error.strerror}") from error

    def write(self, scalars: Mapping[str, float], local_step: int) -> None:
        """Append one event with all of them."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._append(step=local_step, summary=self._summary(value=values))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, **fields: Any) -> None:
        try:
            self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())
            self._file.flush()
        except OSError:
            # What is in the buffer cannot be written either.
            with contextlib.suppress(OSError):
                self._file.close()
            raise


class WeightsAndBiases:
    """A run of a project of Weights & Biases; ``WANDB_MODE=offline`` keeps it on disk."""

    def __init__(self, project: str, learner_id: int, num_learners: int) -> None:
        """Begin a run named after the learner.

        A service that cannot be reached is no error: whoever starts a lost island anew may not be there to
        read it. The first point finds that this sink has ended.

        Raises:
            ConfigError: the package refuses, for instance because nobody is logged in.
        """
        import wandb

        self.flag = f"--wandb {project}"
        self._run: Any = None
        self._unreachable: Exception | None = None
        try:
            self._run = wandb.init(
                project=project,
                name=f"learner-{learner_id}",
                config={"learner_id": learner_id, "num_learners": num_learners},
                settings=wandb.Settings(console="off", init_timeout=REACH_SECONDS),
            )
        except Exception as error:
            is_refusal = isinstance(error, wandb.errors.AuthenticationError)
            if isinstance(error, wandb.errors.CommError) and not is_refusal:
                self._unreachable = error
                return
            raise ConfigError(
                f"{self.flag}: {_cause(error)}; log in (wandb login), or keep the run on disk: "
                "WANDB_MODE=offline"
            ) from error
        # Its own steps may only grow; an evaluation belongs to a step that is written already.
        self._run.define_metric("*", step_metric="local_step")

    def write(self, scalars: Mapping[str, float], local_step: int) -> None:
        """Hand over one point of each curve."""
        if self._unreachable is not None:
            raise self._unreachable
        self._run.log({"local_step": local_step, **scalars})

    def close(self) -> None:
        """End the run; waits for what is still to be sent, but not for ever.

        Raises:
            SinkStuck: something is not sent. The package goes on trying in a thread that keeps no process
                alive; what else of it might, at the interpreter's exit, is the caller's to leave behind.
        """
        if self._run is None:
            return
        failures: list[BaseException] = []

        def finish() -> None:
            try:
                self._run.finish()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=finish, name="yeto-wandb", daemon=True)
        thread.start()
        thread.join(FINISH_SECONDS)
        if thread.is_alive():
            folder = Path(self._run.dir).parent
            raise SinkStuck(
                f"not all was sent within {FINISH_SECONDS:.0f} s (wandb sync {folder} sends the rest)"
            )
        if failures:
            raise failures[0]


def _cause(error: Exception) -> str:
    """Return an error in one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split()) or type(error).__name__
