"""What the user sees of a learner: one line that is kept up to date, and a log that programs read.

On a terminal the line is redrawn in place; elsewhere it is printed every few seconds. For the log see
:mod:`yeto.learner.run_log`.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from pathlib import Path
from typing import Any, Self, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from yeto.learner.exchanged import Answer, Broadcast, Receipt, Taken
from yeto.learner.loop import StepResult
from yeto.learner.pace import Pace
from yeto.learner.run_log import RunLog
from yeto.learner.sinks import Sinks
from yeto.learner.task import Evaluation
from yeto.storage import rate_text

PLAIN_LINE_SECONDS = 10.0
"""Time between two printed lines where lines cannot be redrawn."""


class Progress:
    """Collects facts from both threads, shows them, logs them."""

    def __init__(
        self,
        *,
        learner_id: int,
        unit: str = "tokens",
        max_local_steps: int | None = None,
        log_path: Path | None = None,
        sinks: Sinks | None = None,
        stream: TextIO | None = None,
    ) -> None:
        """Open the log, which is appended to.

        Args:
            learner_id: shown in front of every line.
            unit: what the rows are counted in: tokens, or samples.
            max_local_steps: where the run ends by itself, for the ETA.
            log_path: JSON lines go there; None writes none.
            sinks: are fed with the same facts, and closed at the end.
            stream: where people read; stderr by default.

        Raises:
            ConfigError: the log cannot be opened.
        """
        self._learner_id = learner_id
        self._unit = unit
        self._max_local_steps = max_local_steps
        self._stream = sys.stderr if stream is None else stream
        self._lock = threading.Lock()
        self._sinks = Sinks() if sinks is None else sinks
        self._log = RunLog(log_path)
        self._live: Live | None = None
        self._last_line = -math.inf
        self._pace = Pace()
        self._phase = "loading"
        self._link = "none"
        self._link_said = ("", "")
        self._fragments = 0, 0
        self._loss: float | None = None
        self._has_diverged = False
        self._staleness = 0
        self.local_step = 0
        self.global_step = 0
        self.tokens = 0
        self.merges = 0
        """Broadcasts that changed the local weights."""

    def __enter__(self) -> Self:
        console = Console(file=self._stream)
        if console.is_terminal:
            self._live = Live(
                get_renderable=lambda: Text(self.line()),
                console=console,
                refresh_per_second=4,
                transient=True,
            )
            self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        self._log.close()
        for trouble in self._sinks.close():
            self._print(f"learner {self._learner_id}: {trouble}")

    # -- facts ----------------------------------------------------------------------------------------

    def phase(self, phase: str) -> None:
        """The learner entered a phase of its life."""
        with self._lock:
            self._phase = phase
            self._write("phase", phase=phase)

    def fragments(self, received: int, num_fragments: int) -> None:
        """The learner waits until every fragment was received; so many were."""
        with self._lock:
            self._fragments = received, num_fragments

    def idle(self) -> None:
        """The learner has been waiting for a while."""
        self._show()

    def link(self, state: str, detail: str, then: str = "") -> None:
        """The link is ``connecting``, ``up`` or ``down``.

        People are told once: an hour of dialling in vain, always for the same reason, is one line of it.

        Args:
            state: of the link.
            detail: where to, or why not.
            then: what happens next, for people only.
        """
        with self._lock:
            self._link = state
            self._write("link", link=state, detail=detail)
            is_redial = state == "connecting" and self._link_said[0] == "down"
            is_news = not is_redial and (state, detail) != self._link_said
            if is_news:
                self._link_said = (state, detail)
        if is_news:
            self._say(f"link {state}: {detail}" + (f"; {then}" if then else ""))

    def resumed(self, local_step: int, tokens: int, *, global_step: int) -> None:
        """The learner goes on from saved state; ``tokens`` is the sum since the start."""
        with self._lock:
            self.local_step, self.tokens, self.global_step = local_step, tokens, global_step
        self.notice(
            f"resumed at local step {local_step}, global step {global_step}: weights, optimizer, place in "
            "the rows, chance and anchors are as saved"
        )

    def stepped(self, result: StepResult, *, local_step: int, tokens: int) -> None:
        """An optimizer step was taken; ``tokens`` is the sum since the start."""
        with self._lock:
            self.local_step, self.tokens, self._loss = local_step, tokens, result.loss
            is_news = not (self._has_diverged or math.isfinite(result.loss))
            self._has_diverged |= is_news
            self._pace.stepped(tokens)
            self._write(
                "step",
                local_step=local_step,
                global_step=self.global_step,
                loss=result.loss,
                targets=result.targets,
                tokens=tokens,
                tokens_per_second=round(self._pace.tokens_per_second(), 3),
                learning_rate=result.learning_rate,
                gradient_norm=result.gradient_norm,
                merges=self.merges,
                staleness=self._staleness,
                link=self._link,
            )
        if is_news:
            self.notice(
                f"the loss of local step {local_step} is {result.loss}: this training has diverged; stop it, "
                "lower --inner-lr or mend its data, and start it without what is in its --state-dir"
            )
        self._show()

    def received(self, broadcast: Broadcast, receipt: Receipt, *, global_step: int) -> None:
        """A broadcast crossed the boundary."""
        with self._lock:
            self.global_step = global_step
            if receipt.taken in (Taken.BLENDED, Taken.CARRIED, Taken.ROLLED_BACK):
                self.merges += 1
            self._write(
                "broadcast",
                fragment=broadcast.fragment,
                version=broadcast.version,
                taken=receipt.taken.value,
                merges=self.merges,
                global_step=global_step,
                local_step=self.local_step,
            )

    def final(self, step: int) -> None:
        """The final cut of global step ``step`` is taken."""
        with self._lock:
            self.global_step = step

    def answered(self, answer: Answer) -> None:
        """A pull was answered."""
        with self._lock:
            self._staleness = answer.staleness
            self._write(
                "push",
                fragment=answer.pull.fragment,
                step=answer.pull.step,
                attempt=answer.pull.attempt,
                base_version=answer.base_version,
                staleness=answer.staleness,
                c_steps=answer.c_steps,
                c_tokens=answer.c_tokens,
                local_step=answer.local_step,
            )

    def evaluated(self, evaluation: Evaluation) -> None:
        """The held-out rows were scored."""
        with self._lock:
            self._write(
                "eval",
                loss=evaluation.loss,
                targets=evaluation.targets,
                rows=evaluation.rows,
                local_step=self.local_step,
                global_step=self.global_step,
            )
        self._say(
            f"held-out loss {evaluation.loss:.4f} per target over {evaluation.rows} rows "
            f"(local step {self.local_step}, global step {self.global_step})"
        )

    def notice(self, text: str) -> None:
        """Something a person should read once."""
        with self._lock:
            self._write("notice", text=text)
        self._say(text)

    def ended(self, code: int, reason: str, *, seconds: dict[str, float], empty_groups: int) -> None:
        """The learner is about to exit."""
        rounded = {name: round(value, 6) for name, value in seconds.items()}
        self._write_exit(code, reason, empty_groups=empty_groups, seconds=rounded)
        self._say(reason)

    def failed(self, code: int, reason: str) -> None:
        """The learner is about to exit for a reason that whoever runs it prints."""
        self._write_exit(code, reason)

    def _write_exit(self, code: int, reason: str, **more: Any) -> None:
        with self._lock:
            self._write(
                "exit",
                code=code,
                reason=reason,
                local_step=self.local_step,
                global_step=self.global_step,
                merges=self.merges,
                tokens=self.tokens,
                **more,
            )

    def restore_terminal(self) -> None:
        """Show the cursor again, for a process that ends without unwinding."""
        if self._live is not None:
            self._live.console.show_cursor(True)

    # -- showing --------------------------------------------------------------------------------------

    def line(self) -> str:
        """Return the progress line."""
        with self._lock:
            parts = [f"learner {self._learner_id}: {self._phase}{self._awaited()}"]
            if self._loss is not None:
                parts += [f"local step {self.local_step}", f"loss {self._loss:.4f}"]
                if rate := self._pace.tokens_per_second():
                    # One step has no pace yet.
                    parts.append(f"{rate_text(rate)} {self._unit}/s")
            if self._link != "none":
                parts += [f"global step {self.global_step}", f"{self.merges} merges"]
                parts += [f"staleness {self._staleness}", f"link {self._link}"]
            eta = self._eta_seconds()
            if eta is not None:
                parts.append(f"ETA {int(eta) // 3600}:{int(eta) % 3600 // 60:02}:{int(eta) % 60:02}")
        return ", ".join(parts)

    def _awaited(self) -> str:
        """Return what is waited for, as far as it is known here: who else is in the run is not."""
        if self._phase == "frozen":
            return " at its budget, until the syncer has merged the rest"
        if self._phase == "finishing":
            return ", until the syncer ends the session"
        if self._phase != "waiting":
            return ""
        received, num_fragments = self._fragments
        if self._link != "up":
            return " for a connection to the syncer"
        if received:
            return f" for the first weights: {received} of {num_fragments} fragments are here"
        if self._learner_id == 0:
            return " for the syncer to open the run with this learner's first weights"
        return " for the run to open: learner 0 brings the first weights, and the syncer says who is missing"

    def _show(self) -> None:
        now = time.monotonic()
        if self._live is None and now - self._last_line >= PLAIN_LINE_SECONDS:
            self._last_line = now
            self._print(self.line())

    def _say(self, text: str) -> None:
        line = f"learner {self._learner_id}: {text}"
        if self._live is not None:
            self._live.console.print(line, markup=False, highlight=False)
        else:
            self._print(line)

    def _print(self, line: str) -> None:
        # One write, or the lines of two threads run into each other.
        self._stream.write(line + "\n")
        self._stream.flush()

    def _eta_seconds(self) -> float | None:
        if self._max_local_steps is None:
            return None
        return self._pace.seconds_for(max(0, self._max_local_steps - self.local_step))

    def _write(self, kind: str, **fields: Any) -> None:
        for trouble in self._sinks.feed(kind, fields):
            self._print(f"learner {self._learner_id}: {trouble}")
        end = self._log.write(kind, fields)
        if end is not None:
            self._print(f"learner {self._learner_id}: {end}")
