"""``report.md``: what came out, in tables that a person reads from top to bottom."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from comparing.summary import perplexity

PUBLISHED = (
    ("H about 24, stock", "+0.5 %"),
    ("H about 2, stock", "+9 %"),
    ("H about 2, direct-rda", "+3 %"),
    ("27B model, 256 steps, H about 42, stock", "+9.9 %"),
    ("27B model, 256 steps, H about 42, direct-rda", "+0.6 %"),
)
"""Figures of others, over their own synchronous runs: other models, rows and machines."""

MEASURED = (
    ("interval_steps", "H", 1.0, ".1f"),
    ("merges_per_fragment", "merges per fragment", 1.0, ".1f"),
    ("in_flight_steps", "in flight, steps", 1.0, ".1f"),
    ("pushes", "pushes", 1.0, ".0f"),
    ("corrected", "corrected", 1.0, ".1f"),
    ("tokens_per_push", "tokens per push", 1.0, ",.0f"),
    ("participation", "took part", 100.0, ".1f"),
    ("staleness", "staleness", 1.0, ".2f"),
    ("cosine_to_momentum", "cosine", 1.0, "+.2f"),
    ("pushed_bytes", "pushed, MB", 1e-6, ",.2f"),
    ("target_density", "targets, %", 100.0, ".1f"),
    ("tokens_per_second", "tokens/s", 1.0, ",.0f"),
    ("training_seconds", "training, s", 1.0, ",.1f"),
)
"""Figure, heading, factor and format of the table of measured figures."""


def report(config: dict[str, Any], summary: dict[str, Any], failures: Sequence[str] = ()) -> str:
    """Return the report as Markdown."""
    lines = ["# As good as one synchronous group?", ""]
    lines += [*_what(config), ""]
    lines += ["## Held-out loss", ""]
    lines += [*_losses(summary, failures), ""]
    if any(line["pairs"] for line in summary["arms"]):
        lines += ["![Held-out loss beside the synchronous group](losses.png)", ""]
        lines += ["## Seed by seed", "", *_seeds(summary), ""]
        lines += ["## What the tapes and the learners' logs say", ""]
        lines += [*_measured(summary), "", "![Training loss against tokens](curves.png)", ""]
    lines += ["## Beside figures of others", "", *_published(), ""]
    lines += ["## Settings", "", *_settings(config)]
    return "\n".join(lines) + "\n"


def _what(config: dict[str, Any]) -> list[str]:
    recipe = config["recipe"]
    return [
        f"{recipe['token_budget']:,} raw tokens a run in blocks of {recipe['seq_len']}, model "
        f"`{_short(recipe['model'])}`, rows `{_short(recipe['data'])}`, held out "
        f"`{_short(recipe['eval_data'])}`; seeds "
        f"{', '.join(map(str, config['seeds']))}.",
        "",
        "Loss is the cross-entropy per target token of the held-out rows. *Over synchronous* compares the "
        "exported checkpoint of an arm with one synchronous group of as many devices, on the same rows in "
        "the same order, seed by seed; ± is the standard deviation of that over the seeds.",
    ]


def _losses(summary: dict[str, Any], failures: Sequence[str]) -> list[str]:
    rows = []
    if summary["base"] is not None:
        loss = summary["base"]["loss"]
        rows.append(["base", "untrained", f"{loss:.4f}", _perplexity(loss), "", "", ""])
    for name, seeds in summary["baselines"].items():
        if seeds:
            loss = sum(one["loss"] for one in seeds.values()) / len(seeds)
            rows.append([name, "synchronous", f"{loss:.4f}", _perplexity(loss), "", "", str(len(seeds))])
    with_cut_off = any(line["before_finish_percent"] is not None for line in summary["arms"])
    for line in summary["arms"]:
        row = [f"**{line['name']}**", line["what"]]
        if line["loss"] is None:
            rows.append([*row, "", "", "no valid run", "", "0"])
            continue
        spread = line["percent_deviation"]
        percent = f"{line['percent']:+.2f} %" + ("" if spread is None else f" ± {spread:.2f}")
        before = line["before_finish_percent"]
        rows.append(
            [
                *row,
                f"{line['loss']:.4f}",
                _perplexity(line["loss"]),
                percent,
                "" if before is None else f"{before:+.2f} %",
                str(len(line["pairs"])),
            ]
        )
    heads = ["", "what", "loss", "perplexity", "over synchronous", "before its finish", "seeds"]
    if not with_cut_off:
        heads, rows = _without(heads, 5), [_without(row, 5) for row in rows]
    lines = _table(heads, rows)
    for line in summary["arms"]:
        lines += [f"\n**Invalid**, {line['name']}, {why}." for why in line["invalid"]]
    return [*lines, *(f"\n**Failed**, {failure}" for failure in failures)]


def _seeds(summary: dict[str, Any]) -> list[str]:
    seeds = sorted({pair["seed"] for line in summary["arms"] for pair in line["pairs"]})
    rows = []
    for line in summary["arms"]:
        pairs = {pair["seed"]: pair for pair in line["pairs"]}
        cells = [
            f"{pairs[seed]['loss']:.4f} / {pairs[seed]['baseline']:.4f} ({pairs[seed]['percent']:+.2f} %)"
            if seed in pairs
            else ""
            for seed in seeds
        ]
        rows.append([line["name"], *cells])
    return _table(["arm / synchronous", *(f"seed {seed}" for seed in seeds)], rows)


def _measured(summary: dict[str, Any]) -> list[str]:
    rows = []
    for line in summary["arms"]:
        found = line["measured"]
        cells = [
            format(found[name] * factor, form) if name in found else "" for name, _, factor, form in MEASURED
        ]
        rows.append([line["name"], *cells])
    return [
        "Means over the seeds. H is the median number of steps between two merged pushes of one fragment by "
        "one learner; pushes, merges and what follows are those before the finish. In flight are the steps "
        "that a learner took between a push and the merge of it.",
        "",
        *_table(["", *(heading for _, heading, _, _ in MEASURED)], rows),
    ]


def _published() -> list[str]:
    return [
        "Published by others on their models, rows and machines, over their synchronous runs. They say what "
        "size of effect to look for; they are not figures of this software.",
        "",
        *_table(["run", "held-out loss over synchronous"], [list(row) for row in PUBLISHED]),
    ]


def _settings(config: dict[str, Any]) -> list[str]:
    rows = [
        [name, arm["what"], f"`{' '.join(arm['syncer'])}`", f"`{' '.join(arm['learner'])}`"]
        for name, arm in config["arms"].items()
    ]
    recipe = ", ".join(f"{name} {_short(str(value))}" for name, value in config["recipe"].items())
    return [
        *_table(["arm", "what", "syncer", "learners' exchange"], rows),
        "",
        f"Both sides: {recipe}.",
        "",
        f"Yeto {config['machine']['yeto']}, torch {config['machine']['torch']}, "
        f"{config['machine']['cores']} cores, {config['machine']['platform']}.",
    ]


def _table(heads: Iterable[str], rows: Iterable[Sequence[str]]) -> list[str]:
    heads = list(heads)
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def _short(source: str) -> str:
    """Return the end of a path of this machine; a name of a hub as it is."""
    path = Path(source)
    return "/".join(path.parts[-2:]) if path.is_absolute() else source


def _without(cells: list[str], place: int) -> list[str]:
    return cells[:place] + cells[place + 1 :]


def _perplexity(loss: float) -> str:
    return f"{perplexity(loss):,.2f}"
