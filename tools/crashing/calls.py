"""Between a process and the system: counts the calls that write below a folder, and makes one of them fail.

All that a syncer writes goes through the functions of ``os``, so that is where this stands: code under test
is not changed and needs no seam. Counted are calls that change what a disk holds: making a file, writing,
fsync, cutting, renaming, removing, making a folder. Closing and reading change nothing, so a kill there is a
kill before the next call. Each call belongs to a *part* (tape, checkpoint, marker, locks, the folder itself)
and has a number within it: which thread writes first is chance, the order within a part is not.
"""

from __future__ import annotations

import errno
import os
import signal
import stat
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attrs import frozen

KINDS = ("kill", "short", "enospc", "eio")
FULL = "full"
"""Kind of a fault that the disk brings about, not this module: it has only so many pages."""
ANY = "any"
"""The part of a fault that counts the calls of all parts together."""
ALLOCATING = ("create", "write", "rename", "mkdir")
"""Calls that a full disk refuses. (A rename needs room where the folder has to grow.)"""


@frozen(kw_only=True)
class Fault:
    """What goes wrong, and where.

    ``kill``: SIGKILL before the call; with ``half``, after half of what it was to write. ``short``: the write
    takes half and says so. ``enospc``: the write takes half, and from then on there is no room until the
    process ends. ``eio``: this fsync fails, once.
    """

    kind: str
    part: str
    number: int
    half: bool = False

    def __str__(self) -> str:
        """Return it as ``--point`` takes it, such as ``kill:tape:17:half``."""
        return f"{self.kind}:{self.part}:{self.number}{':half' if self.half else ''}"


@frozen
class Call:
    """One counted call."""

    part: str
    number: int
    op: str
    name: str

    def suffers(self, kind: str) -> bool:
        """Whether a fault of this kind can happen to it."""
        match kind:
            case "kill":
                return True
            case "short":
                return self.op == "write"
            case "enospc":
                return self.op in ALLOCATING
            case _:
                return self.op == "fsync"


def read_calls(path: Path) -> list[Call]:
    """Return the calls that a process wrote down, in their order."""
    if not path.exists():
        return []
    calls = []
    for line in path.read_text(encoding="utf-8").splitlines():
        part, number, op, name = line.split(" ", 3)
        calls.append(Call(part, int(number), op, name))
    return calls


def part_of(name: str) -> str:
    """Return the part that a file below the folder belongs to."""
    if name.endswith(".lock"):
        return "lock"
    if name.startswith("events.jsonl"):
        return "tape"
    if ".ckpt.final" in name:
        return "marker"
    if ".ckpt" in name:
        return "checkpoint"
    return "folder" if name == "." else "export"


class Calls:
    """Replaces the functions of ``os`` in this process; the process is given up afterwards, so for good."""

    def __init__(self, root: Path, log: Path, fault: Fault | None) -> None:
        """Count below ``root``, write every call down in ``log``, bring ``fault`` about."""
        self._root = os.path.abspath(root)
        self._fault = fault
        self._real: dict[str, Any] = {}
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self._names: dict[int, str] = {}
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._is_full = False

    def install(self) -> None:
        """Stand in the way from now on."""
        simple = {"replace": "rename", "rename": "rename", "unlink": "remove", "remove": "remove"}
        for name, op in {**simple, "mkdir": "mkdir", "rmdir": "remove", "truncate": "cut"}.items():
            self._replace(name, self._of_a_path(op))
        self._replace("open", self._open)
        self._replace("close", self._close)
        self._replace("write", self._write)
        self._replace("fsync", self._of_a_file("fsync"))
        self._replace("ftruncate", self._of_a_file("cut"))

    def watch_opens(self) -> None:
        """Count files that are opened to be written without ``os.open``, too; the writing itself is not."""

        def hook(event: str, args: tuple[Any, ...]) -> None:
            if event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
                name = self._name(args[0])
                if name is not None:
                    self._hit("create", name)

        sys.addaudithook(hook)

    def _replace(self, name: str, call: Callable[..., Any]) -> None:
        self._real[name] = getattr(os, name)
        setattr(os, name, lambda *args, **named: call(self._real[name], *args, **named))

    def _name(self, path: Any) -> str | None:
        """Return a path's name below the folder; None when it lies elsewhere."""
        if isinstance(path, int):
            return self._names.get(path)
        path = os.path.abspath(os.fsdecode(path))
        if path == self._root:
            return "."
        return os.path.relpath(path, self._root) if path.startswith(self._root + os.sep) else None

    def _open(self, real: Any, path: Any, flags: int, *args: Any, **named: Any) -> int:
        name = None if "dir_fd" in named else self._name(path)
        # A lock that exists is only opened; so is a tape that is written on.
        if name is not None and flags & os.O_CREAT and not os.path.exists(path):
            self._hit("create", name)
        descriptor: int = real(path, flags, *args, **named)
        if name is not None:
            self._names[descriptor] = name
        return descriptor

    def _close(self, real: Any, descriptor: int) -> None:
        self._names.pop(descriptor, None)
        real(descriptor)

    def _write(self, real: Any, descriptor: int, data: Any) -> int:
        name = self._names.get(descriptor)
        if name is not None:
            half = memoryview(data)[: len(data) // 2]
            match self._hit("write", name, lambda: real(descriptor, half)):
                case "short" if len(half):
                    return int(real(descriptor, half))
        return int(real(descriptor, data))

    def _of_a_path(self, op: str) -> Callable[..., Any]:
        def call(real: Any, path: Any, *args: Any, **named: Any) -> Any:
            # Nothing of a run is named through a folder's descriptor.
            name = None if named.get("dir_fd") is not None else self._name(path)
            if name is not None:
                self._hit(op, name)
            result = real(path, *args, **named)
            if op == "rename" and name is not None:
                to = self._name(args[0])
                self._names = {d: to or n if n == name else n for d, n in self._names.items()}
            return result

        return call

    def _of_a_file(self, op: str) -> Callable[..., Any]:
        def call(real: Any, descriptor: int, *args: Any) -> Any:
            name = self._names.get(descriptor)
            if name is not None:
                self._hit(op, name)
            return real(descriptor, *args)

        return call

    def _hit(self, op: str, name: str, write_half: Callable[[], object] = lambda: None) -> str | None:
        """Count a call, write it down, and let happen to it what is to happen.

        Returns:
            ``short`` when the caller is to do half of it; None when nothing happens.
        """
        with self._lock:
            part = part_of(name)
            self._counts[part] += 1
            self._counts[ANY] += 1
            call = Call(part, self._counts[part], op, name)
            line = f"{call.part} {call.number} {call.op} {call.name}\n".encode()
            self._real["write"](self._log, line)
            if self._is_full and op in ALLOCATING:
                raise _refusal(errno.ENOSPC, name)
            fault = self._fault
            if fault is None or self._counts[fault.part] != fault.number or fault.part not in (part, ANY):
                return None
            if fault.kind == "short" or not call.suffers(fault.kind):
                return "short" if call.suffers(fault.kind) else None
            if fault.half or fault.kind == "enospc":
                write_half()
            if fault.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            self._is_full = fault.kind == "enospc"
            raise _refusal(errno.ENOSPC if self._is_full else errno.EIO, name)


def _refusal(number: int, name: str) -> OSError:
    return OSError(number, os.strerror(number), name)


def snapshot(folder: Path) -> dict[str, bytes]:
    """Return what every file below a folder holds, by its name."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if stat.S_ISREG(path.lstat().st_mode)
    }
