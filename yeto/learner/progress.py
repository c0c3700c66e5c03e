"""What the user sees of a learner: one line that is kept up to date, and a log that programs read.

On a terminal the line is redrawn in place; elsewhere it is printed every few seconds. The log
(``--log-jsonl``) has one JSON object a line, written at once, and never a NaN (null stands for one). ``at``
is Unix time in seconds. Fields by ``kind``:

* ``phase``: ``phase`` is ``loading``, ``waiting``, ``training``, ``frozen``, ``saving`` or ``finishing``;
* ``link``: ``link`` is ``connecting``, ``up`` or ``down``; ``detail`` says why or with whom;
* ``step``: ``local_step``, ``global_step``, ``loss`` (per target), ``targets`` of the step, ``tokens`` since
  the start, ``tokens_per_second``, ``learning_rate``, ``gradient_norm``, ``merges``, ``staleness``, ``link``;
* ``broadcast``: ``fragment``, ``version``, ``taken`` (``overwrote``, ``blended``, ``rolled_back``,
  ``unchanged``, ``ignored``), ``merges``, ``global_step``, ``local_step``;
* ``push``: ``fragment``, ``step`` (the round), ``attempt``, ``base_version``, ``staleness``, ``c_steps``,
  ``c_tokens``, ``local_step``;
* ``eval``: ``loss`` (per target), ``targets``, ``rows``, ``local_step``, ``global_step``;
* ``notice``: ``text``;
* ``exit``: ``code``, ``reason``, ``local_step``, ``global_step``, ``merges``, ``tokens``, ``empty_groups``,
  ``seconds`` (per section of the training thread, ``unaccounted`` and ``total`` among them).
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from yeto.errors import ConfigError
from yeto.learner.anchors import Answer, Broadcast, Receipt, Taken
from yeto.learner.loop import StepResult
from yeto.learner.task import Evaluation

PLAIN_LINE_SECONDS = 10.0
"""Time between two printed lines where lines cannot be redrawn."""

RATE_STEPS = 20
"""Steps that tokens/s is averaged over: enough to be steady, few enough to show a change."""


class Progress:
    """Collects facts from both threads, shows them, logs them."""

    def __init__(
        self,
        *,
        learner_id: int,
        max_local_steps: int | None = None,
        log_path: Path | None = None,
        stream: TextIO | None = None,
    ) -> None:
        """Open the log, which is appended to.

        Args:
            learner_id: shown in front of every line.
            max_local_steps: where the run ends by itself, for the ETA.
            log_path: JSON lines go there; None writes none.
            stream: where people read; stderr by default.

        Raises:
            ConfigError: the log cannot be opened.
        """
        self._learner_id = learner_id
        self._max_local_steps = max_local_steps
        self._stream = sys.stderr if stream is None else stream
        self._lock = threading.Lock()
        self._log: TextIO | None = None
        if log_path is not None:
            try:
                log_path.parent.mkdir(parents=True, exist_ok=True)
                self._log = log_path.open("a", encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"--log-jsonl {log_path}: {error.strerror}") from error
        self._live: Live | None = None
        self._last_line = -math.inf
        self._recent: deque[tuple[float, int]] = deque(maxlen=RATE_STEPS + 1)
        self._phase = "loading"
        self._link = "none"
        self._link_said = ("", "")
        self._loss: float | None = None
        self._staleness = 0
        self.local_step = 0
        self.global_step = 0
        self.tokens = 0
        self.merges = 0
        """Broadcasts that changed the local weights."""

    def __enter__(self) -> Progress:
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
        if self._log is not None:
            # What could not be written was told when it happened.
            with contextlib.suppress(OSError):
                self._log.close()
            self._log = None

    # -- facts ----------------------------------------------------------------------------------------

    def phase(self, phase: str) -> None:
        """The learner entered a phase of its life."""
        with self._lock:
            self._phase = phase
            self._write("phase", phase=phase)

    def link(self, state: str, detail: str) -> None:
        """The link is ``connecting``, ``up`` or ``down``.

        People are told once: an hour of dialling in vain, always for the same reason, is one line of it.
        """
        with self._lock:
            self._link = state
            self._write("link", link=state, detail=detail)
            is_redial = state == "connecting" and self._link_said[0] == "down"
            is_news = not is_redial and (state, detail) != self._link_said
            if is_news:
                self._link_said = (state, detail)
        if is_news:
            self._say(f"link {state}: {detail}")

    def stepped(self, result: StepResult, *, local_step: int, tokens: int) -> None:
        """An optimizer step was taken; ``tokens`` is the sum since the start."""
        with self._lock:
            self.local_step, self.tokens, self._loss = local_step, tokens, result.loss
            self._recent.append((time.monotonic(), tokens))
            self._write(
                "step",
                local_step=local_step,
                global_step=self.global_step,
                loss=result.loss,
                targets=result.targets,
                tokens=tokens,
                tokens_per_second=round(self._rate(), 3),
                learning_rate=result.learning_rate,
                gradient_norm=result.gradient_norm,
                merges=self.merges,
                staleness=self._staleness,
                link=self._link,
            )
        self._show()

    def received(self, broadcast: Broadcast, receipt: Receipt, *, global_step: int) -> None:
        """A broadcast crossed the boundary."""
        with self._lock:
            self.global_step = global_step
            if receipt.taken in (Taken.BLENDED, Taken.ROLLED_BACK):
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
        with self._lock:
            self._write(
                "exit",
                code=code,
                reason=reason,
                local_step=self.local_step,
                global_step=self.global_step,
                merges=self.merges,
                tokens=self.tokens,
                empty_groups=empty_groups,
                seconds={name: round(value, 6) for name, value in seconds.items()},
            )
        self._say(reason)

    def failed(self, code: int, reason: str) -> None:
        """The learner is about to exit for a reason that whoever runs it prints."""
        with self._lock:
            self._write(
                "exit",
                code=code,
                reason=reason,
                local_step=self.local_step,
                global_step=self.global_step,
                merges=self.merges,
                tokens=self.tokens,
            )

    def restore_terminal(self) -> None:
        """Show the cursor again, for a process that ends without unwinding."""
        if self._live is not None:
            self._live.console.show_cursor(True)

    # -- showing --------------------------------------------------------------------------------------

    def line(self) -> str:
        """Return the progress line."""
        with self._lock:
            parts = [f"learner {self._learner_id}: {self._phase}"]
            if self._loss is not None:
                parts += [f"local step {self.local_step}", f"loss {self._loss:.4f}"]
                parts.append(f"{self._rate():,.0f} tokens/s")
            if self._link != "none":
                parts += [f"global step {self.global_step}", f"{self.merges} merges"]
                parts += [f"staleness {self._staleness}", f"link {self._link}"]
            eta = self._eta_seconds()
            if eta is not None:
                parts.append(f"ETA {int(eta) // 3600}:{int(eta) % 3600 // 60:02}:{int(eta) % 60:02}")
        return ", ".join(parts)

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

    def _rate(self) -> float:
        if len(self._recent) < 2:
            return 0.0
        (first, before), (last, after) = self._recent[0], self._recent[-1]
        return (after - before) / (last - first) if last > first else 0.0

    def _eta_seconds(self) -> float | None:
        if self._max_local_steps is None or len(self._recent) < 2:
            return None
        per_step = (self._recent[-1][0] - self._recent[0][0]) / (len(self._recent) - 1)
        return max(0, self._max_local_steps - self.local_step) * per_step

    def _write(self, kind: str, **fields: Any) -> None:
        if self._log is None:
            return
        record = {"kind": kind, "at": round(time.time(), 6)} | {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in fields.items()
        }
        try:
            self._log.write(json.dumps(record, allow_nan=False) + "\n")
            self._log.flush()
        except OSError as error:
            # A full disk is no reason to lose a training.
            with contextlib.suppress(OSError):
                self._log.close()
            self._log = None
            self._print(
                f"learner {self._learner_id}: --log-jsonl ends here: {error.strerror}; training goes on"
            )
