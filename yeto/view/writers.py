"""Whether a process of this machine is writing a tape.

The writer holds a lock on a file beside the tape. Trying that lock would be in the way of a syncer that
starts at this very moment, so the kernel's table of locks is read instead; where there is none, nobody knows.
"""

from __future__ import annotations

from pathlib import Path

LOCKS = Path("/proc/locks")


def is_written(tape: Path) -> bool | None:
    """Return whether the lock of a tape is held by a process of this machine; None when that is not known."""
    try:
        inode = Path(f"{tape}.lock").stat().st_ino
        table = LOCKS.read_text(encoding="ascii", errors="replace")
    except FileNotFoundError:
        # A tape that was copied has no lock beside it.
        return False if LOCKS.exists() else None
    except OSError:
        return None
    # "1: FLOCK  ADVISORY  WRITE 4711 fe:01:131104 0 EOF". Some file systems state another device there than
    # a file's own, so the inode has to do.
    return any(
        fields[1:2] == ["FLOCK"] and fields[5].rpartition(":")[2] == str(inode)
        for fields in map(str.split, table.splitlines())
        if len(fields) >= 8
    )
