"""Prints the table of results: with colours on a terminal, as aligned text elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TextIO

from benchmarks.result import Result
from benchmarks.sample import Sample

HEADINGS = ("row", "measured", "ours", "baseline", "ratio", "bar", "")
_LEFT = {0, 1, 6}
_WRAPPED = {1, 3}
"""Columns with text, which may be wrapped on a narrow terminal."""
_COLOURS = {"ok": "green", "over": "bold red", "": ""}


def show(results: Sequence[Result], notes: Sequence[str] = (), file: TextIO | None = None) -> None:
    """Prints the results, then the notes, a line each."""
    out = file or sys.stdout
    if out.isatty():
        _show_rich(results, notes, out)
    else:
        print("\n".join([*text(results), "", *notes]), file=out)


def text(results: Sequence[Result]) -> list[str]:
    """The lines of the table as plain text."""
    rows = [HEADINGS, *map(cells, results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    return ["  ".join(map(_aligned, row, widths, range(len(row)))).rstrip() for row in rows]


def cells(result: Result) -> tuple[str, ...]:
    """The cells of one result."""
    ratio, bar = result.ratio, result.bar
    baseline = "" if result.baseline is None else f"{with_noise(result.baseline, result.unit)} ({result.against})"
    limit = ""
    if bar is not None:
        limit = f"{bar.sign} " + (f"{bar.limit:.2f}×" if bar.on == "ratio" else number(bar.limit, result.unit))
        limit += " more" if bar.on == "difference" else ""
    return (
        result.row,
        result.what,
        with_noise(result.ours, result.unit),
        baseline,
        "" if ratio is None else f"{ratio.median:.2f}×{_noise(ratio)}",
        limit,
        result.verdict,
    )


def with_noise(sample: Sample, unit: str) -> str:
    return number(sample.median, unit) + _noise(sample)


def number(value: float, unit: str) -> str:
    """About three significant digits, with thousands separators."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:,.{digits}f} {unit}"


def _noise(sample: Sample) -> str:
    return f" ±{sample.noise:.0%}" if len(sample.values) > 1 else ""


def _aligned(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column in _LEFT else cell.rjust(width)


def _show_rich(results: Sequence[Result], notes: Sequence[str], out: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for column, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="left" if column in _LEFT else "right", no_wrap=column not in _WRAPPED)
    for result in results:
        *figures, verdict = cells(result)
        plain = "" if result.bar else "dim"
        table.add_row(*(Text(figure, plain) for figure in figures), Text(verdict, _COLOURS[verdict]))
    console = Console(file=out)
    console.print(table)
    for note in notes:
        console.print(note, style="dim", highlight=False)
