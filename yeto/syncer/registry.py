"""Who is connected: every group that has said HELLO, by its learner id and generation.

The listener puts groups in and takes them out; the dispatcher looks them up when the coordinator orders
something about a member. An order for a group that is not here any more needs nothing: its end has been, or
is about to be, told to the coordinator.
"""

from __future__ import annotations

import trio

from yeto.core.values import Member
from yeto.syncer.group import LearnerGroup


class Registry:
    """The live groups."""

    def __init__(self) -> None:
        """Start empty."""
        self._groups: dict[Member, LearnerGroup] = {}
        self._changed = trio.lowlevel.ParkingLot()

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, group: LearnerGroup) -> bool:
        """Put a group in; False when its generation is taken, so that it cannot be reached by one."""
        if group.member in self._groups:
            return False
        self._groups[group.member] = group
        self._changed.unpark_all()
        return True

    def remove(self, group: LearnerGroup) -> None:
        """Take a group out."""
        if self._groups.get(group.member) is group:
            del self._groups[group.member]
            self._changed.unpark_all()

    def find(self, member: Member) -> LearnerGroup | None:
        """Return the group of a member, or None when it has ended."""
        return self._groups.get(member)

    def has_other(self, group: LearnerGroup) -> bool:
        """Whether the learner of a group has one of another generation, which is not about to end anyway."""
        return any(
            member.learner == group.member.learner and member != group.member and not other.finishing
            for member, other in self._groups.items()
        )

    def groups(self) -> tuple[LearnerGroup, ...]:
        """Return all groups."""
        return tuple(self._groups.values())

    async def wait_for(self, member: Member) -> LearnerGroup:
        """Return the group of a member as soon as there is one; the caller limits the time."""
        while (group := self._groups.get(member)) is None:
            await self._changed.park()
        return group
