"""The commands of scenario scripts: every event by its kind on the tape, and words for what goes together.

The arguments say by their form what they are: ``0`` or ``1'2`` is a learner's connection, ``r5`` or
``r5a2`` a round's attempt, ``p1`` a fragment, and ``field=value`` sets a field of the event. What is left
out is what an obedient world would say. Several learners, rounds or fragments mean one event each, in
that order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_type_hints

import attrs
from core_fleet import generation
from script_session import TapedSession
from script_text import decision_line, event_line, number

from yeto.core import CoreConfig, next_timer, waiting_for
from yeto.core import events as ev
from yeto.core.later import later_fields
from yeto.core.parts import Round, Status
from yeto.core.values import LedgerEntry, SessionTerms

_TOKEN = re.compile(r'[^\s"]*"[^"]*"|\S+')
_LEARNER = re.compile(r"(\d+)(?:'(\d+))?")
_ROUND = re.compile(r"r(\d+)(?:a(\d+))?")
_FRAGMENT = re.compile(r"p(\d+)")
_HEX_64 = {"fingerprint", "contract", "profile", "require_profile"}
"""Fields of 64 hex digits: one digit stands for 64 of it."""


class ScriptError(Exception):
    """The script itself is wrong, whatever the coordinator does."""


@attrs.define
class Arguments:
    """What stands behind a command's word. Commands take what they use; whatever is left is an error."""

    learners: list[str] = attrs.field(factory=list)
    rounds: list[str] = attrs.field(factory=list)
    fragments: list[str] = attrs.field(factory=list)
    words: list[str] = attrs.field(factory=list)
    fields: dict[str, str] = attrs.field(factory=dict)

    @classmethod
    def of(cls, text: str) -> Arguments:
        result = cls()
        for token in _TOKEN.findall(text):
            name, equals, value = token.partition("=")
            if equals:
                if name in result.fields:
                    raise ScriptError(f"{name} is given twice")
                result.fields[name] = value.strip('"')
            elif _LEARNER.fullmatch(token):
                result.learners.append(token)
            elif _ROUND.fullmatch(token):
                result.rounds.append(token)
            elif _FRAGMENT.fullmatch(token):
                result.fragments.append(token)
            else:
                result.words.append(token)
        return result

    def take(self, name: str) -> Any:
        """Take all of one form."""
        value = getattr(self, name)
        setattr(self, name, type(value)())
        return value

    def take_fields(self, cls: Any) -> dict[str, Any]:
        """Take the values of what are fields of ``cls``."""
        kinds = _kinds(cls)
        known = set(attrs.fields_dict(cls)) & set(self.fields)
        return {name: _value(name, kinds[name], self.fields.pop(name)) for name in sorted(known)}

    def check_taken(self) -> None:
        for name in attrs.fields_dict(Arguments):
            if left := getattr(self, name):
                raise ScriptError(f"it has no use for {' '.join(left)}")


_kinds = cache(get_type_hints)


def _value(name: str, kind: Any, text: str) -> Any:
    """A field's value, by the field's type."""
    options = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    if text == "none" and NoneType in options:
        return None
    read = _READERS.get(options[0])
    if read is None:
        raise ScriptError(f"{name} cannot be given in a script")
    try:
        value = read(text)
    except (ValueError, KeyError):
        raise ScriptError(f"{name}={text}: expected {options[0].__name__}") from None
    return value * 64 if name in _HEX_64 and len(text) == 1 else value


_READERS: dict[Any, Callable[[str], Any]] = {
    bool: {"true": True, "false": False}.__getitem__,
    int: int,
    float: float,
    str: str,
    tuple[int, ...]: lambda text: tuple(int(part) for part in text.split(",") if part),
}


def _written(fields: dict[str, str]) -> str:
    """Fields as a script writes them."""
    return "".join(f' {name}="{text}"' for name, text in fields.items())


class Stage:
    """Carries out commands; holds the session that the script talks to."""

    def __init__(self) -> None:
        self.session: TapedSession | None = None
        self.shown: list[str] = []
        """Lines that the present command has given so far."""

    def run(self, text: str) -> list[str]:
        """Carry out one command; return its lines."""
        self.shown = []
        self._run(text)
        return self.shown

    def _run(self, text: str) -> None:
        word, _, rest = text.partition(" ")
        if word not in COMMANDS and word not in ev.EVENTS:
            raise ScriptError("unknown command")
        if self.session is None and word != "session":
            raise ScriptError("the first command is session")
        arguments = Arguments.of(rest)
        if "all" in arguments.words:
            arguments.words.remove("all")
            arguments.learners += map(str, range(self._session.config.num_learners))
        if word in COMMANDS:
            COMMANDS[word](self, arguments)
        else:
            self._events(ev.EVENTS[word], arguments)
        arguments.check_taken()

    @property
    def _session(self) -> TapedSession:
        assert self.session is not None
        return self.session

    def _show(self, act: Callable[[], Any]) -> None:
        before = len(self._session.decisions)
        act()
        self.shown += map(decision_line, self._session.decisions[before:])

    # Events.

    def _events(self, cls: type[ev.Event], arguments: Arguments) -> None:
        """One event for each round, learner and fragment that is named."""
        known = set(attrs.fields_dict(cls)) - {"at"}
        terms = self._session.terms
        if cls is ev.HelloReceived:
            terms = attrs.evolve(terms, **arguments.take_fields(SessionTerms))
        given = arguments.take_fields(cls)
        for subject in self._subjects(known, arguments):
            who = self._connection(cls, subject.pop("connection")) if "connection" in subject else {}
            subject = {**subject, **who}
            defaults = self._defaults(cls.kind, subject)
            fields = {**{name: defaults[name] for name in known & set(defaults)}, **subject, **given}
            if cls is ev.HelloReceived:
                fields["terms"] = terms
            if missing := sorted(known - set(fields) - set(later_fields(cls))):
                raise ScriptError(f"it needs {', '.join(missing)}")
            event = cls(**{"at": self._session.at, **fields})
            self._show(lambda event=event: self._session.feed(event))  # type: ignore[misc]

    def _subjects(self, known: set[str], arguments: Arguments) -> Iterator[dict[str, Any]]:
        """Who and what each event is about."""
        rounds = (
            [self._attempt(token, known) for token in arguments.take("rounds")] if "step" in known else []
        )
        learners = arguments.take("learners") if "learner" in known else []
        fragments = arguments.take("fragments") if "fragment" in known else []
        for round_ in rounds or [{}]:
            for connection in learners or [None]:
                for fragment in fragments or [None]:
                    subject = dict(round_)
                    if connection is not None:
                        subject["connection"] = connection
                    if fragment is not None:
                        subject["fragment"] = int(fragment[1:])
                    yield subject

    def _attempt(self, token: str, known: set[str]) -> dict[str, Any]:
        """``r5a2``; ``r5`` alone is its present attempt."""
        found = _ROUND.fullmatch(token)
        assert found is not None
        at_step = int(found[1])
        if "attempt" not in known:
            return {"step": at_step}
        round_ = self._session.state.find(at_step)
        present = round_.attempt if round_ else 1
        return {"step": at_step, "attempt": int(found[2]) if found[2] else present}

    def _connection(self, cls: type[ev.Event], token: str) -> dict[str, Any]:
        """``1'2``; ``1`` alone is its newest connection, and in a HELLO a new one."""
        found = _LEARNER.fullmatch(token)
        assert found is not None
        learner, dials = int(found[1]), self._session.dials
        if found[2]:
            dial = int(found[2])
        else:
            dial = dials.get(learner, 0) + 1 if cls is ev.HelloReceived else dials.get(learner, 1)
        if cls is ev.HelloReceived:
            dials[learner] = max(dial, dials.get(learner, 0))
        return {"learner": learner, "generation": generation(learner, dial)}

    def _defaults(self, kind: str, subject: dict[str, Any]) -> dict[str, Any]:
        """What an obedient world would say."""
        session = self._session
        at_step, learner = subject.get("step", 0), subject.get("learner", 0)
        match kind:
            case "hello_received":
                return {"address": f"10.0.0.{learner}:5000"}
            case "learner_left":
                return {"reason": "EOF"}
            case "fragment_initialised":
                source = {"learner": 0, "generation": session.gen(0)}
                return {**source, "digest": f"{subject.get('fragment', 0):032x}", "finite": True}
            case "push_offered":
                session.local_steps[learner] = session.local_steps.get(learner, 0) + 1
                round_ = session.state.find(at_step)
                work = {"local_step": session.local_steps[learner], "c_steps": 10, "c_tokens": 100}
                return {
                    **self._payload(at_step),
                    **work,
                    "base_version": round_.base_version if round_ else 0,
                }
            case "push_received":
                content = {"digest": "d" * 32, "finite": True, "norm": 1.0, "cosine_to_momentum": None}
                return {**self._payload(at_step), **content}
            case "upload_progress":
                return {"received_bytes": 1}
            case "merge_finished":
                return {"finite": True, "gradient_norm": 0.5, "corrected": (), "seconds": 0.0}
            case "merge_failed" | "svd_pool_poisoned":
                return {"message": "worker died"}
            case "outer_step_applied":
                digest = f"{at_step:032x}"
                return {"finite": True, "params_digest": digest, "momentum_digest": digest, "seconds": 0.0}
            case "checkpoint_written" | "checkpoint_failed":
                writing = {} if session.state.writing is None else {"step": session.state.writing}
                return {**writing, "written_bytes": 100, "seconds": 0.0, "message": "disk full"}
            case "final_ack_received":
                return {"step": session.state.step}
            case "budget_reported":
                return {"local_steps": session.state.config.learner_budget_steps or 0}
            case "stop_requested":
                return {"signal": "SIGTERM"}
            case _:
                return {}

    def _payload(self, at_step: int) -> dict[str, Any]:
        return {"fragment": (at_step - 1) % self._session.terms.num_fragments, "payload_bytes": 64}

    # Beginnings.

    def begin(self, arguments: Arguments) -> None:
        """A new session; the tape of an earlier one must replay first."""
        if self.session is not None:
            self.session.check_again()
        fields = arguments.fields
        for short, long in (("learners", "num_learners"), ("require_fragments", "num_fragments")):
            if short in fields:
                fields[long] = fields.pop(short)
        num_fragments = fields.pop("fragments", "2")
        settings = {"num_learners": 2, "total_steps": 100, **arguments.take_fields(CoreConfig)}
        num_learners = settings["num_learners"]
        settings = {
            "quorum": num_learners // 2 + 1,
            "wait_for": num_learners,
            "sync_interval_steps": 0.0,
            "closing_sweep": "off",
            # Of a configuration that states both, the sentences do not speak of the outer step.
            **({} if "outer" in settings else {"outer_lr": 0.7, "outer_momentum": 0.9}),
            **settings,
        }
        stated = {"dtype": "bf16", "fingerprint": "f" * 64, "contract": "c" * 64}
        stated.update(arguments.take_fields(SessionTerms))
        self.session = TapedSession(
            CoreConfig(**settings), SessionTerms(num_fragments=int(num_fragments), **stated)
        )

    def resume(self, arguments: Arguments) -> None:
        """A start from the checkpoint of ``step=``, else from the newest durable one of this session."""
        session = self._session
        at_step = arguments.fields.pop("step", None)
        if ledger := arguments.fields.pop("ledger", ""):
            contributors = tuple(
                LedgerEntry(learner=int(learner), merges=1, c_steps=10, c_tokens=100)
                for learner in ledger.split(",")
            )
        settings = arguments.take_fields(CoreConfig)
        settings.setdefault("wait_for", settings.get("quorum", session.config.quorum))
        changes = arguments.take_fields(ev.SessionResumed)
        if ledger:
            changes["ledger"] = contributors
        event = session.resumption(
            None if at_step is None else int(at_step), attrs.evolve(session.config, **settings), **changes
        )
        self._show(lambda: session.feed(event))

    # Time.

    def wait(self, arguments: Arguments) -> None:
        """That many seconds pass."""
        self._session.wait(self._number(arguments))

    def move(self, arguments: Arguments) -> None:
        """Time goes on to this moment."""
        seconds = self._number(arguments) - self._session.at
        if seconds < 0:
            raise ScriptError(f"it is {number(self._session.at)} already")
        self._session.wait(seconds)

    def _number(self, arguments: Arguments) -> float:
        try:
            # A whole number has the form of a learner.
            (value,) = map(float, arguments.take("learners") + arguments.take("words"))
        except ValueError:
            raise ScriptError("it takes one number of seconds") from None
        return value

    def fire(self, arguments: Arguments) -> None:
        """Time goes on to the next deadline, and its event is told."""
        timer = next_timer(self._session.state)
        if timer is None:
            raise ScriptError("no deadline is armed")
        self.shown.append(f"> {event_line(timer.event)}")
        self._show(self._session.fire)

    # Words for what goes together.

    def join(self, arguments: Arguments) -> None:
        """A learner dials, and all its sockets are attached."""
        terms = _written(arguments.take("fields"))
        for learner in arguments.take("learners"):
            self._run(f"hello_received {learner}{terms}")
            self._run(f"learner_joined {learner}")

    def init(self, arguments: Arguments) -> None:
        """Learner 0 sends every fragment."""
        fragments = " ".join(f"p{p}" for p in range(self._session.terms.num_fragments))
        self._run(f"fragment_initialised {fragments}")

    def start(self, arguments: Arguments) -> None:
        """The learners named, or all, join, learner 0 sends every fragment, and step 0 is durable."""
        self._run(f"join {' '.join(arguments.take('learners')) or 'all'}")
        self._run("init")
        self._run("checkpoint_written")

    def push(self, arguments: Arguments) -> None:
        """A push is offered and, when admitted, received; takes fields of either event."""
        fields = arguments.take("fields")
        learners = arguments.take("learners")
        for round_ in arguments.take("rounds"):
            for learner in learners:
                self._push(learner, round_, fields)

    def _push(self, learner: str, round_: str, fields: dict[str, str]) -> None:
        offered, received = set(attrs.fields_dict(ev.PushOffered)), set(attrs.fields_dict(ev.PushReceived))
        header = {name: text for name, text in fields.items() if name in offered or name not in received}
        content = {name: text for name, text in fields.items() if name in received}
        self._run(f"push_offered {learner} {round_}{_written(header)}")
        if any(decision.kind == "push_admitted" for decision in self._session.last):
            self._run(f"push_received {learner} {round_}{_written(content)}")

    def finish(self, arguments: Arguments) -> None:
        """What was ordered for these rounds is done: merge, outer step, checkpoint."""
        for token in arguments.take("rounds"):
            if self._open(token).status is Status.MERGING:
                self._run(f"merge_finished {token}")
            if (status := self._open(token).status) is not Status.COMMITTING:
                raise ScriptError(f"{token} is {status}: its commit was not ordered")
            self._run(f"outer_step_applied {token}")
            if self._session.state.writing is not None:
                self._run("checkpoint_written")

    def commit(self, arguments: Arguments) -> None:
        """Whoever owes these rounds an answer gives it, and they are finished."""
        for token in arguments.take("rounds"):
            round_ = self._open(token)
            for learner, member in sorted(round_.members.items()):
                if round_.owes(learner, member.generation):
                    self._push(f"{learner}'{int(member.generation[8:], 16)}", token, {})
            self._run(f"finish {token}")

    def _open(self, token: str) -> Round:
        at_step = self._attempt(token, {"step"})["step"]
        round_ = self._session.state.find(at_step)
        if round_ is None:
            raise ScriptError(f"{token} is not open")
        return round_

    # Questions.

    def status(self, arguments: Arguments) -> None:
        """The status line."""
        self.shown.append(waiting_for(self._session.state, self._session.at))

    def estimates(self, arguments: Arguments) -> None:
        """The smoothed times."""
        state = self._session.state
        for learner, link in sorted(state.links.items()):
            self.shown.append(f"{learner}: step {number(link.xi_step)}, quorum {number(link.xi_quorum)}")
        self.shown.append(f"sync {number(state.xi_sync)}")

    def ledger(self, arguments: Arguments) -> None:
        """What each learner has contributed to committed rounds."""
        for learner, entry in sorted(self._session.state.ledger.items()):
            self.shown.append(
                f"{learner}: {entry.merges} merges, {entry.c_steps} steps, {entry.c_tokens} tokens"
            )


COMMANDS: dict[str, Callable[[Stage, Arguments], None]] = {
    "session": Stage.begin,
    ev.SessionResumed.kind: Stage.resume,
    "wait": Stage.wait,
    "at": Stage.move,
    "fire": Stage.fire,
    "join": Stage.join,
    "init": Stage.init,
    "start": Stage.start,
    "push": Stage.push,
    "finish": Stage.finish,
    "commit": Stage.commit,
    "status": Stage.status,
    "estimates": Stage.estimates,
    "ledger": Stage.ledger,
}
"""Every command that is not just an event by its name."""

QUESTIONS = frozenset({"status", "estimates", "ledger"})
"""Commands that change nothing, so that there is no state to show again."""
