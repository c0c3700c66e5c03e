"""``yeto checkpoint inspect``: what a checkpoint holds, and whether every file of it is sound."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import attrs
from cyclopts import App, Parameter

if TYPE_CHECKING:
    from yeto.state import Inspection, Manifest

checkpoint_app = App(name="checkpoint", help="Look into checkpoints.")

LABEL_WIDTH = 14


@checkpoint_app.command(name="inspect")
def inspect_command(
    path: Annotated[
        Path, Parameter(help="Checkpoint folder, one of its manifests, or an older single file.")
    ] = Path("yeto-state.ckpt"),
    *,
    json_: Annotated[
        bool, Parameter(name="--json", negative="", help="Print JSON on stdout, and nothing else.")
    ] = False,
) -> int:
    """Show what a checkpoint holds, and read all of it to see whether it is sound.

    Every value is checked against its digest, one fragment in memory at a time; a folder may be in use by a
    syncer meanwhile. Exit code 1 when anything is broken, with the file and the reason.
    """
    # Not at the top: --help need not wait for them.
    from yeto.state import inspect
    from yeto.tape import printable

    found = inspect(path)
    if json_:
        print(json.dumps({**attrs.asdict(found), "valid": found.valid}, indent=2))
    else:
        print("\n".join(printable(line) for line in described(found)))
    return 0 if found.valid else 1


def described(found: Inspection) -> Iterator[str]:
    """Yield the lines that describe a checkpoint."""
    verdict = "sound" if found.valid else f"broken ({len(found.problems)}, see the end)"
    yield f"{found.path}: step {found.step}, {verdict}"
    yield from _facts(found)
    yield ""
    rows = [
        (
            str(part.fragment),
            str(part.version),
            part.mode or "-",
            f"{part.numel:,}",
            f"{part.file_bytes:,}",
            part.file,
            "sound" if part.problem is None else "broken",
        )
        for part in found.fragments
    ]
    yield from _table(("fragment", "version", "mode", "elements", "bytes", "file", ""), rows, left=(2, 5, 6))
    yield ""
    if found.ledger:
        entries = [
            (str(entry.learner), f"{entry.merges:,}", f"{entry.c_steps:,}", f"{entry.c_tokens:,}")
            for entry in found.ledger
        ]
        yield from _table(("learner", "merges", "steps", "tokens"), entries)
    else:
        yield "no learner has contributed yet"
    if found.manifest is not None and found.manifest.settings:
        yield ""
        yield "settings of the syncer that wrote it"
        width = max(map(len, found.manifest.settings))
        for name, value in found.manifest.settings.items():
            yield f"  {name:{width}}  {json.dumps(value)}"
    if found.problems:
        yield ""
        yield "broken:"
        yield from (f"  {problem}" for problem in found.problems)


def _facts(found: Inspection) -> Iterator[str]:
    numel = sum(part.numel for part in found.fragments)
    facts: list[tuple[str, Any]] = [
        ("format", found.format),
        (
            "parameters",
            f"{numel:,} in {len(found.fragments)} fragments; {found.folder_bytes:,} bytes on disk",
        ),
        ("iso backend", found.iso_backend),
        ("fingerprint", found.fingerprint),
        ("contract", found.contract),
        ("look-ahead", _lookahead(found)),
    ]
    if found.manifest is not None:
        facts += _manifest_facts(found.manifest)
        others = [f"{kept.step}{'' if kept.problem is None else ' (broken)'}" for kept in found.kept]
        facts.append(("also kept", f"steps {', '.join(others)}" if others else "none"))
    facts.append(("final marker", "none" if found.final_step is None else f"step {found.final_step}"))
    if found.leftovers:
        facts.append(("half written", ", ".join(found.leftovers)))
    for name, value in facts:
        yield f"  {name:{LABEL_WIDTH}}{'not stated' if value is None else value}"


def _lookahead(found: Inspection) -> str | None:
    """Say which fragments are ahead of the run; None where that is not known of any."""
    ahead = [str(part.fragment) for part in found.fragments if part.lookahead]
    unknown = [str(part.fragment) for part in found.fragments if part.lookahead is None]
    if len(unknown) == len(found.fragments):
        return None
    words = []
    if ahead:
        words.append(f"of Nesterov's momentum, in fragments {', '.join(ahead)}; yeto-export removes it")
    if unknown:
        words.append(f"not stated of fragments {', '.join(unknown)}")
    return "; ".join(words) or "none"


def _manifest_facts(manifest: Manifest) -> Iterator[tuple[str, Any]]:
    yield "written by", f"yeto {manifest.software_version}"
    yield "dtype", manifest.dtype
    yield "profile", manifest.profile
    yield "tape", None if manifest.tape_file is None else f"{manifest.tape_file}, record {manifest.tape_seq}"
    if manifest.finish_target is not None:
        yield "budget finish", f"until step {manifest.finish_target}"
    stated = manifest.training_manifest
    yield "trained", None if stated is None else json.dumps(stated.get("binding"), ensure_ascii=False)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = ()) -> Iterator[str]:
    """Yield aligned lines: columns of ``left`` flush left, numbers flush right."""
    widths = [max(len(line[column]) for line in (header, *rows)) for column in range(len(header))]
    for line in (header, *rows):
        cells = [
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        yield ("  " + "  ".join(cells)).rstrip()
