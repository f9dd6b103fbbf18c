"""`Recording`: what a terminal showed, as an animated picture. CSS does the animation; there is no script in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise
from typing import NamedTuple

from tools.svg import Svg

CELL = (8.4, 19.0)
"""Width and height of a character."""
MARGIN = 20
SMOOTH = 0.06
"""Seconds: of frames that follow each other faster, the last one is shown."""
LONGEST = 2.0
"""Seconds for the typing of a command, and for its run: what takes longer is shown faster."""
HOLD = 5.0
"""How long the end is shown before it begins again."""

_COLOURS = {
    "default": "#e6edf3",
    "black": "#6e7681",
    "red": "#ff7b72",
    "green": "#7ee787",
    "brown": "#e3b341",
    "blue": "#79c0ff",
    "magenta": "#d2a8ff",
    "cyan": "#76e3ea",
    "white": "#ffffff",
}
"""By the names of pyte, for which yellow is brown. Brightness is left out."""

_STYLE = """\
.line { visibility: hidden; animation: {length:.2f}s step-end infinite; }
.last { visibility: visible; }
@media (prefers-reduced-motion: reduce) { .line { animation: none; } }
"""


class Run(NamedTuple):
    """Characters of one colour, beginning at a column."""

    column: int
    text: str
    colour: str
    bold: bool


Line = tuple[Run, ...]


class Frame(NamedTuple):
    """The screen at a time. `part` counts commands: each is typed, then runs."""

    time: float
    part: int
    lines: tuple[Line, ...]


class Shown(NamedTuple):
    """A line at a row, from one time to another; at the end: None."""

    row: int
    line: Line
    start: float
    end: float | None


class Recording:
    def __init__(self, columns: int, frames: Sequence[Frame]) -> None:
        self._columns = columns
        self._frames = list(_settled(list(_paced(frames))))
        last = self._frames[-1].lines
        self._rows = max(row for row, line in enumerate(last, 1) if line)

    def text(self) -> list[str]:
        """Every line that was shown."""
        return ["".join(run.text for run in shown.line) for shown in self._shown()]

    def svg(self, title: str) -> Svg:
        length = self._frames[-1].time + HOLD
        style = _STYLE.replace("{length:.2f}", f"{length:.2f}")
        svg = Svg(round(self._columns * CELL[0]) + 2 * MARGIN, round(self._rows * CELL[1]) + 2 * MARGIN, title, style)
        svg.add('<rect width="100%" height="100%" rx="8" fill="#0d1117"/>')
        for number, shown in enumerate(self._shown()):
            last = " last" if shown.end is None else ""
            end = "" if shown.end is None else f"{shown.end / length:.3%}{{visibility:hidden}}"
            begin = f"0%{{visibility:hidden}}{shown.start / length:.3%}{{visibility:visible}}{end}"
            final = f"to{{visibility:{'hidden' if shown.end else 'visible'}}}"
            svg.add(f"<style>@keyframes k{number}{{{begin}{final}}}</style>")
            svg.add(f'<g class="line{last}" style="animation-name:k{number}">{"".join(_spans(shown))}</g>')
        return svg

    def _shown(self) -> Iterator[Shown]:
        """Each line for as long as it is at its row."""
        for row in range(self._rows):
            line: Line = ()
            start = 0.0
            for frame in self._frames:
                if frame.lines[row] != line:
                    if line:
                        yield Shown(row, line, start, frame.time)
                    line, start = frame.lines[row], frame.time
            if line:
                yield Shown(row, line, start, None)


def _settled(frames: Sequence[Frame]) -> Iterator[Frame]:
    """Frames that stay long enough to be seen."""
    for frame, following in zip(frames, [*frames[1:], None], strict=True):
        if following is None or following.time - frame.time >= SMOOTH:
            yield frame


def _paced(frames: Sequence[Frame]) -> Iterator[Frame]:
    """The same from 0 on, with no part that is too long."""
    steps = [after.time - before.time for before, after in pairwise(frames)]
    lengths: dict[int, float] = {}
    for frame, step in zip(frames[1:], steps, strict=True):
        lengths[frame.part] = lengths.get(frame.part, 0) + step
    time = 0.0
    yield frames[0]._replace(time=time)
    for frame, step in zip(frames[1:], steps, strict=True):
        time += step * min(1, LONGEST / lengths[frame.part])
        yield frame._replace(time=time)


def _spans(shown: Shown) -> Iterator[str]:
    y = MARGIN + CELL[1] * (shown.row + 0.75)
    for run in shown.line:
        if run.text.strip():
            x = MARGIN + CELL[0] * run.column
            colour = _COLOURS.get(run.colour.removeprefix("bright"), f"#{run.colour}")
            weight = ' font-weight="600"' if run.bold else ""
            length = f'textLength="{CELL[0] * len(run.text):.1f}"'
            style = f'class="code" fill="{colour}" xml:space="preserve"{weight}'
            yield f'<text x="{x:.1f}" y="{y:.1f}" {length} {style}>{escape(run.text, quote=False)}</text>'
