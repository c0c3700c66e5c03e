"""``--preset NAME``: a named set of flag values, below every other source of flags.

A flag has the value of the command line, else of the environment, else of the ``--config`` file, else of
the preset, else its default. So a preset is never a mode: each of its values can be given another one, and
what it stands for is what its table says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Final, Literal

from cyclopts import Parameter

if TYPE_CHECKING:
    from cyclopts import App
    from cyclopts.argument import Argument, ArgumentCollection

MILES_SIX_ISLANDS: Final = "miles-six-islands"

PRESETS: Final[Mapping[str, Mapping[str, str]]] = MappingProxyType(
    {
        MILES_SIX_ISLANDS: MappingProxyType(
            {
                "--learners": "6",
                "--quorum": "6",
                "--quorum-timeout-s": "7200",
                "--pipeline": "16",
                "--sync-interval-steps": "24",
                "--delta-correction": "heloco",
                # Learning rate 0.7, momentum 0.9. They are not named, so that another --outer has its own.
                "--outer": "stock",
                "--grace-ms": "1000",
                "--grace-gamma": "0.8",
                "--grace-tau": "2",
                "--iso-backend": "torch-svd",
                "--iso-worker-devices": ",".join(f"cuda:{number}" for number in range(8)),
                # The syncer runs inside the training container, whose Python has all that a worker needs.
                "--iso-worker-python": "python3",
                "--iso-worker-queue-capacity": "16",
                "--mark-final-checkpoint": "true",
            }
        )
    }
)
"""Values by flag. A command takes those of its own flags; a supervisor decides about the mark itself."""

PresetFlag = Annotated[
    Literal["miles-six-islands"] | None,
    Parameter(
        help="A named set of values, below all other sources of flags. miles-six-islands: six learners at "
        "full quorum (timeout 7200 s), pipeline 16, H 24, heloco, outer step stock, grace 1000 ms/0.8/2, "
        "matrices on cuda:0 to cuda:7 (torch-svd, python3, queue 16), with a final marker."
    ),
]


def fill_from_preset(_: App, commands: Sequence[str], arguments: ArgumentCollection) -> None:
    """Give flags that nothing else has said the values of the preset; the last source of an app's flags.

    Raises:
        CycloptsError: there is no such preset.
    """
    from cyclopts import CycloptsError
    from cyclopts.argument import Token

    by_name = {argument.name: argument for argument in arguments}
    chosen = by_name.get("--preset")
    if chosen is None or not chosen.tokens:
        return
    name = chosen.tokens[-1].value
    if name not in PRESETS:
        # Said here, because a flag that it was to bring would be missed first.
        raise CycloptsError(msg=f"--preset {name}: there is none of that name; known: {', '.join(PRESETS)}")
    for flag, value in PRESETS[name].items():
        argument = by_name.get(flag)
        if argument is not None and not argument.tokens and not _is_moot(flag, by_name):
            argument.append(Token(keyword=flag, value=value, source=f"--preset {name}"))


def _is_moot(flag: str, arguments: Mapping[str, Argument]) -> bool:
    """Return whether a value of a preset is of no use beside one that was given: no workers, no devices."""
    backend = arguments.get("--iso-backend")
    given = None if backend is None or not backend.tokens else backend.tokens[-1].value
    return flag == "--iso-worker-devices" and given not in (None, "torch-svd")
