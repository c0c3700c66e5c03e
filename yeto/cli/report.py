"""``yeto report``: a run as one page that holds everything itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from yeto.cli.common import sigterm_unwinds
from yeto.cli.reading import Reading
from yeto.errors import ConfigError


def report_command(
    tape: Annotated[Path, Parameter(help="The tape; it may still be written.")] = Path("events.jsonl"),
    /,
    *,
    output: Annotated[Path, Parameter(name=["--output", "-o"], help="The page to write.")] = Path(
        "report.html"
    ),
    overwrite: Annotated[bool, Parameter(negative=(), help="Replace a page that is there.")] = False,
    log_jsonl: Annotated[
        tuple[Path, ...],
        Parameter(
            negative=(),
            show_default=False,
            consume_multiple=True,
            help="Logs that the learners wrote (--log-jsonl), for the loss. Default: those in the folder "
            "logs/ beside the tape.",
        ),
    ] = (),
    png: Annotated[
        Path | None,
        Parameter(help="Draw the plots as PNG files into this folder, too; needs pip install 'yeto[plot]'."),
    ] = None,
) -> int:
    """Show a run, going on or over, as one HTML page that needs no network and can be sent to others."""
    logs = log_jsonl or tuple(sorted((tape.parent / "logs").glob("learner-*.jsonl")))
    _check(output, (tape, *logs), overwrite=overwrite)
    if png is not None:
        from yeto.view.report_png import check_folder

        check_folder(png)
    from yeto.view.report import read_data, write_page

    with sigterm_unwinds():
        data = read_data(tape, logs, progress=Reading("yeto report", tape))
        size = write_page(output, data)
        print(f"{output}: {size / 1e6:.1f} MB, {data['moment']['step']} rounds")
        if png is not None:
            from yeto.view.report_png import draw

            for path in draw(data, png):
                print(path)
    return 0


def _check(output: Path, sources: Sequence[Path], *, overwrite: bool) -> None:
    """Refuse what would fail behind the work."""
    if output.is_dir():
        raise ConfigError(f"-o {output}: is a folder; name a file in it")
    if output.exists() and not output.is_file():
        # A page is renamed to its place, and would take that of the device.
        raise ConfigError(f"-o {output}: is a device or a pipe; name a file")
    if output.exists() and not overwrite:
        raise ConfigError(f"-o {output}: exists already; name another file, or add --overwrite")
    for source in sources:
        if output.exists() and source.exists() and output.samefile(source):
            raise ConfigError(f"-o {output}: is what the report is made of; name another file")
    if not output.absolute().parent.is_dir():
        raise ConfigError(f"-o {output}: there is no folder {output.absolute().parent}")
