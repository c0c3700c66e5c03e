"""Which process of an island this is, as torchrun tells it. Nothing here loads torch."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from yeto.errors import ConfigError

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets for each process it starts, and others may."""

LAUNCHED = "TORCHELASTIC_RUN_ID"
"""What torchrun alone sets."""


@frozen(kw_only=True)
class Ranks:
    """This process's place among those of its island; by default there is only this one."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Its number on its machine, and that of its accelerator."""
    is_one_machine: bool = True

    @property
    def is_head(self) -> bool:
        """Whether this is the rank that talks: to the syncer, to people, to the disk."""
        return self.rank == 0

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Ranks:
        """Return the place that the environment names.

        Raises:
            ConfigError: it names one of several ranks, but not as torchrun does.
        """
        if int(environ.get("WORLD_SIZE") or 1) == 1:
            return cls()
        missing = [name for name in VARIABLES if not environ.get(name)]
        if missing:
            raise ConfigError(
                f"WORLD_SIZE is {environ['WORLD_SIZE']}, but {', '.join(missing)} is not set; start an "
                "island of several ranks with torchrun --nproc-per-node G -m yeto run --role learner …"
            )
        size = int(environ["WORLD_SIZE"])
        return cls(
            rank=int(environ["RANK"]),
            size=size,
            local_rank=int(environ["LOCAL_RANK"]),
            is_one_machine=environ.get("LOCAL_WORLD_SIZE") == str(size),
        )
